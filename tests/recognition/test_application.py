"""Application functions are recognised by what they compute; a kernel then gives the same bits as they do."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import families, survival
from torch import Tensor

from safe_rope.rotation import CosSin, _samples, fp32_application
from safe_rope.rotation._plain_code import is_plain
from safe_rope.rotation._samples import recognise

pytestmark = pytest.mark.contract


def _stock(family: str) -> Callable[..., Any]:
    families.model_class(family)
    function = inspect.unwrap(survival.modelling(family).apply_rotary_pos_emb)
    if isinstance(function, torch.nn.Module):  # of Hugging Face's kernels
        (function,) = (cell.cell_contents for cell in type(function).forward.__closure__)
    return function


def _gathers(stock: Callable[..., Any]) -> bool:
    by_row = inspect.signature(stock).parameters.get("position_ids")
    return by_row is not None and by_row.default is inspect.Parameter.empty


def _cuts(stock: Callable[..., Any]) -> bool:
    """Whether the function takes the whole head and narrow tables: GPT-NeoX's, but not that of 4.47."""
    try:
        stock(**_arguments(stock, torch.float32, 64, 16, 1))
    except RuntimeError:
        return False
    return True


def _arguments(
    stock: Callable[..., Any], dtype: torch.dtype, head_dim: int, width: int, unsqueeze_dim: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = [2, 50]
    q, k = (
        torch.randn(*shape[:unsqueeze_dim], heads, *shape[unsqueeze_dim:], head_dim).to(dtype)
        for heads in (4, 2)
    )
    rows = (9, width) if _gathers(stock) else (2, 50, width)
    arguments = {"q": q, "k": k, "cos": torch.randn(rows), "sin": torch.randn(rows)}
    if _gathers(stock):
        arguments["position_ids"] = torch.randint(9, (2, 50))
    return {**arguments, "unsqueeze_dim": unsqueeze_dim}


def _both_ways(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """Outputs and gradients."""
    states = [arguments[name].detach().requires_grad_() for name in "qk"]
    outputs = function(**{**arguments, "q": states[0], "k": states[1]})
    weights = [torch.ones_like(output).cumsum(-1) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, states, weights)]


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "heads before tokens": lambda batch, heads, length, width: torch.randn(batch, heads, length, width),
    "tokens before heads": lambda b, h, t, d: torch.randn(b, t, h, d).transpose(1, 2),
    "tokens last": lambda b, h, t, d: torch.randn(h, d, b, t).permute(2, 0, 3, 1),
}


def _layout(x: Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("length", [1, 5, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_results_lie_in_memory_as_those_of_the_stock_function(
    family: str, layout: str, length: int, needs_gradient: bool
) -> None:
    """What follows may view them in other shapes, and sums in another order where they lie otherwise."""
    stock = _stock(family)
    application = fp32_application(stock)
    for dtype, batch in itertools.product((torch.float32, torch.bfloat16), (1, 2)):
        arguments = _arguments(stock, dtype, 64, 32 if _cuts(stock) else 64, 1)
        for name, heads in (("q", 4), ("k", 2)):
            arguments[name] = (
                LAYOUTS[layout](batch, heads, length, 64).to(dtype).requires_grad_(needs_gradient)
            )
        if _gathers(stock):
            arguments["position_ids"] = torch.randint(9, (batch, length))
        else:
            width = arguments["cos"].shape[-1]
            arguments |= {name: torch.randn(batch, length, width) for name in ("cos", "sin")}
        tables = {name: arguments[name].to(dtype) for name in ("cos", "sin")}
        results = stock(**(arguments | tables)), application(**_marked(arguments))
        expected, got = ([_layout(one) for one in ones] for ones in results)
        assert got == expected, (dtype, batch)


def _marked(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "cos": CosSin(arguments["cos"]), "sin": CosSin(arguments["sin"])}


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_fast_path_has_the_bits_of_the_stock_function_on_raised_inputs(
    family: str, dtype: torch.dtype, unsqueeze_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = _stock(family)
    assert is_plain(inspect.unwrap(stock))
    monkeypatch.setattr(_samples, "is_plain", lambda function: True)  # what counts its calls is not
    calls: list[str] = []

    @functools.wraps(stock)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(family)
        return stock(*args, **kwargs)

    application = fp32_application(counted)
    assert calls, "the function was never tried"
    calls.clear()
    width = 16 if _cuts(stock) else 64
    arguments = _arguments(stock, dtype, 64, width, unsqueeze_dim)
    got = _both_ways(application, _marked(arguments))
    assert not calls, "the stock function ran"

    def raised(q: Tensor, k: Tensor, **kwargs: Any) -> list[Tensor]:
        return [out.to(dtype) for out in stock(q.float(), k.float(), **kwargs)]

    for one, other in zip(got, _both_ways(raised, arguments), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _two_dimensional(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (x.float() * cos + _rotate_half(x.float()) * sin).to(x.dtype)


def _pairs_of_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    return turn(q), turn(k)


def _glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cos, sin))
    width = cos.shape[-1]
    turned = _pairs_of_neighbours(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((t, x[..., width:]), -1) for t, x in zip(turned, (q, k), strict=True))


def _deepseek(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Any:
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return _llama(q, k, cos, sin, unsqueeze_dim)


def _narrow_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    return _llama(q, k, cos, sin, unsqueeze_dim)


def _behind(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    cos, sin = (t.repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    kept, turning = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :].float()
    beside = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    return torch.cat((kept, (turning * cos + beside * sin).to(x.dtype)), -1)


KNOWN = {
    _llama: ("half.half.half", None),
    _two_dimensional: ("half.half.half", None),
    _pairs_of_neighbours: ("interleaved.interleaved.interleaved", None),
    _glm: ("interleaved.interleaved.first", "last"),
    _deepseek: ("interleaved.half.half", None),
    _narrow_tables: ("half.half.shared", None),
    _behind: ("interleaved.interleaved.shared", "first"),
}


@pytest.mark.parametrize("function", KNOWN, ids=lambda f: f.__name__)
def test_forms_are_told_apart(function: Callable[..., Any]) -> None:
    body = recognise(function)
    assert body is not None
    assert (body.form.key, body.rest) == KNOWN[function]


@pytest.mark.parametrize("length", [1, 3, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_rotated_may_lie_behind_what_is_not(dtype: torch.dtype, length: int) -> None:
    application = fp32_application(_behind)
    stored, cos, sin = torch.randn(2, length, 4, 48), torch.randn(2, length, 8), torch.randn(2, length, 8)
    x = stored.to(dtype).transpose(1, 2).requires_grad_()
    weights = torch.randn(2, 4, length, 48).to(dtype)
    marked = CosSin(cos), CosSin(sin)
    expected = _behind(x, cos, sin)
    (gradient,) = torch.autograd.grad(expected, x, weights)
    for _ in range(2):  # the second finds what the first has arranged
        got = application(x, *marked)
        assert got.is_contiguous() == expected.is_contiguous()
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got, x, weights)[0], gradient)
        with torch.no_grad():
            assert torch.equal(application(x, *marked, 1), expected)
    assert torch.equal(application(x[..., :16], *marked), _behind(x[..., :16], cos, sin))
    with pytest.raises(RuntimeError):
        application(x[..., :8], *marked)


def test_calls_that_take_turns_find_what_they_left() -> None:
    application = fp32_application(_llama)
    few, many = torch.randn(1, 2, 1, 8), torch.randn(1, 4, 1, 8)
    tables = torch.randn(2, 1, 1, 8)
    for _ in range(3):
        for q, k in ((few, few), (many, many)):
            for cos, sin in ((tables[0], tables[1]), (tables[0], -tables[1]), (tables[1], tables[0])):
                got = application(q, k, CosSin(cos.clone()), CosSin(sin.clone()), 1)
                assert all(map(torch.equal, got, _llama(q, k, cos, sin)))


def _backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return _llama(q, k, cos, -sin, unsqueeze_dim)


def _scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = _llama(q, k, cos, sin, unsqueeze_dim)
    return q * 1.0000001, k


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(((x.double() * cos) + _rotate_half(x).double() * sin).float() for x in (q, k))


def _without_a_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return _llama(q.detach(), k, cos, sin, unsqueeze_dim)


def _positions_matter(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Any:
    if position_ids is not None:
        cos = cos * (position_ids > 3)[..., None]
    return _llama(q, k, cos, sin, unsqueeze_dim)


def _k_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return q, _llama(q, k, cos, sin, unsqueeze_dim)[1]


@pytest.mark.parametrize(
    "function",
    [_backwards, _scaled, _fused, _without_a_gradient, _positions_matter, _k_alone, len, torch.cat],
    ids=lambda f: f.__name__,
)
def test_a_function_that_computes_anything_else_is_left_alone(function: Callable[..., Any]) -> None:
    assert recognise(function) is None


def test_an_unusual_call_of_a_known_function_is_answered_by_the_function_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_samples, "is_plain", lambda function: True)  # what counts its calls is not
    calls = []

    @functools.wraps(_llama)
    def stock(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return _llama(*args, **kwargs)

    application = fp32_application(stock)
    q, table = torch.randn(2, 30, 50, 8), CosSin(torch.randn(2, 50, 8))
    calls.clear()
    application(q, q, table, table)
    assert not calls
    application(q[..., :2, :], q[..., :2, :], *[CosSin(table.table[:, :2])] * 2)
    assert not calls
    trained = q[..., :2, :].clone().requires_grad_()
    application(trained, trained, *[CosSin(table.table[:, :2])] * 2)
    assert not calls
    wide = torch.randn(2, 30, 50, 16)
    with pytest.raises(RuntimeError):
        application(wide, wide, table, table)
    assert len(calls) == 1
    assert application(q.double(), q, table, table)[0].dtype == torch.float64
    application(q[:1], q, table, table)
    with pytest.raises(TypeError, match="multiple values"):
        application(q, q, table, table, q=q)
    assert len(calls) == 4
