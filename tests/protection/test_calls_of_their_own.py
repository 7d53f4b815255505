"""Rotary modules that look like the usual ones, and take or read more than those: as without a guard."""

from __future__ import annotations

import contextlib
import contextvars
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope

X, IDS = torch.zeros(1, 2, 50, 32), torch.arange(50)[None]


class Base(nn.Module):
    def __init__(self, dim: int = 32, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        phase = (self.inv_freq[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((phase, phase), -1)
        return both.cos(), both.sin()


class Offset(Base):
    def forward(self, x: Tensor, position_ids: Tensor, offset: int = 0) -> Any:
        return self.turn(position_ids + offset)


class Rows(Base):
    def forward(self, x: Tensor, position_ids: Tensor, seq_len: int | None = None) -> Any:
        return tuple(table[:, :seq_len] for table in self.turn(position_ids))


class Named(Base):
    def forward(self, hidden: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids)


class WithoutX(Base):
    def forward(self, x: Tensor | None = None, position_ids: Tensor = IDS) -> Any:
        return self.turn(position_ids)


class DeviceFirst(Base):
    """As Parler-TTS has it."""

    def forward(self, device_type: Any, position_ids: Tensor) -> Any:
        return self.turn(position_ids)


class ByAttribute(Base):
    offset = 0

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids + self.offset)


class ByClass(Base):
    """Of its class, or of its base's."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids + self.shift)

    shift = 0


class Derived(ByClass):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids)


class ByConfig(Base):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1)

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids * self.config.scale)


SHIFT = 0


class ByGlobal(Base):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids + SHIFT)


class ByMode(Base):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids if self.training else position_ids * 2)


class ByShape(Base):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids + x.shape[-2] - position_ids.shape[-1])


class Noting(Base):
    last = -1

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        self.last = int(position_ids.max())
        return self.turn(position_ids)


class Clamped(Base):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids.clamp(max=4095))


class OneAfterTheOther(Base):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.turn(position_ids + 3 if position_ids.shape[-1] == 1 else position_ids)


class Cached(Base):
    """The tables of transformers 4.36."""

    offset = 0

    def __init__(self, dim: int = 32, max_position_embeddings: int = 64, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        self.max_position_embeddings = max_position_embeddings
        self.grow(max_position_embeddings)

    def grow(self, length: int) -> None:
        self.max_seq_len_cached = length
        phase = torch.outer(torch.arange(length).type_as(self.inv_freq), self.inv_freq)
        both = torch.cat((phase, phase), -1)
        self.register_buffer("cos_cached", both.cos(), persistent=False)
        self.register_buffer("sin_cached", both.sin(), persistent=False)

    def rows(self, x: Tensor, length: int, first: int = 0) -> Any:
        if length + first > self.max_seq_len_cached:
            self.grow(length + first)
        tables = self.cos_cached, self.sin_cached
        return tuple(table[first : length + first].to(x.dtype) for table in tables)


class LengthOfX(Cached):
    def forward(self, x: Tensor, seq_len: int | None = None) -> Any:
        return self.rows(x, x.shape[-2] if seq_len is None else seq_len)


class LengthAndOffset(Cached):
    def forward(self, x: Tensor, seq_len: int | None = None, offset: int = 0) -> Any:
        return self.rows(x, seq_len or 0, offset)


class LengthByAttribute(Cached):
    def forward(self, x: Tensor, seq_len: int | None = None) -> Any:
        return self.rows(x, seq_len or 0, self.offset)


CALLS: dict[str, tuple[type[Base], tuple[Any, ...], dict[str, Any]]] = {
    "offset": (Offset, (X, IDS), {"offset": 7}),
    "offset by place": (Offset, (X, IDS, 7), {}),
    "offset by default": (Offset, (X, IDS), {"offset": 0}),
    "rows": (Rows, (X, IDS), {"seq_len": 20}),
    "x by another name": (Named, (), {"hidden": X, "position_ids": IDS}),
    "no x": (WithoutX, (), {"position_ids": IDS}),
    "nothing": (WithoutX, (), {}),
    "a name of a device": (DeviceFirst, ("cpu", IDS), {}),
    "a device": (DeviceFirst, (torch.device("cpu"), IDS), {}),
    "an attribute": (ByAttribute, (X, IDS), {}),
    "in evaluation": (ByMode, (X, IDS), {}),
    "the shape of x": (ByShape, (torch.zeros(1, 2, 57, 32), IDS), {}),
    "far positions": (Clamped, (X, IDS + 5000), {}),
    "one position": (OneAfterTheOther, (X, IDS[:, 7:8]), {}),
    "something noted": (Noting, (X, IDS), {}),
    "the length of x": (LengthOfX, (X,), {}),
    "a length beyond": (LengthOfX, (X, 90), {}),
    "length and offset": (LengthAndOffset, (X, 50, 7), {}),
    "length and attribute": (LengthByAttribute, (X, 50), {}),
}


class OfAnotherKind(Base):
    """What no sample shows: a forward is written in ``BODIES``, and what it reads is set here later."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.options, self.shift = SimpleNamespace(shift=0), {"shift": 0}, torch.tensor(0)
        self.child, self.called, self.log = Base(), None, list[Any]()


SHIFTS = SimpleNamespace(shift=0)
FIRST: int | None = None
LOCAL = contextvars.ContextVar("LOCAL", default=0)


def shift_of(module: Any) -> Any:
    return getattr(module, "offset", 0)


BODIES = {
    "a helper": lambda self, x, ids: self.turn(ids + shift_of(self)),
    "getattr": lambda self, x, ids: self.turn(ids + getattr(self, "offset", 0)),
    "an object": lambda self, x, ids: self.turn(ids + self.own.shift),
    "a dictionary": lambda self, x, ids: self.turn(ids + self.options["shift"]),
    "a tensor": lambda self, x, ids: self.turn(ids + self.shift),
    "a child": lambda self, x, ids: self.turn(ids + getattr(self.child, "offset", 0)),
    "a function": lambda self, x, ids: self.turn(ids if self.called is None else self.called(ids)),
    "a global object": lambda self, x, ids: self.turn(ids + SHIFTS.shift),
    "a global number": lambda self, x, ids: self.turn(ids + (FIRST or 0)),
    "a context": lambda self, x, ids: self.turn(ids + LOCAL.get()),
    "the mode of gradients": lambda self, x, ids: self.turn(ids + 3 * torch.is_grad_enabled()),
    "negative positions": lambda self, x, ids: self.turn(ids.abs()),
    "fractions": lambda self, x, ids: self.turn(ids.long()),
    "something appended": lambda self, x, ids: (self.log.append(1), self.turn(ids))[1],
    "a list": lambda self, x, ids: list(self.turn(ids)),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_no_sample_shows_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODIES[name]

    code = body.__code__.replace(co_varnames=("self", "x", "position_ids"), co_name="forward")
    forward = types.FunctionType(code, globals(), "forward")
    monkeypatch.setattr(OfAnotherKind, "forward", forward, raising=False)
    stock, module = _built(OfAnotherKind, "stock"), _built(OfAnotherKind, "guard")
    for one in (stock, module):
        one.offset = one.child.offset = one.own.shift = one.options["shift"] = 4
        one.shift, one.called = torch.tensor(4), lambda ids: ids * 2
    monkeypatch.setattr(SHIFTS, "shift", 4)
    monkeypatch.setitem(globals(), "FIRST", 4)
    token = LOCAL.set(4)
    ids = IDS - 10.5 if name == "fractions" else IDS - 10
    expected, got = stock(X, ids), module(X, ids)
    LOCAL.reset(token)
    assert type(got) is type(expected)
    assert all(map(torch.equal, expected, got))
    assert len(stock.log) == len(module.log)


def _built(cls: type[Base], how: str) -> Base:
    with safe_rope.guard(tables="fp32") if how == "guard" else contextlib.nullcontext():
        module = cls()
    if how == "protect":
        safe_rope.protect(module, tables="fp32")
    if "Attribute" in cls.__name__:
        module.offset = 5
    return module.eval()


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("call", CALLS)
def test_what_else_a_forward_takes_or_reads_counts(call: str, how: str) -> None:
    cls, args, kwargs = CALLS[call]
    stock, module = _built(cls, "stock"), _built(cls, how)
    for _ in range(2):  # and again, when it is known that it takes more
        expected, got = stock(*args, **kwargs), module(*args, **kwargs)
        for one, other in zip(expected, got, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
    assert getattr(module, "last", None) == getattr(stock, "last", None)


@pytest.mark.parametrize("call", CALLS)
def test_such_a_module_is_exact_after_a_cast(call: str) -> None:
    cls, args, kwargs = CALLS[call]
    expected = _built(cls, "stock")(*args, **kwargs)
    module = _built(cls, "guard")
    module.to(torch.bfloat16)
    low = tuple(a.bfloat16() if a is X else a for a in args)
    for one, other in zip(expected, module(*low, **kwargs), strict=True):
        assert (one - other.float()).abs().max() <= 2.0**-8, "rounded once at most"


@pytest.mark.parametrize("call", ["offset", "an attribute", "no x", "length and offset"])
def test_so_it_does_in_a_graph(call: str) -> None:
    cls, args, kwargs = CALLS[call]
    stock, module = _built(cls, "stock"), _built(cls, "guard")
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for offset in (module.offset, 3) if cls is ByAttribute else (0,):
        stock.offset = module.offset = offset
        for one, other in zip(stock(*args, **kwargs), compiled(*args, **kwargs), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("cls", [ByClass, Derived, ByConfig, ByGlobal])
def test_what_is_set_elsewhere_counts(cls: type[Base], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, module = _built(cls, "stock"), _built(cls, how)
    module(X, IDS)
    monkeypatch.setattr(ByClass, "shift", 4)
    monkeypatch.setitem(globals(), "SHIFT", 4)
    for one in (stock, module):
        if cls is ByConfig:
            one.config.scale = 3
    assert all(map(torch.equal, stock(X, IDS), module(X, IDS)))


@pytest.mark.parametrize("how", ["stock", "guard", "protect"])
def test_what_somebody_has_set_is_no_damage(how: str) -> None:
    module = _built(ByAttribute, how)
    module(X, IDS)
    report = safe_rope.audit(module)
    assert {finding.severity for finding in report.findings} == {"unknown"}
    module.offset = 0
    assert safe_rope.audit(module).ok


def test_what_is_set_before_a_model_is_protected_counts() -> None:
    stock, module = ByAttribute(), ByAttribute()
    stock.offset = module.offset = 5
    safe_rope.protect(module, tables="fp32")
    assert all(map(torch.equal, stock(X, IDS), module(X, IDS)))
    stock, module = ByMode().eval(), ByMode().eval()
    safe_rope.protect(module, tables="fp32")
    assert all(map(torch.equal, stock(X, IDS), module(X, IDS)))
