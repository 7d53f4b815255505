"""`apply_rotary` is the FP32 rotation rounded once: forward and backward, any shape, any transform."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rotary_reference import TRUE_INV_FREQ, rms, rotate, true_tables
from support.rotary_cases import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from safe_rope.rotation import CosSin, apply_rotary
from safe_rope.rotation.kernels import Form, _eager
from safe_rope.tables import RotaryTable

pytestmark = pytest.mark.torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("half", "interleaved")


def _tables(*shape: int, rotary_dim: int = 16) -> tuple[Tensor, Tensor]:
    phase = torch.randn(*shape, rotary_dim // 2)
    return phase.cos(), phase.sin()


def _gradient(output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(output, x, weight, retain_graph=True)[0]


@pytest.mark.parametrize("start", [0, 2048, 128_000, 1_000_000, 10_000_000 - 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_is_one_rounding_at_any_position(start: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = torch.arange(start, start + 512)[None]
    cos, sin = RotaryTable(TRUE_INV_FREQ).lookup(positions)
    q, k = torch.randn(1, 8, 512, 128).to(dtype), torch.randn(1, 2, 512, 128).to(dtype)
    q.requires_grad_(), k.requires_grad_()
    true_cos, true_sin = (t.unsqueeze(1) for t in true_tables(positions))
    for x, got in zip((q, k), apply_rotary(q, k, cos, sin), strict=True):
        weight = torch.randn(x.shape).to(dtype)
        pairs = (
            (got, rotate(x, true_cos, true_sin)),
            (_gradient(got, x, weight), rotate(weight, true_cos, true_sin, turn=-1)),
        )
        for value, true in pairs:
            ratio = rms(value.double() - true) / rms(true.to(dtype).double() - true)
            assert 0.9995 < ratio < 1.0005
            assert float((value != true.to(dtype)).double().mean()) < 3e-4


@pytest.mark.parametrize("unsqueeze_dim", [1, 2, -2, -3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_formula(dtype: torch.dtype, layout: Any, unsqueeze_dim: int) -> None:
    torch.manual_seed(0)
    heads = unsqueeze_dim % 4
    for batch, rotary_dim, head_dim in ((3, 16, 16), (1, 16, 24), (3, 6, 10)):
        cos, sin = _tables(batch, 7, rotary_dim=rotary_dim)
        shape = [3, 7]
        q, k = (
            torch.randn(*shape[:heads], count, *shape[heads:], head_dim).to(dtype).requires_grad_()
            for count in (4, 2)
        )
        at = unsqueeze_dim
        rows = cos.unsqueeze(at), sin.unsqueeze(at)
        for x, got in zip((q, k), apply_rotary(q, k, cos, sin, layout, unsqueeze_dim), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, rotate(x, *rows, layout).to(dtype))
            weight = torch.randn(x.shape).to(dtype)
            assert torch.equal(_gradient(got, x, weight), rotate(weight, *rows, layout, turn=-1).to(dtype))
            assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_blocks_of_every_shape_fit_together() -> None:
    torch.manual_seed(0)
    for shape in ((2, 3, 600, 128), (600, 3, 2, 128), (1, 1, 1, 128), (1, 2000, 1, 128), (3, 1, 2, 70_000)):
        for batch in {1, shape[0]}:
            cos, sin = _tables(batch, shape[2], rotary_dim=shape[3])
            x = torch.randn(shape).bfloat16()
            for memory in (
                x,
                x.transpose(1, 2).contiguous().transpose(1, 2),
                torch.cat((x, x), -1)[..., : shape[3]],
            ):
                (got, _) = apply_rotary(memory, x[:, :1], cos, sin)
                assert torch.equal(got, rotate(x, cos.unsqueeze(1), sin.unsqueeze(1)).bfloat16())
                assert got.stride() == torch.empty_like(memory).stride()
                apply_rotary(again := memory.clone(), x[:, :1].clone(), cos, sin, inplace=True)
                assert torch.equal(again, got)


@pytest.mark.parametrize("limit", [1 << 5, 1 << 7])
def test_blocks_have_the_bits_of_the_whole(monkeypatch: Any, limit: int) -> None:
    def formula(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
        first, second = x.float()
        if conjugate:
            results = first * cos[0] + second * sin[1], second * cos[1] - first * sin[0]
        else:
            results = first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]
        out.copy_(torch.stack(results))

    monkeypatch.setattr(_eager, "_CPU_BLOCK", limit)
    for case in cases((torch.bfloat16, torch.float32)):
        assert torch.equal(case.eager(), case.by_planes(formula)), case


class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest FP32 memory that any operation wrote to."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_fp32_copy_of_all_of_q_is_made(layout: str) -> None:
    cos, sin = (t.unsqueeze(1) for t in _tables(1, 1024, rotary_dim=128))
    x = torch.randn(2, 16, 1024, 128).bfloat16()
    tables = _eager.columns(cos, sin, Form(layout, layout, "shared"))
    with _Largest() as largest:
        out = _eager.rotated(x, *tables, layout, layout)
    assert torch.equal(out, rotate(x, cos, sin, layout).bfloat16())
    assert largest.bytes <= 2 * 4 * _eager._CPU_BLOCK < 4 * x.numel()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_empty_and_single_tokens(layout: Any) -> None:
    for batch, length in ((1, 0), (1, 1), (0, 3)):
        cos, sin = _tables(batch, length)
        q = torch.randn(batch, 2, length, 16, requires_grad=True)
        expected = rotate(q, cos[:, None], sin[:, None], layout)
        results = apply_rotary(q, q, cos, sin, layout)
        assert all(torch.equal(rotated, expected) for rotated in results)
        sum(rotated.sum() for rotated in results).backward()


def test_in_place_writes_into_q_and_k() -> None:
    cos, sin = _tables(1, 7)
    x = torch.randn(2, 3, 7, 24).bfloat16()
    expected = apply_rotary(x, x[:, :1], cos, sin)
    q, k = x.clone(), x[:, :1].clone()
    got = apply_rotary(q, k, cos, sin, inplace=True)
    assert got[0] is q
    assert got[1] is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_in_place_gives_the_gradient_where_autograd_allows_it() -> None:
    cos, sin = _tables(1, 7)
    leaf = torch.randn(2, 3, 7, 16, requires_grad=True)
    results = []
    for inplace in (False, True):
        leaf.grad = None
        q, k = apply_rotary(leaf * 2, leaf * 3, cos, sin, inplace=inplace)
        (q.square().sum() + k.sum()).backward()
        results.append(leaf.grad)
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rotary(leaf, leaf, cos, sin, inplace=True)
    exponential = (leaf * 2).exp()
    apply_rotary(exponential, exponential.clone(), cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        exponential.sum().backward()


def test_a_protected_modules_tables_are_taken_as_they_are() -> None:
    cos, sin = _tables(1, 7)
    q = torch.randn(1, 2, 7, 16)
    expected = apply_rotary(q, q, cos, sin)[0]
    wide = CosSin(torch.cat((cos, cos), -1)), CosSin(torch.cat((sin, sin), -1))
    assert torch.equal(apply_rotary(q, q, *wide)[0], expected)
    expected = apply_rotary(q, q, cos, sin, "interleaved")[0]
    wide = CosSin(cos.repeat_interleave(2, -1)), CosSin(sin.repeat_interleave(2, -1))
    assert torch.equal(apply_rotary(q, q, *wide, "interleaved")[0], expected)


def test_only_one_of_q_and_k_needs_a_gradient() -> None:
    cos, sin = _tables(1, 7)
    q, k = torch.randn(1, 2, 7, 16, requires_grad=True), torch.randn(1, 2, 7, 16)
    rotated, _ = apply_rotary(q, k, cos, sin)
    rotated.sum().backward()
    assert torch.equal(q.grad, rotate(torch.ones_like(k), cos[:, None], sin[:, None], turn=-1))  # type: ignore[arg-type]


def test_derivatives_of_any_order() -> None:
    cos, sin = (t.double() for t in _tables(2, 5))
    cos, sin = cos.float(), sin.float()
    x = torch.randn(2, 3, 5, 16, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return apply_rotary(x, x, cos, sin)[0].pow(3).sum()

    def plain_loss(x: Tensor) -> Tensor:
        return rotate(x, cos[:, None], sin[:, None]).pow(3).sum()

    for one, other in zip(
        torch.autograd.functional.hvp(loss, x, torch.ones_like(x)),
        torch.autograd.functional.hvp(plain_loss, x, torch.ones_like(x)),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)
    tangent = torch.randn_like(x)
    for one, other in zip(
        torch.func.jvp(loss, (x,), (tangent,)), torch.func.jvp(plain_loss, (x,), (tangent,)), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-4)


def test_vmap_over_states_over_tables_and_over_gradients() -> None:
    cos, sin = _tables(4, 1, 5)
    x = torch.randn(4, 2, 3, 5, 16)

    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary(x, x[:, :1], cos, sin)[0]

    def gradient(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.func.grad(lambda x: one(x, cos, sin).pow(2).sum())(x)

    for function in (one, gradient):
        for dims in ((0, 0, 0), (0, None, None), (None, 0, 0), (1, 0, 0), (1, None, None)):
            arguments = (x if dims[0] == 0 else x.movedim(0, 1) if dims[0] == 1 else x[0],) + (
                (cos, sin) if dims[1] == 0 else (cos[0], sin[0])
            )
            expected = []
            for index in range(4):
                slices = zip(arguments, dims, strict=True)
                expected.append(function(*(a if d is None else a.select(d, index) for a, d in slices)))
            assert torch.equal(torch.func.vmap(function, dims)(*arguments), torch.stack(expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_under_autocast_changes_no_bit(reentrant: bool) -> None:
    cos, sin = _tables(1, 7)
    weight = torch.randn(16, 16)
    results = []
    for remember in (True, False):
        x = torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            q, k = apply_rotary(x @ weight, x @ weight.T, cos, sin)
            assert q.dtype == torch.bfloat16
            return q @ k.mT

        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x) if remember else checkpoint(layer, x, use_reentrant=reentrant)
            out.float().sum().backward()
        results.append((out.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_a_rotated_tensor_is_like_any_other() -> None:
    cos, sin = _tables(1, 7)
    q = torch.randn(1, 2, 7, 16)
    rotated = apply_rotary(q, q, cos, sin)[0]
    assert torch.equal(copy.deepcopy(rotated), rotated)
    with torch.inference_mode():
        assert torch.equal(apply_rotary(q, q, cos, sin)[0], rotated)
    meta = apply_rotary(q.to("meta"), q.to("meta"), cos.to("meta"), sin.to("meta"))[0]
    assert meta.shape == q.shape
    assert meta.device.type == "meta"


def test_bad_arguments_are_named() -> None:
    cos, sin = _tables(1, 7)
    q = torch.randn(1, 2, 7, 16)
    with pytest.raises(TypeError, match=r"cos must be a torch\.float32 tensor, got torch\.bfloat16"):
        apply_rotary(q, q, cos.bfloat16(), sin)
    with pytest.raises(TypeError, match=r"k must be .* tensor, got torch\.float64"):
        apply_rotary(q, q.double(), cos, sin)
    with pytest.raises(ValueError, match="same shape"):
        apply_rotary(q, q, cos, sin[..., :4])
    with pytest.raises(ValueError, match="do not fit q"):
        apply_rotary(q, q, *_tables(1, 6))
    with pytest.raises(ValueError, match="do not fit q"):
        apply_rotary(q[0], q, cos, sin)
    with pytest.raises(ValueError, match="rotate 32 elements of each head, but q has 16"):
        apply_rotary(q, q, *_tables(1, 7, rotary_dim=32))
    with pytest.raises(ValueError, match="unsqueeze_dim must be in 0"):
        apply_rotary(q, q, cos, sin, unsqueeze_dim=4)
    with pytest.raises(ValueError, match="requires a gradient"):
        apply_rotary(q, q, cos.requires_grad_(), sin)
    with pytest.raises(TypeError, match="layout must be"):
        apply_rotary(q, q, cos.detach(), sin, "neox")  # type: ignore[arg-type]
