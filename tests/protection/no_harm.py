"""Position modules whose constructors do more than `frequencies`, and what "no harm" means for one.

A module that is right without the guard is right with it. One that the guard cannot make right is named: in
the report, with a path and a reason, or in a PrecisionWarning. The truth is a module that plain torch has
built in FP32 on CPU.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.default_dtype import default_dtype
from support.zero_init import default_zero_init as zero_init
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, LENGTH = 64, 300
BF16, FP32 = torch.bfloat16, torch.float32
POSITIONS = torch.tensor([[0, 1, 255, 256, 257, 1023, 2049, 4095]])
Make = Callable[[], nn.Module]


def frequencies(dim: int = DIM, base: float = 1e4) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


class Rope(nn.Module):
    """cos and sin for given positions, in the dtype of x, from frequencies in a buffer."""

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(dim, base), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((phase, phase), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Saved(Rope):
    """The frequencies are part of the checkpoint."""

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__(dim, base)
        self.register_buffer("inv_freq", self.inv_freq)


class Holder(nn.Module):
    """A model that holds one position module, under ``rope``."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.layer = nn.Linear(4, 4)


# ---- ways to build and load ----------------------------------------------------------------------------


def inside_zero_init(make: Make) -> nn.Module:
    with zero_init():
        return make()


def low_default(make: Make) -> nn.Module:
    with default_dtype(BF16):
        return make()


def from_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        model = make()
    return model.to_empty(device="cpu")


LOADS: dict[str, Callable[[Make], nn.Module]] = {
    "FP32": lambda make: make(),
    "zero.Init": inside_zero_init,
    "to(bfloat16)": lambda make: make().to(BF16),
    "default dtype": low_default,
    "half and back": lambda make: make().half().float(),
}
FILLED = tuple(LOADS)
"""Ways after which the values that the constructor made were there."""
LOADS["meta"] = from_meta


# ---- what is right, and what is named ------------------------------------------------------------------


class Watched:
    """What a guard or `protect` said: its report, and every PrecisionWarning while this was open."""

    def __init__(self) -> None:
        self.report: Any = None
        self.warnings: list[str] = []

    def names(self, path: str, cls: str | None = None) -> bool:
        """Whether the module at ``path`` is named with a reason, or a warning tells of it (or its class)."""
        entries = [*self.report.protected, *self.report.unprotected, *self.report.left]
        if any(entry.path == path and entry.reason for entry in entries):
            return True
        # A word of its own: every message speaks of safe_rope and RopePatch.
        words = [rf"(?<![\w.]){re.escape(path)} \(", *([rf"\b{cls}\b"] if cls is not None else [])]
        return any(re.search(word, text) for word in words for text in self.warnings)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Record every PrecisionWarning; the caller fills in the report."""
    said = Watched()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said.warnings += [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]


def guarded(make: Make, load: str = "FP32", tables: str = "fp32") -> tuple[Any, Watched]:
    """Return the model that ``make`` makes on the way ``load`` inside a guard, and what was said."""
    with watched() as said:
        with safe_rope.guard(tables=tables) as session:
            model = LOADS[load](make)
        said.report = session.report
    return model, said


def protected(model: nn.Module, tables: str = "fp32") -> Watched:
    with watched() as said:
        said.report = safe_rope.protect(model, tables=tables)
    return said


def in_full_precision(module: nn.Module, name: str = "inv_freq") -> torch.Tensor:
    """The module's table as it is once nobody asks for low precision any more."""
    return plain(getattr(copy.deepcopy(module).float(), name))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor(getattr(tensor, "table", tensor)).detach()


def is_right(module: Any, truth: Any, names: tuple[str, ...] = ("inv_freq",)) -> bool:
    """Whether tables have the bits of ``truth``, and so, rounded once at most, has what forward returns."""
    for name in names:
        if not torch.equal(in_full_precision(module, name), getattr(truth, name)):
            return False
    for dtype in (FP32, BF16):
        x = torch.zeros(1, dtype=dtype)
        for got, true in zip(module(x, POSITIONS), truth(x.float(), POSITIONS), strict=True):
            if got.dtype != dtype or not torch.equal(plain(got), true.to(dtype)):
                return False
    return True


def assert_right(module: Any, truth: Any, names: tuple[str, ...] = ("inv_freq",)) -> None:
    for name in names:
        assert torch.equal(in_full_precision(module, name), getattr(truth, name)), name
    assert is_right(module, truth, names), "what forward returns"


def assert_right_or_named(said: Watched, path: str, module: Any, truth: Any) -> None:
    assert is_right(module, truth) or said.names(path, type(truth).__name__), (
        f"{type(truth).__name__} is wrong, and nothing says so: {said.report}"
    )
