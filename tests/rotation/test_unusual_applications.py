"""Functions that rotate and write, pass on or return what others do not: they run as they do in stock."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.own_rotary import Rotary, rotate_half
from torch import Tensor, nn

import safe_rope
from safe_rope.rotation import fp32_application, marked
from safe_rope.rotation._installed import acquire, as_stock


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Pair(NamedTuple):
    q: Tensor
    k: Tensor


@dataclasses.dataclass
class Both:
    q: Tensor
    k: Tensor


def writes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotated = plain(q, k, cos, sin)
    q.copy_(rotated[0])
    k.copy_(rotated[1])


def caches(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, cache: Tensor) -> Tensor:
    q, k = plain(q, k, cos, sin)
    cache[:, :, : k.shape[2]] = k
    return q


def appends(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, held: list[Tensor]) -> Tensor:
    q, k = plain(q, k, cos, sin)
    held.append(k)
    return q


def named(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return Pair(*plain(q, k, cos, sin))


def an_object(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return Both(*plain(q, k, cos, sin))


def a_dictionary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = plain(q, k, cos, sin)
    return {"q": q, "k": k}


def one_by_one(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    for x in (q, k):
        yield x * cos[:, None] + rotate_half(x) * sin[:, None]


def q_alone(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, None if k is None else k * cos + rotate_half(k) * sin


def projected(x: Tensor, layer: nn.Module, cos: Tensor, sin: Tensor) -> Tensor:
    x = layer(x)
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def with_a_mask(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return *plain(q, k, cos, sin), q == q, torch.arange(300)


def of_a_list(xs: list[Tensor], cos: Tensor, sin: Tensor) -> Any:
    return [x * cos[:, None] + rotate_half(x) * sin[:, None] for x in xs]


def in_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = plain(q, k, cos, sin)
    return q.float(), k.float()


def _written(q: Tensor, k: Tensor, *tables: Tensor) -> Any:
    writes(q, k, *tables)
    return q, k


def _cached(q: Tensor, k: Tensor, *tables: Tensor) -> Any:
    cache = torch.zeros(2, 2, 60, 16, dtype=k.dtype)
    return caches(q, k, *tables, cache), cache


def _appended(q: Tensor, k: Tensor, *tables: Tensor) -> Any:
    held: list[Tensor] = []
    return appends(q, k, *tables, held), held[0]


def _given(q: Tensor, k: Tensor, *tables: Tensor) -> Any:
    layer = nn.Linear(16, 16, bias=False, dtype=q.dtype)
    nn.init.eye_(layer.weight)
    return projected(q, layer, *tables), k


CALLS: dict[str, Callable[..., Any]] = {
    "writes": _written,
    "caches": _cached,
    "appends": _appended,
    "named": lambda *args: tuple(named(*args)),
    "an object": lambda *args: dataclasses.astuple(an_object(*args)),
    "a dictionary": lambda *args: tuple(a_dictionary(*args).values()),
    "one by one": lambda *args: tuple(one_by_one(*args)),
    "q alone": lambda q, k, *tables: (q_alone(q, None, *tables)[0], k),
    "a module": _given,
    "a mask": lambda *args: with_a_mask(*args),
    "a list": lambda q, k, *tables: tuple(of_a_list([q, k], *tables)),
    "in FP32": lambda *args: in_fp32(*args),
}


class Attention(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.rotary, self.call = Rotary(), call

    def forward(self, q: Tensor, k: Tensor) -> Any:
        tables = self.rotary(q, torch.arange(q.shape[-2])[None])
        return self.call(q.clone(), k.clone(), *tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_it_gives_and_leaves_what_it_does_in_stock(call: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    truth = Attention(CALLS[call])(q, k)
    results = []
    for guarded in (False, True):
        with safe_rope.guard(tables="fp32") if guarded else contextlib.nullcontext():
            model = Attention(CALLS[call])
        results.append(model.to(dtype)(q.to(dtype), k.to(dtype)))
    for true, stock, got in zip(truth, *results, strict=True):
        assert stock.dtype == got.dtype
        assert stock.shape == got.shape
        assert (got.double() - true.double()).abs().max() <= (stock.double() - true.double()).abs().max()


def test_a_helper_that_is_replaced_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    call = lambda *args: plain(*args)  # noqa: E731
    with safe_rope.guard(tables="fp32"):
        model = Attention(call)
    q, k = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    model(q, k)
    monkeypatch.setitem(globals(), "rotate_half", lambda x: x.flip(-1) * 3)
    assert all(map(torch.equal, Attention(call)(q, k), model(q, k)))


def test_a_function_of_a_compiled_extension_which_says_nothing_of_its_arguments_runs_as_in_stock() -> None:
    compiled = ctypes.PYFUNCTYPE(*[ctypes.py_object] * 5)(plain)
    q, k, cos, sin = torch.randn(4, 2, 2, 50, 16, dtype=torch.bfloat16)
    cos, sin = cos[:, 0], sin[:, 0]
    tables = (marked(table.float(), torch.bfloat16) for table in (cos, sin))
    assert all(map(torch.equal, fp32_application(compiled)(q, k, *tables), compiled(q, k, cos, sin)))


class Operations:
    @classmethod
    def of_a_class(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q, k, cos, sin)

    @classmethod
    def naming_its_class(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q, k, cos, sin) if __class__ else None  # type: ignore[name-defined]

    @staticmethod
    def naming_no_object(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q, k, cos, sin) if __class__ else None  # type: ignore[name-defined]


@pytest.mark.parametrize("name", ["of_a_class", "naming_its_class", "naming_no_object"])
def test_a_method_of_a_class_is_called_as_before_and_is_put_back(name: str) -> None:
    class User:
        pass

    before, user, tables = vars(Operations)[name], User(), torch.randn(4, 2, 2, 50, 16)
    tables = tables[0], tables[1], tables[2][:, 0], tables[3][:, 0]
    stock = getattr(Operations, name)(*tables)
    acquire(user, [(__name__, f"Operations.{name}")])
    for owner in (Operations, Operations()):
        assert all(map(torch.equal, getattr(owner, name)(*tables), stock))
    del user
    gc.collect()
    assert vars(Operations)[name] is before
    assert all(map(torch.equal, getattr(Operations(), name)(*tables), stock))


def test_other_libraries_can_read_a_table() -> None:
    with safe_rope.guard(tables="fp32"):
        model = Rotary()
    cos, _ = model(torch.zeros(1), torch.arange(50)[None])
    assert torch.equal(torch.from_dlpack(cos), Rotary()(torch.zeros(1), torch.arange(50)[None])[0])


class OfClasses:
    scale = 1.0

    @classmethod
    def ignoring(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q, k, cos, sin)

    @classmethod
    def asking(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q * cls.scale, k, cos, sin)


@pytest.mark.parametrize(("name", "of_stock"), [("ignoring", False), ("asking", True)])
def test_a_class_method_rotates_in_fp32_unless_it_asks_its_class(name: str, of_stock: bool) -> None:
    class User:
        pass

    user, (q, k, cos, sin) = User(), torch.randn(4, 2, 2, 50, 16)
    cos, sin = cos[:, 0], sin[:, 0]
    method, low = getattr(OfClasses, name), (q.bfloat16(), k.bfloat16())
    true = [one.bfloat16() for one in method(*(one.float() for one in low), cos, sin)]
    stock = method(*low, cos.bfloat16(), sin.bfloat16())
    acquire(user, places := [(__name__, f"OfClasses.{name}")])
    tables = (marked(table, torch.bfloat16) for table in (cos, sin))
    assert all(map(torch.equal, getattr(OfClasses, name)(*low, *tables), stock if of_stock else true))
    assert as_stock(places) == (of_stock, [f"OfClasses.{name}"] if of_stock else [])
