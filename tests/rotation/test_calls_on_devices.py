"""What a call on CUDA finds from earlier ones: tensors on the CPU say that they are elsewhere.

In the place of the kernel plain torch rotates; what is launched with GPUs is looked at in tests/system/gpu.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support.rotary_cases import cases

from safe_rope.rotation import _bodies, fp32_application
from safe_rope.rotation._cos_sin import CosSin
from safe_rope.rotation._samples import recognise
from safe_rope.rotation.kernels import _eager, _operator, _triton


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _apply(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """Have tensors say that they are on CUDA; `_apply`, and how many tensors each launch rotates."""
    apply, launches = fp32_application(_apply), []
    assert recognise(_apply) is not None, "while the CPU is the CPU"

    def rotate(outs: Any, xs: Any, cos: Any, sin: Any, before: str, after: str, *rest: Any) -> None:
        launches.append(len(xs))
        with monkeypatch.context() as here:
            here.setattr(torch.Tensor, "is_cpu", property(lambda _: True), raising=False)
            form = _operator.Form(before, after, rest[0])
            columns = _eager.columns(cos, sin, form)
            for out, x in zip(outs, xs, strict=True):
                out.copy_(_eager.rotated(x, *columns, before, after))

    monkeypatch.setattr(_operator, "available", lambda: True)
    monkeypatch.setattr(_triton, "rotate", rotate)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    return apply, launches


def _call(seed: int, heads_at: int = 1, width: int = 8, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    torch.manual_seed(seed)
    q, k = (torch.randn(2, 3, heads, 8).to(dtype) for heads in (4, 2))
    cos, sin = (torch.randn(2, 3, width) for _ in "cs")
    if heads_at == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q, k, cos, sin, heads_at]


def test_new_tables_are_not_looked_at_where_a_kernel_took_such_tables(
    elsewhere: tuple[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, launches = elsewhere
    faults = []
    inner = _bodies.fault_of_tables
    monkeypatch.setattr(_bodies, "fault_of_tables", lambda *given: faults.append(1) or inner(*given))
    for seed in range(6):
        q, k, cos, sin, heads_at = _call(seed, heads_at=1 + seed % 2)
        tables = CosSin(cos, torch.bfloat16), CosSin(sin, torch.bfloat16)
        expected = [one.bfloat16() for one in _apply(q.float(), k.float(), cos, sin, heads_at)]
        for _ in range(2):
            got = apply(q, k, *tables, heads_at)
            assert all(map(torch.equal, got, expected)), seed
        tables[0].mul_(2)
        expected = [one.bfloat16() for one in _apply(q.float(), k.float(), cos, sin, heads_at)]
        assert all(map(torch.equal, apply(q, k, *tables, heads_at), expected)), seed
    assert len(faults) == 2, "one for each kind of call"
    assert launches == [2] * 18


@pytest.mark.parametrize("other", ["wider", "narrower", "of 16 bits", "dimension", "shape of sin", "learned"])
def test_a_call_of_another_kind_is_looked_at_again(elsewhere: tuple[Any, list[int]], other: str) -> None:
    apply, launches = elsewhere
    for seed in range(2):
        q, k, cos, sin, heads_at = _call(seed)
        apply(q, k, CosSin(cos, torch.bfloat16), CosSin(sin, torch.bfloat16), heads_at)
    q, k, cos, sin, heads_at = _call(7, width={"wider": 12, "narrower": 4}.get(other, 8))
    if other == "of 16 bits":
        cos = cos.double()
    if other == "dimension":
        cos, sin = cos[:, :1], sin[:, :1]
    if other == "shape of sin":
        sin = sin[:1]
    if other == "learned":
        cos.requires_grad_()
    before, kind = len(launches), None
    try:
        expected: Any = _apply(q.float(), k.float(), cos, sin, heads_at)
    except RuntimeError as error:
        kind = type(error)
    tables = CosSin(cos, torch.bfloat16), CosSin(sin, torch.bfloat16)
    if kind is not None:
        with pytest.raises(kind):
            apply(q, k, *tables, heads_at)
        return
    got = apply(q, k, *tables, heads_at)
    assert all(torch.equal(one, whole.bfloat16()) for one, whole in zip(got, expected, strict=True))
    assert (len(launches) > before) == (other == "dimension")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_a_launch_takes_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_rope.rotation.kernels import _triton_kernel

    taken: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: taken.append((grid, args, constants))

    planned = []
    inner = _triton._planned
    monkeypatch.setattr(_triton_kernel, "rotate_kernel", Kernel())
    monkeypatch.setattr(_triton, "_launches", {})
    monkeypatch.setattr(_triton, "_planned", lambda *given: planned.append(1) or inner(*given))

    def launched(case: Any) -> list[Any]:
        taken.clear()
        xs = case.x, case.x
        outs = [torch.empty_like(x) for x in xs]
        form = case.form.table, case.conjugate
        _triton.rotate(outs, xs, case.cos, case.sin, *case.orders, *form)
        return [
            (grid, [one for one in args if not isinstance(one, torch.Tensor)], constants)
            for grid, args, constants in taken
        ]

    several = list(cases((torch.bfloat16, torch.float32)))[::5]
    first = [launched(case) for case in several]
    count = len(planned)
    assert count
    for case, known in zip(several, first, strict=True):
        assert launched(case) == known
    assert len(planned) == count
    _triton._launches.clear()
    for case, known in reversed(list(zip(several, first, strict=True))):
        assert launched(case) == known, "whatever was launched before"
