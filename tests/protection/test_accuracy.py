"""A protected model in BF16 is nearer to the model in float64 than stock's; each test prints by how much.

Stock is taken at its best, unless a test says otherwise: its rotary modules stay in FP32, as if every loader
had spared them.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from support import families, survival
from torch import nn

import safe_rope

pytestmark = pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")

SEEDS = range(20)
FAR = 100_000


class TrueRotary(nn.Module):
    """The rotary module of a float64 model: cos and sin as float64 gives them."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = families.reference(self.family, position_ids.flatten().tolist())
        shape = (*position_ids.shape, -1)
        cos, sin = (torch.cat((table, table), dim=-1).view(shape) for table in tables)
        return cos, sin


class Far(nn.Module):
    """A rotary module of 4.36, which takes a length, as if the sequence began at ``start``."""

    def __init__(self, rotary: nn.Module, start: int) -> None:
        super().__init__()
        self.rotary, self.start = rotary, start

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.rotary, TrueRotary):
            return self.rotary(x, torch.arange(self.start, self.start + seq_len))  # type: ignore[no-any-return]
        cos, sin = self.rotary(x, seq_len=self.start + seq_len)
        return cos[self.start :], sin[self.start :]


def _takes_a_length(family: str) -> bool:
    return "seq_len" in inspect.signature(type(survival.stock_module(family)).forward).parameters


def _put_rotary(model: nn.Module, family: str, start: int, new: nn.Module | None = None) -> None:
    """Replace the rotary modules of ``model``, and start them at ``start`` where the call cannot say it."""
    for path, module in families.rotary_modules(model).items():
        parent, _, name = path.rpartition(".")
        rotary = new or module
        if _takes_a_length(family):
            rotary = Far(rotary, start)
        setattr(model.get_submodule(parent), name, rotary)


class Compared:
    """The same weights three times: in float64, and in BF16 with stock tables and with protected ones."""

    def __init__(self, family: str, seed: int, start: int, stock: nn.Module) -> None:
        # Weights large enough for attention to choose; the usual 0.02 leaves it uniform at this size.
        self.low = families.build(family, seed=seed, layers=2, initializer_range=0.1).to(torch.bfloat16)
        self.cast, self.guarded = copy.deepcopy(self.low), copy.deepcopy(self.low)
        safe_rope.protect(self.guarded)
        self.true = copy.deepcopy(self.low).double()
        _put_rotary(self.true, family, start, TrueRotary(family))
        _put_rotary(self.low, family, start, stock)
        _put_rotary(self.cast, family, start)
        _put_rotary(self.guarded, family, start)
        self.family, self.seed, self.start = family, seed, start

    def logits(self, model: Any, length: int) -> torch.Tensor:
        positions = torch.arange(self.start, self.start + length)[None]
        if _takes_a_length(self.family):
            positions = positions - self.start
        ids = survival.tokens(length, batch=1, seed=self.seed)
        with torch.no_grad():
            return model(ids, position_ids=positions).logits  # type: ignore[no-any-return]

    def errors(self, length: int, names: tuple[str, ...]) -> list[float]:
        """Relative RMS error of the logits of each of the models that are named."""
        torch.set_default_dtype(torch.float64)  # 4.36's Mistral makes its mask in the default dtype
        try:
            true = self.logits(self.true, length)
        finally:
            torch.set_default_dtype(torch.float32)
        return [survival.relative_error(self.logits(getattr(self, name), length), true) for name in names]


def _mean_errors(family: str, start: int, seeds: range, *names: str) -> list[float]:
    stock = copy.deepcopy(survival.stock_module(family))
    errors, compared = [], None
    for seed in seeds:
        # The last one is still there when the next is built, so that 4.36's long rows are built once.
        compared, last = Compared(family, seed, start, stock), compared
        errors.append(compared.errors(64, names))
        del last
    return [sum(column) / len(errors) for column in zip(*errors, strict=True)]


@pytest.mark.parametrize("start", [0, FAR])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_rotated_q_and_k_are_nearer_to_float64(family: str, start: int, monkeypatch: Any) -> None:
    length = 1024
    compared = Compared(family, 0, start, copy.deepcopy(survival.stock_module(family)))
    truth = families.reference(family, range(start, start + length))
    errors = {}
    for name, model in (("stock", compared.low), ("guarded", compared.guarded)):
        with monkeypatch.context() as patch:
            calls = survival.record_applications(patch, family)
            compared.logits(model, length)
        pairs = [pair for q, k, _, _, new_q, new_k in calls for pair in ((q, new_q), (k, new_k))]
        assert len(pairs) == 4
        # Only what is rotated: GPT-NeoX passes three quarters of each head through.
        rotary = families.ROTARY_DIM[family]
        measured = [
            survival.relative_error(new[..., :rotary], survival.rotate(old[..., :rotary].double(), truth))
            for old, new in pairs
        ]
        errors[name] = sum(measured) / len(measured)
    factor = errors["stock"] / errors["guarded"]
    print(
        f"{family}: rotated q and k from position {start} are {factor:.2f} times nearer to float64 than stock"
    )
    assert factor >= 1.4


@pytest.mark.parametrize("family", families.ONE_OFTEN)
def test_logits_are_no_farther_from_float64(family: str) -> None:
    stock, guarded = _mean_errors(family, 0, SEEDS, "low", "guarded")
    print(
        f"{family}: logits are {stock / guarded:.3f} times nearer to float64 than stock, mean of {len(SEEDS)}"
    )
    assert guarded <= stock


@pytest.mark.parametrize("family", families.ONE_OFTEN)
def test_logits_far_from_the_start_are_clearly_nearer_to_float64(family: str) -> None:
    stock, guarded = _mean_errors(family, FAR, SEEDS, "low", "guarded")
    print(
        f"{family}: from position {FAR}, logits are {stock / guarded:.3f} times nearer to float64 than stock"
    )
    assert stock / guarded > 1.02


@pytest.mark.parametrize("family", families.ONE_OFTEN)
def test_logits_are_nearer_to_float64_than_those_of_a_stock_model_that_was_cast(family: str) -> None:
    cast, guarded = _mean_errors(family, FAR, range(3), "cast", "guarded")
    print(f"{family}: from position {FAR}, logits are {cast / guarded:.2f} times nearer than after a cast")
    assert cast / guarded > 1.03
