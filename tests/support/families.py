"""Tiny real models of each family, and the truth about their position tables, told without the library.

Importable without deepspeed, for any transformers from 4.36 on. The frequencies below are made when this
file is imported, which must be while nothing is intercepted.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

FAMILIES = ("llama", "mistral", "gpt_neox")
ONE_OFTEN = (FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:]))
"""Those of a test that takes seconds for each: one every time, the others with ``--slow``."""
HEAD_DIM = 128
MAX_POSITIONS = 4096
ROPE_THETA = 10000.0
VOCABULARY = 97
ROTARY_DIM = {"llama": HEAD_DIM, "mistral": HEAD_DIM, "gpt_neox": HEAD_DIM // 4}
POSITIONS = (0, 1, 255, 256, 257, 2047, 2048, 2049, 4095)
"""Where BF16 and FP16 stop counting in ones, and the last position that the models are made for."""


class Tables(NamedTuple):
    """cos and sin, each [positions, rotary_dim // 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def _stock_inv_freq(dim: int) -> torch.Tensor:
    return 1.0 / (ROPE_THETA ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


_INV_FREQ = {family: _stock_inv_freq(dim) for family, dim in ROTARY_DIM.items()}


def config(family: str, *, layers: int = 1, **overrides: Any) -> Any:
    """A tiny config of ``family``: two heads of 128, 4,096 positions."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 2 * HEAD_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    if family == "gpt_neox":
        return transformers.GPTNeoXConfig(**common, rotary_pct=0.25, rotary_emb_base=ROPE_THETA)
    cls = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[family]
    return cls(**common, num_key_value_heads=1, rope_theta=ROPE_THETA)


def model_class(family: str) -> type[Any]:
    """The causal language model of ``family``."""
    return {
        "llama": transformers.LlamaForCausalLM,
        "mistral": transformers.MistralForCausalLM,
        "gpt_neox": transformers.GPTNeoXForCausalLM,
    }[family]


def build(family: str, *, seed: int = 0, layers: int = 1, **overrides: Any) -> Any:
    """A model of ``family`` with weights that depend on ``seed`` only."""
    torch.manual_seed(seed)
    return model_class(family)(config(family, layers=layers, **overrides)).eval()


def reference(family: str, positions: Sequence[int] = POSITIONS) -> Tables:
    """The true tables in float64: the checkpoint's FP32 frequencies times the positions is exact there."""
    phase = torch.tensor(positions, dtype=torch.float64)[:, None] * _INV_FREQ[family].double()
    return Tables(phase.cos(), phase.sin())


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every rotary module of ``model`` (one a layer in 4.36, one a model since), by path."""
    found = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")}
    assert found, f"{type(model).__name__} has no rotary module"
    return found


def running_modules(model: nn.Module) -> list[nn.Module]:
    """The rotary modules that a forward asks: not those of layers where the model has one (4.43 to 4.47)."""
    found = rotary_modules(model)
    depth = min(name.count(".") for name in found)
    return [module for name, module in found.items() if name.count(".") == depth]


def forget_the_length(module: nn.Module, monkeypatch: Any) -> None:
    """Have models built with a class of rotary modules that notes no length, as in transformers 5.0 to 5.12.

    ``module``: one with dynamic NTK of the class that is replaced.
    """
    kind: Any = type(module)

    class Forgetful(kind):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            answer = super().forward(x, position_ids)
            self.max_seq_len_cached = self.original_max_seq_len
            return answer

    Forgetful.__name__ = Forgetful.__qualname__ = kind.__name__
    Forgetful.__module__ = Forgetful.forward.__module__ = kind.__module__
    monkeypatch.setattr(sys.modules[kind.__module__], kind.__name__, Forgetful)


def read_tables(
    module: nn.Module, positions: Sequence[int] = POSITIONS, dtype: torch.dtype = torch.float32
) -> Tables:
    """What ``module`` hands to its attention layers at ``positions``, for activations of ``dtype``."""
    x = torch.zeros(1, 1, 1, HEAD_DIM, dtype=dtype)
    with torch.no_grad():
        if "position_ids" in inspect.signature(module.forward).parameters:
            ids = torch.tensor([list(positions)], dtype=torch.int64)
            cos, sin = (table[0] for table in module(x, ids))
        else:
            cos, sin = (table[list(positions)] for table in module(x, seq_len=max(positions) + 1))
    half = cos.shape[-1] // 2
    assert torch.equal(cos[:, :half], cos[:, half:])
    assert torch.equal(sin[:, :half], sin[:, half:])
    # A protected module's tables are a tensor subclass; what counts is the values.
    return Tables(*(getattr(table, "table", table)[:, :half].clone() for table in (cos, sin)))


@functools.cache
def stock_tables(family: str, positions: Sequence[int] = POSITIONS) -> Tables:
    """The tables of the stock model built in FP32 on CPU. Call it first while nothing is intercepted."""
    (module, *_) = rotary_modules(build(family)).values()
    return read_tables(module, positions)


def ulps(tables: Tables, truth: Tables) -> float:
    """The largest error of cos or sin, in units of FP32's last place at the true value."""
    worst = 0.0
    for values, true in zip(tables, truth, strict=True):
        rounded = true.to(torch.float32).abs()
        unit = torch.nextafter(rounded, torch.tensor(math.inf)).double() - rounded.double()
        # At 0 it is a subnormal, which is 0 once a kernel is loaded that gcc made with fast mathematics.
        unit = unit.clamp(min=torch.finfo(torch.float32).tiny)
        worst = max(worst, _largest((values.double() - true).abs() / unit))
    return worst


def phase_error(tables: Tables, truth: Tables) -> float:
    """The largest error of the angle that cos and sin stand for, in radians (at most pi)."""
    cos, sin = (table.double() for table in tables)
    return _largest(torch.atan2(sin * truth.cos - cos * truth.sin, cos * truth.cos + sin * truth.sin).abs())


def _largest(errors: torch.Tensor) -> float:
    # NaN tables are as wrong as tables can be.
    return float(errors.nan_to_num(nan=math.inf).max())
