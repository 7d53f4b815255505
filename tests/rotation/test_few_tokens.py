"""A few tokens, which plain operations rotate, have the bits of the formula in every form."""

from __future__ import annotations

import itertools

import pytest
import torch

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
