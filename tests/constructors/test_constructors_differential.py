"""The constructors under zero.Init and the guard, against plain torch and against zero.Init alone."""

from __future__ import annotations

import faulthandler
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.zero_init import plain_torch, zero_init

from safe_rope.constructors import ConstructorGuard, pristine

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]

CALLS_PER_DRAW = 10
DRAWS = 80
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATING, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, float, int]

sizes = st.lists(st.integers(0, 5), max_size=3)
numbers = st.floats(-1e4, 1e4, width=32)
scalars = st.one_of(numbers, st.integers(0, 100), st.booleans())
nested = st.one_of(
    scalars,
    st.lists(scalars, max_size=4),
    st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3),
)
ranges = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(0, 5), st.integers(5, 300)),
    st.tuples(st.integers(0, 5), st.integers(5, 300), st.integers(1, 7)),
    st.tuples(st.floats(0, 3, width=32), st.floats(3, 40, width=32), st.sampled_from([0.5, 0.1, 2.0])),
)
unpacked = st.tuples(sizes, st.booleans()).map(lambda drawn: tuple(drawn[0]) if drawn[1] else (drawn[0],))
arguments = {
    "tensor": st.tuples(nested),
    "empty": unpacked,
    "zeros": unpacked,
    "ones": unpacked,
    "randn": unpacked,
    "full": st.tuples(sizes, scalars),
    "arange": ranges,
    "eye": st.one_of(st.tuples(st.integers(0, 6)), st.tuples(st.integers(0, 6), st.integers(0, 6))),
    "Tensor": sizes.map(tuple),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    name = draw(st.sampled_from(sorted(arguments)))
    args = draw(arguments[name])
    if name in ("zeros", "ones", "empty", "randn") and not args:
        args = ((),)
    if name == "Tensor":
        return name, args, {}
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["device"] = draw(st.sampled_from([None, "cpu", torch.device("cpu"), "meta"]))
    if draw(st.booleans()):
        options["requires_grad"] = draw(st.booleans())
    return name, args, options


def ends_the_process(name: str, args: tuple[Any, ...], dtype: Any) -> bool:
    """Whether stock torch divides by a step that int64 makes 0: SIGFPE, as in 2.8 and 2.12."""
    asked = name == "arange" and dtype in (torch.int64, int) and len(args) == 3 and 0 < args[2] < 1
    return asked and _ends_by_zero()


@functools.cache
def _ends_by_zero() -> bool:
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            torch.arange(0.0, 3.0, 0.5, dtype=torch.int64)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def construct(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | type[Exception]:
    torch.default_generator.manual_seed(7)
    try:
        result: torch.Tensor = getattr(torch, name)(*args, **options)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        return type(error)
    return result


def assert_same(name: str, got: Any, expected: Any) -> None:
    if isinstance(expected, type):
        assert got is expected
        return
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
    assert (got.requires_grad, got.is_leaf) == (expected.requires_grad, expected.is_leaf)
    if name not in ("empty", "Tensor") and got.device.type != "meta":
        assert torch.equal(got.detach(), expected.detach())


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def guarded(request: pytest.FixtureRequest) -> Iterator[ConstructorGuard]:
    guard = ConstructorGuard()
    torch.arange(3.0, device="meta").sum()  # torch imports its meta kernels now, not under zero.Init
    with zero_init(request.param):
        yield guard
        while guard._opens:
            guard.close()


many = settings(
    max_examples=DRAWS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
batches = st.lists(calls(), min_size=CALLS_PER_DRAW, max_size=CALLS_PER_DRAW)


def compare(guard: ConstructorGuard, cases: list[Any], reference: AbstractContextManager[None]) -> None:
    """The cases under the guard against the same without it, inside ``reference``."""
    with reference:
        expected = [construct(*case) for case in cases]
    with guard:
        got = [construct(*case) for case in cases]
    for case, ours, theirs in zip(cases, got, expected, strict=True):
        assert_same(case[0], ours, theirs)


def test_explicit_dtype_gives_what_plain_torch_gives(guarded: ConstructorGuard) -> None:
    ran = 0

    @many
    @given(batches)
    def check(batch: list[Any]) -> None:
        nonlocal ran
        cases = [
            (name, args, {**options, "dtype": dtype})
            for name, args, options in batch
            for dtype in DTYPES
            if name != "Tensor"  # plain torch.Tensor(...) takes no dtype
            and not ends_the_process(name, args, dtype)
        ]
        ran += len(cases)
        compare(guarded, cases, plain_torch())

    check()
    assert ran > 4_000, ran  # for each of three zero.Init dtypes


def test_without_explicit_dtype_zero_init_decides(guarded: ConstructorGuard) -> None:
    ran = 0

    @many
    @given(batches)
    def check(batch: list[Any]) -> None:
        nonlocal ran
        cases = [*batch, *((n, a, {**o, "dtype": None}) for n, a, o in batch if n != "Tensor")]
        ran += len(cases)
        compare(guarded, cases, nullcontext())

    check()
    assert ran > 900, ran


@pytest.mark.parametrize("dtype", FLOATING)
def test_tensor_with_a_dtype_gets_it(guarded: ConstructorGuard, dtype: torch.dtype) -> None:
    with guarded:
        assert torch.Tensor(2, 3, dtype=dtype).dtype == dtype  # type: ignore[call-overload]
        assert torch.Tensor(2, 3, dtype=dtype).shape == (2, 3)  # type: ignore[call-overload]


def test_a_pristine_section_gives_what_plain_torch_gives(guarded: ConstructorGuard) -> None:
    @settings(many, max_examples=15)
    @given(batches)
    def check(batch: list[Any]) -> None:
        cases = [case for case in batch if case[0] != "Tensor"]
        with plain_torch():
            expected = [construct(*case) for case in cases]
        with guarded, pristine():
            got = [construct(*case) for case in cases]
            assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
        for case, ours, theirs in zip(cases, got, expected, strict=True):
            assert_same(case[0], ours, theirs)

    check()


@pytest.mark.parametrize("dtype", FLOATING)
def test_an_out_keeps_the_dtype_that_it_was_made_with(guarded: ConstructorGuard, dtype: torch.dtype) -> None:
    with guarded:
        out = torch.empty(4, dtype=dtype)
        begin = out.data_ptr()
        assert torch.arange(4, out=out) is out
        assert torch.full((4,), 0.1, out=out) is out
    with plain_torch():
        expected = torch.full((4,), 0.1, dtype=dtype)
    assert (out.dtype, out.data_ptr()) == (dtype, begin)
    assert torch.equal(out, expected)


def test_a_parameter_of_an_out_is_what_zero_init_makes_of_it(guarded: ConstructorGuard) -> None:
    stock = torch.zeros(4, dtype=torch.float64)
    torch.arange(4, out=stock)
    with guarded:
        out = torch.empty(4, dtype=torch.float64)
        assert torch.nn.Parameter(torch.arange(4, out=out)).dtype == stock.dtype
