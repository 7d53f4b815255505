"""Which tensors of a model are position tables, told without the library, and whether two models agree.

A position table is a floating or complex tensor that is no parameter and that the constructor computes: it
is the same for every seed, and not one constant. What else is so (statistics of a batch norm, windows and
filters of a spectrogram, constants for clipping) is excluded by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

POSITIONS = (0, 1, 255, 257, 1023, 2049, 4095)
_NO_POSITIONS = re.compile(
    r"running_(mean|var)|num_batches|window$|stft|mel_|filter|fbank|kernel|lowpass|resampl|clip|"
    r"masked_bias|^bias$|mean$|std$|(?<!time)scale|_buffer$|codebook|cluster|quantil|bucket_weight|frame_weights|"
    r"image_(mean|std)|boundar|eye$|biases$|noise|betas|alphas|sigmas|timesteps|taps|fir|anti_alias|attn_mask|mask$|scalar"
)


class Table(NamedTuple):
    """A tensor, and how far another may be from it."""

    values: torch.Tensor
    tolerance: torch.Tensor | float


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every floating tensor of the model that is no parameter: buffers and plain attributes, by path."""
    found = {}
    for path, module in model.named_modules():
        entries: list[tuple[str, Any]] = [*module._buffers.items()]
        for name, value in vars(module).items():
            if name not in ("_buffers", "_parameters", "_modules"):
                entries += _tensors(name, value)
        for name, value in entries:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and _counts(value):
                found[f"{path}.{name}"] = value
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple) and len(value) < 100:
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"{name}[{index}]", item
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            with contextlib.suppress(RuntimeError):  # of a config whose layers differ
                item = getattr(value, field.name, None)
                if isinstance(item, torch.Tensor):
                    yield f"{name}[{field.name}]", item
    elif isinstance(value, dict) and not name.startswith("_") and len(value) < 100:
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                yield f"{name}[{key}]", item


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def position_tables(model: nn.Module, again: nn.Module) -> dict[str, Table]:
    """The position tables that ``model`` stores; ``again`` is the same model with another seed."""
    first, second = stored(model), stored(again)
    tables = {}
    for path, values in first.items():
        name = path.rpartition(".")[2]
        if _NO_POSITIONS.search(name) or values.is_meta or values.numel() < 2:
            continue
        if not is_computed(values, second.get(path)):
            continue
        # Ready-made cos and sin in FP32 are off by what FP32 phases are; exact ones are not.
        rows = values.shape[-2] if re.search(r"(cos|sin)_cached$", name) else 0
        tables[path] = Table(values.detach().cpu().clone(), rows * 2.0**-23)
    return tables


def is_computed(values: torch.Tensor, again: torch.Tensor | None) -> bool:
    """Whether a tensor is the same with another seed, ``again``, and neither one constant nor a mask."""
    if again is None or again.shape != values.shape or not torch.equal(again, values):
        return False
    finite = values[torch.isfinite(values.abs())]
    return finite.numel() > 1 and not bool((finite == finite[0]).all())


def forward_tables(model: nn.Module, every_form: bool = False) -> dict[str, Table]:
    """cos and sin at large positions of every module that is asked for them by position or by length.

    Positions have one axis or three (mrope); without ``every_form`` only the first form that a module takes
    is asked for. A protected module may take more forms than the stock one.
    """
    tables = {}
    for path, module in model.named_modules():
        if any(True for _ in module.parameters()) or len(list(module.children())) > 2:
            continue
        for name, values in _ask(module, every_form):
            tables[f"{path}({name})"] = Table(values, _phase_tolerance(module, values))
    return tables


def _ask(module: nn.Module, every_form: bool) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        names = tuple(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):
        return
    if len(names) < 3 or not ("position_ids" in names or "seq_len" in names):
        return
    layer_types: tuple[Any, ...] = (None,)
    if "layer_type" in names:
        types = [re.sub(r"_?(original_)?inv_freq$", "", name) for name in module._buffers]
        layer_types = tuple(dict.fromkeys(types)) if any(types) else (None,)
    for layer_type in layer_types:
        positions = torch.tensor([POSITIONS], device=_device(module))
        for form, ids in (("", positions), ("3 axes ", positions.expand(3, 1, -1))):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = _call(module, names, layer_type, ids)
            if result is None:
                continue
            label = form if layer_type is None else f"{form}{layer_type} "
            values = result if isinstance(result, tuple) else (result,)
            for index, value in enumerate(values):
                if isinstance(value, torch.Tensor) and _counts(value):
                    yield f"{label}{index}", getattr(value, "table", value).detach().cpu().clone()
            if not every_form:
                break


def _device(module: nn.Module) -> torch.device:
    """Return where a module's tables are."""
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _call(module: nn.Module, names: tuple[str, ...], layer_type: str | None, ids: torch.Tensor) -> Any:
    x = torch.zeros(1, 2, len(POSITIONS), 8, device=ids.device)
    try:
        if "seq_len" in names and "position_ids" not in names:
            tables = module(x, seq_len=POSITIONS[-1] + 1)
            rows = [table.reshape(POSITIONS[-1] + 1, -1)[list(POSITIONS)] for table in tables]
            return tuple(rows)
        if layer_type is not None:
            return module(x, ids, layer_type)
        return module(x, ids)
    except Exception:
        return None


def _phase_tolerance(module: nn.Module, values: torch.Tensor) -> float:
    # FP32 positions times FP32 inv_freq: what a stock model done right is off by, against exact tables.
    scale = float(values.abs().max()) if values.numel() else 1.0
    return max(scale, 1.0) * POSITIONS[-1] * 2.0**-23


def damage(expected: dict[str, Table], actual: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return what is wrong with every table of ``actual`` that is not as expected."""
    wrong = {}
    for path, table in expected.items():
        values = actual.get(path)
        problem = "missing" if values is None else _difference(table, values)
        if problem:
            wrong[path] = problem
    return wrong


def _difference(table: Table, values: torch.Tensor) -> str | None:
    values, problem = comparable(table.values, values)
    if problem:
        return problem
    exact = table.values.to(torch.complex128 if table.values.is_complex() else torch.float64)
    here = values.detach().cpu().to(exact.dtype)
    error = (here - exact).abs().masked_fill(here == exact, 0.0)  # infinity less itself is no number
    allowed = torch.clamp(exact.abs().nan_to_num(posinf=0.0) * 2.0**-22, min=1e-37) + table.tolerance
    if bool((error <= allowed).all()):
        return None
    worst = float(error.nan_to_num(nan=math.inf).max())
    return f"off by {worst:.2g} ({str(values.dtype).removeprefix('torch.')})"


def comparable(expected: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the part of ``values`` where ``expected`` is, and why it cannot be compared, "" if it can."""
    if values.shape != expected.shape and values.dim() == expected.dim():
        # A cache that has grown since, because it was asked for a longer sequence, begins with what it was.
        values = values[tuple(slice(length) for length in expected.shape)]
    if values.shape != expected.shape:
        return values, f"shape {list(values.shape)}, expected {list(expected.shape)}"
    return values, "on meta" if values.is_meta else ""
