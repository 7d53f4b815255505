"""A function that branches, reads state or leaves something behind is called, whatever a sample says."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.own_rotary import Rotary, rotate_half
from torch import Tensor, nn

import safe_rope
from safe_rope.rotation import fp32_application, marked
from safe_rope.rotation._plain_code import is_plain
from safe_rope.rotation._samples import recognise


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def forward(self, q: Tensor, k: Tensor) -> Any:
        tables = self.rotary(q, torch.arange(q.shape[-2])[None])
        return apply_rotary_pos_emb(q, k, *tables)  # type: ignore[name-defined] # noqa: F821


SCALE = 1.0
SEEN: list[Any] = []


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def by_none(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return plain_body(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def plain_body(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


def by_length(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = plain(q, k, cos, sin, unsqueeze_dim)
    return (q * math.log(q.shape[-2]) if q.shape[-2] > 64 else q), k


def by_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    if q.shape[1] == 4:
        return q, k
    return plain(q, k, cos, sin, unsqueeze_dim)


def by_mode(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = plain(q, k, cos, sin, unsqueeze_dim)
    return q / (1 + (not torch.is_grad_enabled())), k


def by_a_global(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = plain(q, k, cos, sin, unsqueeze_dim)
    return q * SCALE, k


def noting(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    SEEN.append(q.shape)
    return plain(q, k, cos, sin, unsqueeze_dim)


def in_a_helper(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return by_length(q, k, cos, sin, unsqueeze_dim)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        SEEN.append(len(args))
        return function(*args, **kwargs)

    return inner


def with_a_number(scale: list[float]) -> Callable[..., Any]:
    def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        q, k = plain(q, k, cos, sin, unsqueeze_dim)
        return q * scale[0], k

    return scaled


held = [1.0]
by_a_closure = with_a_number(held)
decorated = _counted(plain)
PLAIN = (plain, by_none)
OTHERS = {
    function.__name__: function
    for function in (by_length, by_heads, by_mode, by_a_global, noting, in_a_helper)
} | {"by_a_closure": by_a_closure, "decorated": decorated}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    globals()["SCALE"], held[0] = 1.0, 1.0
    SEEN.clear()


def test_what_only_computes_is_known_as_that() -> None:
    assert all(map(is_plain, PLAIN))
    assert recognise(plain) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_more_is_called(name: str, monkeypatch: Any) -> None:
    function = OTHERS[name]
    assert recognise(function) is None
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)

    stock = Attention()
    with safe_rope.guard(tables="fp32") as session:
        model = Attention()
    assert "applied as stock" in " ".join(str(session.report).split())
    globals()["SCALE"], held[0] = 3.0, 3.0
    q, k = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
    with torch.no_grad():
        SEEN.clear()
        expected = stock(q, k)
        noted = SEEN.copy()
        SEEN.clear()
        got = model(q, k)
    assert noted == SEEN
    assert all(map(torch.equal, expected, got))


def _turned_back(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first), -1)


@pytest.mark.parametrize("how", ["the helper", "its code"])
def test_a_helper_replaced_between_two_models_counts(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 10, 16)
    phase = torch.randn(1, 10, 16)
    results = []
    for _ in range(2):
        application = fp32_application(plain)
        got = application(q, k, marked(phase.cos()), marked(phase.sin()))
        assert all(map(torch.equal, plain(q, k, phase.cos(), phase.sin()), got))
        results.append(got[0])
        if how == "the helper":
            monkeypatch.setitem(globals(), "rotate_half", _turned_back)
        else:
            monkeypatch.setattr(rotate_half, "__code__", _turned_back.__code__)
    assert not torch.equal(*results)
