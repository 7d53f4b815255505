"""One rank of the training part. Usage: python -m laboratory.soak.training_rank SEED SCALE FOLDER."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import safe_rope
from laboratory.soak.trial import Trial

STEPS, BREAK, LONG = 4, 2, 20
STAGES = (1, 2, 3)
HANGS = 900.0
WAYS = {"with the guard": True, "without": False}


class Case:
    """An engine's stage and dtype, and whether its model is guarded; ``options`` are those of the guard."""

    def __init__(self, stage: int, dtype: str, guarded: bool, **options: Any) -> None:
        self.stage, self.dtype, self.guarded, self.options = stage, dtype, guarded, options

    def ds_config(self, universal: bool) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
                "reduce_bucket_size": 10_000,
            },
            "checkpoint": {"load_universal": universal},
        }

    def engine(self, *, universal: bool = False) -> Any:
        config = self.ds_config(universal)
        torch.manual_seed(0)
        sharded = (
            deepspeed.zero.Init(config_dict_or_path=config) if self.stage == 3 else contextlib.nullcontext()
        )
        guard = safe_rope.guard(**self.options) if self.guarded else contextlib.nullcontext()
        with guard, sharded:
            model = transformers.LlamaForCausalLM(llama_config())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def llama_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        use_cache=False,
    )


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        ids = torch.randint(3, 61, (1, 300), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def ended(engine: Any) -> None:
    engine.destroy()
    gc.collect()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The engine's whole weights, gathered."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(parameters.values()), enabled=engine.zero_optimization_stage() == 3
    ):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())[:5]
    unequal = [name for name in one if not torch.equal(one[name], other[name].to(one[name].dtype))]
    assert not unequal, f"not equal: {unequal[:5]}"


class Resuming:
    """What a run saves halfway, and what becomes of it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        engine = case.engine()
        self.before = train(engine, range(BREAK))
        engine.save_checkpoint(str(folder), tag="half")
        self.weights = weights(engine)
        self.saved_16 = engine.save_16bit_model(str(folder), "whole.bin")
        self.after = train(engine, range(BREAK, STEPS))
        ended(engine)

    def resumed(self, case: Case, *, universal: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = case.engine(universal=universal)
        where, _ = engine.load_checkpoint(str(self.folder), tag="half_universal" if universal else "half")
        assert where is not None, "nothing was loaded"
        loaded = weights(engine)
        losses = train(engine, range(BREAK, STEPS))
        ended(engine)
        return losses, loaded


def main(seed: str, scale: str, where: str) -> None:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(HANGS, exit=True)
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    trial = Trial(int(seed), float(scale))
    for stage in STAGES[: trial.count(len(STAGES))]:
        for dtype in ("float32", "bfloat16"):
            folder = Path(where, f"{stage}-{dtype}")
            resume(trial, stage, dtype, folder)
            torch.distributed.barrier()
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        long(trial, stage)
    Path(where, f"{rank}.json").write_text(json.dumps(trial.result()), encoding="utf-8")


def long(trial: Trial, stage: int) -> None:
    losses = {}
    for name, guarded in WAYS.items():
        engine = Case(stage, "float32", guarded, tables="fp32", apply="stock").engine()
        losses[name] = train(engine, range(LONG))
        ended(engine)
    with trial.of(f"ZeRO {stage}, FP32: stock's losses to the bit over {LONG} steps"):
        assert losses["with the guard"] == losses["without"], list(zip(*losses.values(), strict=True))


def resume(trial: Trial, stage: int, dtype: str, folder: Path) -> None:
    # In FP32 the guard asks for stock's own bits; then one run can go on with what another has saved.
    options = {"tables": "fp32", "apply": "stock"} if dtype == "float32" else {}
    cases = {name: Case(stage, dtype, guarded, **options) for name, guarded in WAYS.items()}
    where = f"ZeRO {stage}, {dtype}"
    # Without a guard zero.Init builds other tables; only then do the losses of the two differ.
    alike = dtype == "float32"
    for saved, case in cases.items():
        run = Resuming(case, folder / saved.replace(" ", "-"))
        with trial.of(f"{where}: save_16bit_model", saved):
            whole(run, case)
        with trial.of(f"{where}: zero_to_fp32", saved):
            full = get_fp32_state_dict_from_zero_checkpoint(str(run.folder), "half")
            assert_equal(run.weights, {name: full[name] for name in run.weights})
            assert all(tensor.dtype == torch.float32 for tensor in full.values())
        for loaded, other in cases.items():
            with trial.of(f"{where}: load_checkpoint", f"saved {saved}, loaded {loaded}"):
                check(run, *run.resumed(other), equal=alike or other is case)
        converted(run)
        for loaded, other in cases.items():
            with trial.of(f"{where}: universal checkpoint", f"saved {saved}, loaded {loaded}"):
                check(run, *run.resumed(other, universal=True), equal=alike or other is case)


def check(run: Resuming, losses: list[float], loaded: dict[str, torch.Tensor], *, equal: bool) -> None:
    assert_equal(run.weights, loaded)
    assert not equal or losses == run.after, f"{losses} instead of {run.after}"


def whole(run: Resuming, case: Case) -> None:
    assert run.saved_16 or case.stage < 3, "nothing was saved"
    file = run.folder / "whole.bin"
    state = torch.load(file, weights_only=True)
    stock = transformers.LlamaForCausalLM(llama_config()).state_dict()
    assert state.keys() == stock.keys(), sorted(state.keys() ^ stock.keys())[:5]
    assert_equal(run.weights, {name: state[name] for name in run.weights})
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{case.dtype}"}


def converted(run: Resuming) -> None:
    """Make a universal checkpoint of what was saved, in a process as a user does."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        source, target = run.folder / "half", run.folder / "half_universal"
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--input_folder", str(source), "--output_folder", str(target)]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        print(done.stdout[-2000:], done.stderr[-2000:])
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
