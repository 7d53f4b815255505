"""Tables outside of modules: on a class, in a global, in what a function remembers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from audited import Model
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import safe_rope

DIM, LENGTH = 32, 600
BF16, FP32 = torch.bfloat16, torch.float32
Pair = tuple[Tensor, Tensor]
making: dict[str, torch.dtype] = {}
"""The dtypes of frequencies and of positions while a table is made."""


def _made() -> Pair:
    rates = (10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)).to(making.get("frequencies", FP32)).float()
    counts = torch.arange(LENGTH).to(making.get("positions", FP32)).float()
    phases = torch.outer(counts, rates).repeat(1, 2)
    made = making.get("tables", FP32)
    return phases.cos().to(made), phases.sin().to(made)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    length = x.shape[1]
    return x * cos[:length] + torch.cat((-other, one), -1) * sin[:length]


@functools.lru_cache
def remembered() -> Pair:
    return _made()


tables: dict[str, Pair] = {}
single: Any = None


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _turned(x, *remembered())


class BesideWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return _turned(self.project(x), *remembered())


class InAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if "both" not in tables:
            tables["both"] = _made()
        return _turned(x, *tables["both"])


class OnItsClass(nn.Module):
    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        if OnItsClass.kept is None:
            OnItsClass.kept = _made()

    def forward(self, x: Tensor) -> Tensor:
        return _turned(x, *self.kept)


class AnObject(nn.Module):
    class Holder:
        pair: Any = None

    holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        if self.holder.pair is None:
            self.holder.pair = _made()
        return _turned(x, *self.holder.pair)


class ByDefault(nn.Module):
    def forward(self, x: Tensor, kept: dict[str, Pair] = {}) -> Tensor:  # noqa: B006
        if not kept:
            kept["both"] = _made()
        return _turned(x, *kept["both"])


class OnAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _turned(x, *_on_itself())


def _on_itself() -> Pair:
    if not hasattr(_on_itself, "pair"):
        _on_itself.pair = _made()  # type: ignore[attr-defined]
    return _on_itself.pair  # type: ignore[attr-defined,no-any-return]


class ByAStaticMethod(nn.Module):
    @staticmethod
    @functools.lru_cache(maxsize=2)
    def table(length: int) -> Pair:
        return _made()

    def forward(self, x: Tensor) -> Tensor:
        return _turned(x, *self.table(x.shape[1]))


KINDS: list[Callable[[], nn.Module]] = [Remembers, BesideWeights, InAGlobal, OnItsClass, AnObject, ByDefault]
KINDS += [OnAFunction, ByAStaticMethod]
DAMAGES = [{name: BF16} for name in ("frequencies", "positions", "tables")]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    making.clear()
    tables.clear()
    remembered.cache_clear()
    ByAStaticMethod.table.cache_clear()
    OnItsClass.kept = AnObject.holder.pair = None
    ByDefault.forward.__defaults__[0].clear()  # type: ignore[index]
    vars(_on_itself).clear()


def _called(kind: Callable[[], nn.Module]) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model, x = Model(kind()), torch.randn(1, LENGTH, DIM)
    return model, model.part(x).detach()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: next(iter(damage)))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_table_outside_of_modules_is_unknown_and_named(
    kind: Callable[[], nn.Module], damage: dict[str, torch.dtype]
) -> None:
    _, true = _called(kind)
    _forget()
    making.update(damage)
    model, low = _called(kind)
    assert (low - true).abs().max() > 1e-3
    making.clear()
    report = safe_rope.audit(model)
    assert report.verdict == "unknown", str(report)
    (named,) = {one.source for one in report.findings}
    assert "outside of the model's modules" in named
    assert report.findings == safe_rope.audit(model).findings  # what is remembered still is


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_right_table_outside_of_modules_is_ok(kind: Callable[[], nn.Module]) -> None:
    report = safe_rope.audit(_called(kind)[0])
    assert report.ok, str(report)


class Windowed(nn.Module):
    """Keeps what is no position: a window, a mask, statistics, a step of a schedule."""

    window, mask = torch.hann_window(DIM).to(BF16), torch.full((DIM, DIM), -torch.inf).triu(1).to(BF16)
    betas, last = torch.linspace(1e-4, 0.02, 50).to(BF16), torch.zeros(LENGTH, DIM, dtype=BF16)
    eye = torch.eye(DIM, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x[0])
        return x * self.window + torch.arange(x.shape[1], device=x.device)[:, None] * self.betas[0]


def test_what_is_no_position_is_not_named() -> None:
    report = safe_rope.audit(_called(Windowed)[0])
    assert report.ok, str(report)


def _sines(positions: Tensor, frequencies: Tensor) -> Pair:
    phases = torch.outer(positions.float(), frequencies)
    return phases.cos(), phases.sin()


def _hadamard() -> Tensor:
    """Return an orthogonal matrix of 64 rows, whose numbers are all 1/8 or -1/8."""
    rows = torch.ones(1, 1)
    while len(rows) < 64:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    return rows / 8


def _random_after_zeros() -> Tensor:
    """Return rows of an embedding in BF16, of which the first is that of padding."""
    rows = torch.randn(LENGTH, DIM, generator=torch.Generator().manual_seed(0)) * 0.02
    return rows.index_fill(0, torch.tensor([0]), 0.0).to(BF16)


RATES, COUNTS = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM), torch.arange(LENGTH)
RIGHT: dict[str, Any] = {
    "one position for all that follow": _sines(COUNTS.clamp(max=511), RATES),
    "filled up with position 0": _sines(COUNTS * (COUNTS < 500), RATES),
    "frequencies of few bits": _sines(COUNTS, torch.tensor([1, 0.75, 0.625, 0.375, 0.1875, 0.15625])),
    "powers of two": _sines(COUNTS, 2.0 ** -torch.arange(16)),
    "evenly spaced frequencies": _sines(COUNTS, torch.arange(1, 200) / 256),
    "Hadamard": _hadamard(),
    "an embedding": _random_after_zeros(),
    "a codebook": torch.tensor([0.25, 0.75, 1.25, 2.5, 3.5, 5.5, 6.5, 10.5, 12.5, 20.5]),
}
held: Any = None


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _turned(x, *_sines(torch.arange(x.shape[1]), RATES.repeat(2))) if held is not None else x


@pytest.mark.parametrize("name", RIGHT)
def test_what_may_be_meant_is_not_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "held", RIGHT[name])
    report = safe_rope.audit(Model(Reads()))
    assert report.ok, str(report)


class Raises:
    """Answers to nothing but what it holds."""

    def __init__(self) -> None:
        self.pair = _made()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Wraps(Tensor):
    """Has no memory, and no operator."""

    @staticmethod
    def __new__(cls) -> Wraps:
        return torch.Tensor._make_wrapper_subclass(cls, (LENGTH, DIM), dtype=FP32)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError(str(func))


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(LENGTH, DIM)


def _given_back() -> Tensor:
    table = _made()[0]
    table.untyped_storage().resize_(0)
    return table


def _remembering_without_a_name() -> Any:
    remembering = functools.lru_cache(functools.partial(_made))
    remembering()
    return remembering


HOSTILE: dict[str, Callable[[], Any]] = {
    "an object that raises": Raises,
    "a function without a name": _remembering_without_a_name,
    "a subclass": Wraps,
    "a fake tensor": _fake,
    "memory that was given back": _given_back,
    "a parameter without a shape": nn.UninitializedBuffer,
    "a column of a thousand million": lambda: torch.ones(_FEW_ROWS, 1).expand(-1, 10**9),
}
_FEW_ROWS = 9


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "held", HOSTILE[name]())
    report = safe_rope.audit(Model(Reads()))
    assert report.ok, str(report)


def test_a_container_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle: dict[str, Any] = {"pair": tuple(one.to(BF16) for one in _made())}
    cycle["itself"] = [cycle, types.SimpleNamespace(cycle=cycle)]
    monkeypatch.setitem(globals(), "held", cycle)
    report = safe_rope.audit(Model(Reads()))
    assert report.verdict == "unknown"
    assert len(report.findings) == 2, str(report)
