"""One part of `tools/lab gpu`, in a process of its own; each returns what it found."""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "gpt_neox", "phi3", "gptj", "esm")
PACKAGES = ("torch", "triton", "transformers", "deepspeed", "liger-kernel", "flash-attn")


def there(device: str) -> dict[str, Any]:
    """What this machine has."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        nccl: Any = torch.cuda.nccl
        found["nccl"] = nccl.version()
    return found


def _pair(name: str, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a small model without the guard and with it, and an input of both."""
    from laboratory.bench.decode import models, own_inputs

    stock, guarded, _, _ = models(name, 4)
    for model in (stock, guarded):
        model.to(device, torch.bfloat16).eval()
    inputs = own_inputs(stock, device)
    if inputs is None:
        raise LookupError(f"{name} takes no input that is known")
    return stock, guarded, inputs


def _each(device: str) -> Iterator[tuple[str, int, Any, dict[str, Any]]]:
    """Yield both models of each family: a name, which it is (1 is guarded), itself and its input."""
    for name in FAMILIES:
        *both, inputs = _pair(name, device)
        for which, kind in enumerate(("stock", "guarded")):
            yield f"{name}, {kind}", which, both[which], inputs


@torch.no_grad()
def waits(device: str) -> dict[str, Any]:
    """Whether a forward of a guarded model ever waits for the device where the stock one does not."""
    found: dict[str, Any] = {}
    for name, _, model, inputs in _each(device):
        model(**inputs)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(**inputs)
            found[name] = "no"
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return found


@torch.no_grad()
def launches(device: str) -> dict[str, Any]:
    """How many operators a forward calls, and how many kernels it launches."""
    from laboratory.bench.decode import WARM_UP, as_it_is_alone, operators

    found: dict[str, Any] = {}
    for name, which, model, inputs in _each(device):
        with as_it_is_alone(which):
            for _ in range(WARM_UP):
                model(**inputs)
            row: dict[str, Any] = {"operators": operators(partial(model, **inputs))[0]}
            if device == "cuda":
                activities = [torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=activities) as profiler:
                    model(**inputs)
                    torch.cuda.synchronize()
                row["kernels"] = sum("CUDA" in str(e.device_type) for e in profiler.events())
        found[name] = row
    return found


@torch.no_grad()
def memory(device: str) -> dict[str, Any]:
    """The largest memory that a forward takes, in bytes: of the device, or of this process."""
    import resource

    found: dict[str, Any] = {}
    for name, _, model, inputs in _each(device):
        model(**inputs)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model(**inputs)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        found[name] = torch.cuda.max_memory_allocated() if device == "cuda" else peak
    return found


@torch.no_grad()
def graphs(device: str) -> dict[str, Any]:
    """Whether a CUDA graph of a guarded forward gives the same bits as the forward itself."""
    found: dict[str, Any] = {}
    for name in FAMILIES:
        _, guarded, inputs = _pair(name, device)
        expected = guarded(**inputs)[0].clone()
        if device != "cuda":
            found[name] = torch.equal(guarded(**inputs)[0], expected)
            continue
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = guarded(**inputs)[0]
            graph.replay()
            found[name] = torch.equal(result, expected)
        except Exception as error:  # one says why, the others go on
            found[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found


@torch.no_grad()
def outputs(device: str) -> dict[str, Any]:
    """How far models are from the stock one in FP32 on a CPU, as a share of its largest output.

    In FP32 the two may differ by what the device's own arithmetic does, in BF16 by rounding; what a guarded
    model adds to the error of the stock one is the figure that matters.
    """
    from laboratory.bench.decode import models, own_inputs, subjects

    found: dict[str, Any] = {}
    for name in subjects():
        try:
            stock, guarded, _, _ = models(name, 2)
            low = None if stock is None else copy.deepcopy(stock).bfloat16()
            inputs = None if low is None else own_inputs(low, "cpu")
            if inputs is None:
                found[name] = "cannot be run small"
                continue
            stock.eval(), guarded.eval()
            inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
            truth = _first(copy.deepcopy(stock)(**inputs)).double()  # what has run may keep tables on the CPU
            row: dict[str, Any] = {}
            for dtype in (torch.float32, torch.bfloat16):
                there = {n: v.to(device, dtype if v.is_floating_point() else None) for n, v in inputs.items()}
                for kind, model in (("stock", stock), ("guarded", guarded)):
                    result = _first(model.to(device, dtype)(**there)).cpu().double()
                    error = float((result - truth).abs().max() / truth.abs().max())
                    row[f"{kind}, {str(dtype).removeprefix('torch.')}"] = float(f"{error:.2e}")
            found[name] = row
        except Exception as error:  # one model says why, the others go on
            found[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found


def _first(output: Any) -> torch.Tensor:
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def zero(device: str) -> dict[str, Any]:
    """Losses of two steps of a guarded Llama, and what the audit says of it, for each stage of ZeRO."""
    return _stages("zero", device)


def autocast(device: str) -> dict[str, Any]:
    """How far the engine of safe_rope.autocast is from DDP under torch.autocast, for each stage of ZeRO."""
    return _stages("autocast", device)


def _stages(what: str, device: str) -> dict[str, Any]:
    import tempfile

    from laboratory.ranks import run_ranks

    ranks = torch.cuda.device_count() if device == "cuda" else 1
    found: dict[str, Any] = {"ranks": ranks}
    env = {"DS_ACCELERATOR": device}
    with tempfile.TemporaryDirectory() as folder:
        for stage in range(4):
            out = Path(folder, str(stage))
            try:
                run_ranks(partial(_rank, what, stage, device, out), ranks=ranks, limit=100, env=env)
                found[f"stage {stage}"] = json.loads(out.read_text())
            except Exception as error:  # one stage says why, the others go on
                found[f"stage {stage}"] = f"{type(error).__name__}: {str(error)[-300:]}"
    return found


def _rank(what: str, stage: int, device: str, out: Path, rank: int) -> list[str | Path]:
    return ["-m", "laboratory.gpu.rank", what, str(stage), device, out]


STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    step.__name__: step for step in (there, waits, launches, memory, graphs, outputs, zero, autocast)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=STEPS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found = STEPS[options.what](options.device)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
