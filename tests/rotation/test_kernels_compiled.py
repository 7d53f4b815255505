"""Compiled, the rotation has the eager bits: as a kernel of its own, and inside a user's region."""

from __future__ import annotations

import itertools
import re
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
from rotary_reference import rotate
from support.rotary_cases import cases
from torch import Tensor

from safe_rope.rotation import apply_rotary
from safe_rope.rotation.kernels import Form, _compiled, _operator
from safe_rope.rotation.kernels._form import PAIRS
from safe_rope.rotation.kernels._operator import _of_operators

TABLES = (*PAIRS, "first", "shared")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _tables(length: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    phase = torch.randn(1, length, rotary_dim // 2)
    return phase.cos(), phase.sin()


def _results(function: Any, length: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, 4, length, 128, generator=generator).to(dtype).requires_grad_()
    k = torch.randn(2, length, 2, 128, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
    torch.manual_seed(0)
    outputs = function(q, k, *_tables(length, 128))
    weights = [torch.randn(output.shape, generator=generator).to(dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), weights)]


@needs_compiler
def test_the_compiled_kernel_has_the_eager_bits(monkeypatch: Any) -> None:
    made = []
    kernel = _compiled._kernel
    monkeypatch.setattr(_compiled, "_kernel", lambda *key: made.append(key) or kernel(*key))
    torch.manual_seed(0)
    # A kernel takes seconds to compile: a few of the cases, which have everything in them.
    chosen = list(cases(DTYPES))[5::155]
    assert {case.x.dtype for case in chosen} == set(DTYPES)
    assert {case.conjugate for case in chosen} == {False, True}
    assert {case.form.pairs for case in chosen} == {"half", "interleaved"}
    for case in chosen:
        assert not case.differs(lambda one: one.by_planes(_compiled.rotate_planes)), case
    assert len(made) == len(chosen), "the eager kernel took over"
    assert not _compiled._broken


@needs_compiler
def test_inside_a_compiled_region_large_states_have_the_eager_bits(monkeypatch: Any) -> None:
    made = []
    kernel = _compiled._kernel
    monkeypatch.setattr(_compiled, "_kernel", lambda *key: made.append(key) or kernel(*key))

    def region(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        # Neighbours that a compiler would fuse with, and whose roundings it would leave out.
        q, k = (q.float() * 0.7).to(q.dtype), (k.float() * 0.7).to(k.dtype)
        q, k = apply_rotary(q, k, cos, sin)
        return (q.float() * 1.3).to(q.dtype), (k.float() * 1.3).to(k.dtype)

    compiled = torch.compile(region, fullgraph=True)
    for length in (300, 517):
        assert 2 * 4 * length * 128 >= _compiled.SMALLEST
        for one, other in zip(_results(compiled, length), _results(region, length), strict=True):
            assert torch.equal(one, other)
    assert {conjugate for _, conjugate in made} == {False, True}


SMALL_FORMS = (
    Form("half", "half", "half"),
    Form("interleaved", "interleaved", "interleaved"),
    Form("interleaved", "half", "first"),
    Form("half", "interleaved", "shared"),
)


def _small_region(states: list[tuple[Form, Tensor, Tensor]], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Rotations between neighbours that a compiler fuses with, and whose roundings it would leave out."""
    results = []
    for form, q, k in states:
        width = 8 if form.table == "shared" else 16
        q, k = ((x.float() * 0.7).to(x.dtype).transpose(1, 2) for x in (q, k))
        rotated = _operator.rotate((q, k), cos[..., :width], sin[..., :width], form)
        results += [(one.float() * 1.3).to(one.dtype) for one in rotated]
    return results


@needs_compiler
@pytest.mark.parametrize("contract", [None, "fast"])
def test_inside_a_compiled_region_small_states_are_fused_to_the_eager_bits(
    contract: str | None, monkeypatch: Any
) -> None:
    calls = []
    compute = _operator.compute
    monkeypatch.setattr(_operator, "compute", lambda *args, **kw: calls.append(args) or compute(*args, **kw))
    torch.manual_seed(0)
    states = [
        (form, *(torch.randn(2, 5, heads, head_dim).to(dtype).requires_grad_() for heads in (3, 1)))
        for form, (dtype, head_dim) in itertools.product(SMALL_FORMS, zip(DTYPES, (16, 20, 20), strict=True))
    ]
    xs = [x for _, *both in states for x in both]
    cos, sin = torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 16)
    options = {} if contract is None else {"cpp.enable_floating_point_contract_flag": contract}
    results = {}
    for name in ("eager", "compiled"):
        region = _small_region
        if name == "compiled":
            region = torch.compile(region, fullgraph=True, options=options)
            calls.clear()
        outputs = region(states, cos, sin)
        weights = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.dtype) for one in outputs]
        results[name] = [*outputs, *torch.autograd.grad(outputs, xs, weights)]
    for one, other in zip(results["eager"], results["compiled"], strict=True):
        assert torch.equal(one, other)
    assert bool(calls) == (contract is not None), "a compiler that may contract calls the operator"


@needs_compiler
@pytest.mark.parametrize("form", SMALL_FORMS, ids=lambda form: form.key)
def test_what_is_rotated_beside_a_single_head_lies_head_by_head(form: Form) -> None:
    utils = pytest.importorskip("torch._inductor.utils")

    def region(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = _operator.rotate((q.transpose(1, 2), k.transpose(1, 2)), cos, sin, form)
        return (q.float() * k.float()).sum(-1)

    states = [torch.randn(1, 1, heads, 20).bfloat16() for heads in (3, 1)]
    cos, sin = (torch.randn(1, 1, 1, 8 if form.table == "shared" else 16) for _ in range(2))
    compiled = torch.compile(region, fullgraph=True, options={"fx_graph_cache": False})
    result, code = utils.run_and_get_code(compiled, *states, cos, sin)
    assert torch.allclose(result, region(*states, cos, sin))
    assert "torch.bfloat16" in code[0]
    assert not re.findall(r"empty_strided_cpu\(.*\b3, .*, 3\), torch.bfloat16", code[0])


def test_inside_a_compiled_region_small_states_need_no_kernel_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(_compiled, "_kernel", None)
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager")
    for length in (1, 5, 6):
        for one, other in zip(_results(compiled, length), _results(apply_rotary, length), strict=True):
            assert torch.equal(one, other)


def test_a_compiler_that_fails_is_named_and_replaced(monkeypatch: Any) -> None:
    def fail(*key: Any) -> None:
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(_compiled, "_kernel", fail)
    monkeypatch.setattr(_compiled, "_broken", False)
    (case, *_) = cases((torch.bfloat16,))
    with pytest.warns(RuntimeWarning, match="no such compiler"):
        assert not case.differs(lambda one: one.by_planes(_compiled.rotate_planes))
    assert _compiled._broken
    assert not _compiled.worthwhile(torch.empty(_compiled.SMALLEST))


def test_an_exported_program_has_the_eager_bits() -> None:
    class Rotate(torch.nn.Module):
        def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return apply_rotary(q, q, cos, sin)[0]

    q, tables = torch.randn(1, 2, 7, 16), _tables(7, 16)
    program = torch.export.export(Rotate(), (q, *tables), strict=False)
    (operator,) = {node.target for node in program.graph.nodes if "rotary" in str(node.target)}
    assert "safe_rope" in str(operator)
    expected = rotate(q, *(t.unsqueeze(1) for t in tables))
    assert torch.equal(program.module()(q, *tables), expected)


def test_the_operator_is_well_defined() -> None:
    cos, sin = (t.unsqueeze(1) for t in _tables(7, 16))
    for requires_grad in (False, True):
        x = torch.randn(1, 2, 7, 16, requires_grad=requires_grad)
        torch.library.opcheck(
            torch.ops.safe_rope.rotary, ([x, x[:, :1]], cos, sin, "half.half.shared", False)
        )


@pytest.mark.parametrize("form", [Form(*form) for form in itertools.product(PAIRS, PAIRS, TABLES)])
def test_other_runtimes_get_the_same_bits_of_plain_operators(form: Form) -> None:
    # 16 of 20 elements are rotated.
    x = torch.randn(1, 2, 7, 20).to(torch.bfloat16)
    cos, sin = (t.unsqueeze(1) for t in _tables(7, 16 if form.table == "shared" else 32))
    (expected,) = torch.ops.safe_rope.rotary([x], cos, sin, form.key, False)
    assert torch.equal(_of_operators(x, cos, sin, form), expected)
