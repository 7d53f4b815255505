"""A few tokens, which plain operations rotate, have the bits of the formula in every form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from safe_rope.rotation import CosSin, fp32_application
from safe_rope.rotation.kernels import Form, _few
from safe_rope.rotation.kernels._form import PAIRS

FORMS = [Form(*form) for form in itertools.product(PAIRS, PAIRS, ("half", "interleaved", "first", "shared"))]
HEAD_DIM = 8


def pairs_of(values: list[torch.Tensor], order: str) -> list[tuple[int, int]]:
    """Return which two of the elements of a head make each pair, in the words of `Form`."""
    half = len(values) // 2
    return [(i, i + half) if order == "half" else (2 * i, 2 * i + 1) for i in range(half)]


def by_hand(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> torch.Tensor:
    """Rotate element by element in FP32, each operation rounded, and round once to the dtype of ``x``."""
    xs = list(x.detach().float().unbind(-1))
    out: list[torch.Tensor] = list(xs)
    before, after = pairs_of(xs, form.pairs), pairs_of(xs, form.out)
    for index, ((first, second), (to_first, to_second)) in enumerate(zip(before, after, strict=True)):
        columns = {
            "shared": (index, index),
            "first": (index, index),
            "half": (index, index + HEAD_DIM // 2),
            "interleaved": (2 * index, 2 * index + 1),
        }[form.table]
        (c1, c2), (s1, s2) = ([table[..., column] for column in columns] for table in (cos, sin))
        out[to_first] = xs[first] * c1 - xs[second] * s1
        out[to_second] = xs[second] * c2 + xs[first] * s2
    return torch.stack(out, -1).to(x.dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_tokens_have_the_bits_of_the_formula(
    form: Form, needs_gradient: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 3, HEAD_DIM).to(dtype).requires_grad_(needs_gradient) for heads in (4, 1))
    width = HEAD_DIM // 2 if form.table == "shared" else HEAD_DIM
    cos, sin = torch.randn(2, 1, 3, width), torch.randn(2, 1, 3, width)
    for xs in ((q, k), (q,)):
        plan = _few.plan(xs, cos[:, 0], 1, form, needs_gradient)
        assert plan is not None
        turned = _few.turn(xs, *_few.arrange(cos, sin, form, plan), form, plan)
        for x, one in zip(xs, turned, strict=True):
            assert torch.equal(one, by_hand(x, cos, sin, form))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
def test_few_tokens_have_the_same_bits_with_and_without_a_gradient_in_any_mode(form: Form) -> None:
    x = torch.randn(1, 2, 1, HEAD_DIM)
    width = HEAD_DIM // 2 if form.table == "shared" else HEAD_DIM
    cos, sin = torch.randn(1, 1, 1, width), torch.randn(1, 1, 1, width)
    plan = _few.plan((x,), cos[:, 0], 1, form, needs_gradient=False)
    assert plan is not None
    arranged = _few.arrange(cos, sin, form, plan)
    (plain,) = _few.turn((x,), *arranged, form, plan)
    with torch.inference_mode():
        (inferred,) = _few.turn((x.clone(),), *arranged, form, plan)
    (tracked,) = _few.turn((x.clone().requires_grad_(),), *arranged, form, plan)
    assert torch.equal(plain, inferred)
    assert torch.equal(plain, tracked)


def _half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _interleaved(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    sin, cos = (one[:, :, None, :].repeat_interleave(2, 3) for one in (sin, cos))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


@pytest.mark.parametrize("stock", [_half, _interleaved])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_tensor_alone_has_its_bits_whatever_was_rotated_before(stock: Any, mode: Any) -> None:
    torch.manual_seed(0)
    names = [name for name in stock.__code__.co_varnames[: stock.__code__.co_argcount] if name != "x"]
    apply = fp32_application(stock)
    width = HEAD_DIM if stock is _half else HEAD_DIM // 2
    table = torch.randn(16, 2 * width)

    def tables(at: int, rows: torch.Tensor, *, swapped: bool = False) -> dict[str, torch.Tensor]:
        both = CosSin(rows, torch.bfloat16)[torch.tensor([[at]])].split(width, -1)
        return dict(zip(("cos", "sin"), both[::-1] if swapped else both, strict=True))

    other, wide = torch.randn(16, 2 * width), torch.randn(1, 1, 4, 2 * HEAD_DIM)
    states = [
        torch.randn(1, 1, 4, HEAD_DIM).bfloat16(),
        torch.randn(1, 1, 4, HEAD_DIM),
        torch.randn(1, 1, 2, HEAD_DIM).half(),
        wide[..., HEAD_DIM:].bfloat16(),
        wide[..., :HEAD_DIM],
    ]
    calls = [
        (x, at, rows, turn) for at in (3, 4) for rows in (table, other) for turn in (0, 1) for x in states
    ]
    with mode():
        for x, at, rows, turn in 2 * [call for call in calls for _ in range(2)]:
            given = tables(at, rows, swapped=bool(turn))
            was = x.clone()
            found = apply(x, *(given[name] for name in names))
            true = stock(x.float(), *(given[name].table for name in names)).to(x.dtype)
            assert torch.equal(found, true)
            assert torch.equal(x, was)
            # Tables that somebody has written to are others.
            given["cos"].mul_(0.5)
            found = apply(x, *(given[name] for name in names))
            assert torch.equal(found, stock(x.float(), *(given[name].table for name in names)).to(x.dtype))
