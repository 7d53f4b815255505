"""One load path of the demo, in a process of its own: load a Llama, measure its position tables.

Usage: python -m laboratory.demo.worker PATH stock|guarded RESULT.json

What is measured, at the last position p of the model's context and for every frequency of every layer,
against ``p * inv_freq`` in float64, with the inv_freq of a stock FP32 model on CPU that was built before
DeepSpeed or safe_rope touched anything:

cos_error
    the larger of the errors of cos and sin, as the rotary module's own ``forward`` returns them in FP32.
phase_error
    radians. ``forward`` gives the phase only up to whole turns. A module that computes from inv_freq in
    each forward is given the turn that lies nearest to ``p * inv_freq`` of its own inv_freq, so that
    errors of several turns stay visible, and so does what FP32 arithmetic adds. A module with a ready
    table (transformers 4.36) does not say how many turns its table is off: there the error of the table
    is taken within half a turn, and ``at_least`` is set. Such a module rebuilds its table from inv_freq
    as soon as a longer sequence comes, so the error of that phase counts too where it is the larger.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import deepspeed
import torch

from laboratory.rotary import cos_sin, rotary_modules

# Any: what transformers' annotations say differs between the versions that this must run with.
transformers: Any = importlib.import_module("transformers")
LlamaConfig = transformers.LlamaConfig
LlamaForCausalLM = transformers.LlamaForCausalLM

CONTEXT = 4096
Guard = Callable[[], AbstractContextManager[Any]]
Row = dict[str, Any]

DEEPSPEED_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}


def small_config() -> Any:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )


def direct_zero_init(checkpoint: Path, guard: Guard) -> Any:
    """Construct the model class under zero.Init, then fill the partitioned parameters from the checkpoint."""
    state = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    with guard(), deepspeed.zero.Init(config_dict_or_path=DEEPSPEED_CONFIG):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(state[name])
    return model


def zero3_from_pretrained(checkpoint: Path, guard: Guard) -> Any:
    """Load as the Trainer does: transformers sees the ZeRO-3 config and enters zero.Init itself."""
    held_while_loading = transformers.integrations.HfDeepSpeedConfig(DEEPSPEED_CONFIG)
    with guard():
        # Its name since 4.56 is dtype; every version takes the old one.
        model = LlamaForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    del held_while_loading
    return model


def cast_to_bf16(checkpoint: Path, guard: Guard) -> Any:
    """Load in FP32 and cast the whole model."""
    with guard():
        model = LlamaForCausalLM.from_pretrained(checkpoint)
    return model.to(torch.bfloat16)


# The name of a path, how it loads, and whether DeepSpeed trains the model afterwards.
PATHS: dict[str, tuple[str, Callable[[Path, Guard], Any], bool]] = {
    "zero_init": ("deepspeed.zero.Init", direct_zero_init, True),
    "zero3_from_pretrained": ("ZeRO-3 from_pretrained, bf16", zero3_from_pretrained, True),
    "to_bf16": (".to(torch.bfloat16)", cast_to_bf16, False),
}


def train_one_step(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    tokens = torch.arange(32).reshape(1, 32)
    engine.train()
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if not math.isfinite(loss.item()):
        raise ArithmeticError(f"the loss of the training step is {loss.item()}; expected a finite number")
    return engine.module


def measure(model: Any, true_inv_freq: torch.Tensor) -> Row:
    """Return the worst errors over all layers; see the top of this file."""
    position = CONTEXT - 1
    truth = position * true_inv_freq
    worst: Row = {"phase_error": 0.0, "cos_error": 0.0, "at_least": False}
    for module in rotary_modules(model):
        last = (table[-1].double() for table in cos_sin(module, torch.arange(CONTEXT)))
        cos, sin = (row[: len(truth)] for row in last)
        cos_error = torch.maximum((cos - truth.cos()).abs(), (sin - truth.sin()).abs()).max().item()

        own_phase = position * module.inv_freq.double()
        ready_table = hasattr(module, "cos_cached")
        table_error = (nearest_turn(torch.atan2(sin, cos), truth if ready_table else own_phase) - truth).abs()
        phase_error, at_least = table_error.max().item(), ready_table
        own_error = (own_phase - truth).abs().max().item()
        if ready_table and own_error > phase_error:
            phase_error, at_least = own_error, False

        worst["cos_error"] = worse(worst["cos_error"], cos_error)
        if worse(worst["phase_error"], phase_error) != worst["phase_error"]:
            worst.update(phase_error=phase_error, at_least=at_least)
    return worst


def nearest_turn(angle: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``angle`` plus the whole number of turns that brings it nearest to ``target``."""
    turn = 2 * math.pi
    return angle + turn * ((target - angle) / turn).round()


def worse(error: float, other: float) -> float:
    """Return the larger error, where NaN is the largest."""
    return other if math.isnan(other) or other > error else error


def guard_of(kind: str) -> Guard:
    """Return what surrounds a load: the guard where ``kind`` is "guarded", else nothing."""
    if kind == "stock":
        return contextlib.nullcontext
    import safe_rope

    return safe_rope.guard


def run_path(name: str, guard: Guard) -> list[Row]:
    torch.manual_seed(0)
    title, load, trains = PATHS[name]
    pristine = LlamaForCausalLM(small_config())
    true_inv_freq = rotary_modules(pristine)[0].inv_freq.clone().double()

    with tempfile.TemporaryDirectory() as checkpoint:
        pristine.save_pretrained(checkpoint)
        model = load(Path(checkpoint), guard)
    rows = [{"path": title, **measure(model, true_inv_freq)}]
    if trains:
        model = train_one_step(model)
        rows.append({"path": f"{title}, then initialize and a step", **measure(model, true_inv_freq)})
    return rows


def main(name: str, kind: str, result: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    Path(result).write_text(json.dumps(run_path(name, guard_of(kind))))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
