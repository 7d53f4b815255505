"""Calls with random lengths of each kind of module, cast to BF16, beside the same one in FP32 unguarded."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import safe_rope
from laboratory.soak.memory import Growth
from laboratory.soak.trial import Trial
from safe_rope.rotation import plain

remote: Any = importlib.import_module("recognition.remote_styles")
set_aside: Any = importlib.import_module("support.one_rank").set_aside
small_models: Any = importlib.import_module("support.small_models")

CALLS = 20_000
"""Of each kind."""
SAMPLES = 40
LIMIT, HEAD = 64, 16
GROWTH = 4.0
"""MB over the second half that are no leak: one small tensor a call would be ten."""
EXACT = 1e-5
"""cos and sin below 256, from FP32 phases, are within this of the exact ones."""


def rope(rope_type: str, **scaling: Any) -> nn.Module:
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD, num_attention_heads=2, max_position_embeddings=LIMIT, rope_parameters=parameters
    )
    modelling = importlib.import_module("transformers.models.llama.modeling_llama")
    made: nn.Module = modelling.LlamaRotaryEmbedding(config)
    return made


def mrope() -> nn.Module:
    modelling = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config: Any = transformers.Qwen2VLConfig().text_config
    config.hidden_size, config.num_attention_heads, config.max_position_embeddings = 2 * HEAD, 2, LIMIT
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    made: nn.Module = modelling.Qwen2VLRotaryEmbedding(config)
    return made


def esm() -> nn.Module:
    made: nn.Module = small_models.GrowingRope()
    return made


def gptj() -> nn.Module:
    made: nn.Module = small_models.build("gptj")
    return made


factors = {
    "short_factor": [1.0 + i / 50 for i in range(HEAD // 2)],
    "long_factor": [2.0 + i / 10 for i in range(HEAD // 2)],
}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "default": lambda: rope("default"),
    "linear": lambda: rope("linear", factor=4.0),
    "dynamic NTK": lambda: rope("dynamic", factor=2.0),
    "yarn": lambda: rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "longrope": lambda: rope("longrope", factor=2.0, original_max_position_embeddings=LIMIT // 2, **factors),
    "llama3": lambda: rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "mrope": mrope,
    "ESM style, rotates q and k": esm,
    "a remote style that caches": lambda: remote.CachedBuffers(HEAD),
    "a remote style, complex": lambda: remote.ComplexAttribute(HEAD, 4 * LIMIT),
    "GPT-J style, a whole model": gptj,
}


def asked(kind: str, module: nn.Module, length: int, seed: int) -> tuple[Any, ...]:
    """What a module of that kind answers for ``length`` positions; FP32 is asked for."""
    if kind.startswith("GPT-J"):
        ids = torch.randint(3, 90, (1, min(length, LIMIT)), generator=torch.Generator().manual_seed(seed))
        return (small_models.logits(module(ids)),)
    if kind == "ESM style, rotates q and k":
        states = torch.randn(1, 2, length, HEAD, generator=torch.Generator().manual_seed(seed))
        return tuple(module(states, states.flip(0)))
    x = torch.zeros(1, 1, dtype=torch.float32)
    if kind.startswith("a remote"):
        return tuple(remote.ask(module, x, length))
    positions = torch.arange(length)[None]
    if kind == "mrope":
        positions = torch.stack([positions, positions // 2, positions % 7])
    return tuple(module(x, positions))


def guarded(make: Callable[[], nn.Module], tables: Any, oracle: nn.Module) -> nn.Module:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with safe_rope.guard(tables=tables, apply="stock"):
            module = make()
    finally:
        torch.set_default_dtype(before)
    module.to(torch.bfloat16)
    if any(True for _ in module.parameters()):  # its weights meet its tables: both are FP32 again
        module.float()
        module.load_state_dict(oracle.state_dict())
    return module.train(False)


@torch.no_grad()
def run(trial: Trial) -> None:
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        oracle = make().train(False)
        count = trial.count(CALLS)
        subjects = {tables: guarded(make, tables, oracle) for tables in ("fp32", "exact")}
        set_aside()
        growth = Growth()
        for number in range(count):
            length = trial.random.choice(
                (1, trial.random.randint(1, LIMIT), trial.random.randint(1, 4 * LIMIT))
            )
            wanted = asked(kind, oracle, length, number)
            tables = ("fp32", "exact")[number % 2]
            if number % 1000 == 999:
                subjects[tables] = copy.deepcopy(subjects[tables])
            if number % 1000 == 499 and not kind.startswith("GPT-J"):
                subjects[tables].to(torch.bfloat16)
            with trial.of(kind, f"call {number}, {tables} tables, {length} positions"):
                compare(asked(kind, subjects[tables], length, number), wanted, tables)
            if (
                kind == "dynamic NTK"
            ):  # its frequencies follow every call: the other one hears of this one, too
                asked(kind, subjects[("exact", "fp32")[number % 2]], length, number)
            if number % max(1, count // SAMPLES) == 0:
                growth.sample()
        trial.measured[f"MB more after {count // 2:,} calls, {kind}"] = round(growth.of_bytes(), 2)
        with trial.of("memory stays flat", kind):
            assert growth.of_bytes() < GROWTH, f"{growth.of_bytes():.1f} MB"


def compare(got: tuple[Any, ...], wanted: tuple[Any, ...], tables: str) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        ours = plain(one)
        assert ours.shape == other.shape, f"{ours.shape} instead of {other.shape}"
        assert ours.dtype == other.dtype, f"{ours.dtype} instead of {other.dtype}"
        if tables == "fp32":
            assert torch.equal(ours, other), f"off by {(ours - other).abs().max()}"
        else:
            off = float((ours - other).abs().max())
            assert off < EXACT * max(1.0, float(other.abs().max())), f"off by {off}"
