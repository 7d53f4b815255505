"""The guard and zero.Init in every order; what was replaced is the original again afterwards."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.zero_init import (
    assert_plain,
    assert_stock,
    assert_truthful,
    assert_unchanged,
    replaceable,
    zero_init,
)

from safe_rope.constructors import ConstructorGuard, interception_active, pristine

pytestmark = [pytest.mark.usefixtures("deepspeed_group", "everything_is_put_back"), pytest.mark.contract]
FP32, BF16 = torch.float32, torch.bfloat16


def test_guard_outside_init() -> None:
    with ConstructorGuard():
        assert_plain()
        with zero_init():
            assert_truthful()
        assert_plain()
        with zero_init():
            assert_truthful()


def test_guard_inside_init() -> None:
    with zero_init():
        stock = replaceable()
        assert_stock()
        for _ in range(2):
            with ConstructorGuard():
                assert_truthful()
            assert_stock()
            assert_unchanged(stock)


def test_guard_closed_before_an_init_that_opened_under_it() -> None:
    guard = ConstructorGuard()
    guard.open()
    with zero_init():
        assert_truthful()
        guard.close()
        assert_stock()


def test_guard_opened_in_init_and_closed_after_it() -> None:
    guard = ConstructorGuard()
    with zero_init():
        guard.open()
        assert_truthful()
    assert_plain()
    guard.close()


def test_nested_inits() -> None:
    with zero_init(), ConstructorGuard(), zero_init():
        assert_truthful()


def test_nested_and_repeated_opens_count() -> None:
    first, second = ConstructorGuard(), ConstructorGuard()
    with zero_init():
        first.open()
        first.open()
        second.open()
        first.close()
        assert_truthful()
        second.close()
        assert_truthful()
        first.close()
        assert_stock()
    with pytest.raises(RuntimeError, match="open"):
        first.close()


@pytest.mark.parametrize("inside", [True, False], ids=["guard inside", "guard outside"])
def test_an_exception_puts_everything_back(inside: bool) -> None:
    order: list[Callable[[], Any]] = [zero_init, ConstructorGuard]

    def fail() -> None:
        with ExitStack() as stack:
            for enter in order if inside else order[::-1]:
                stack.enter_context(enter())
            stack.enter_context(pristine())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_constructor_that_raises_still_leaves_the_next_one_right() -> None:
    with ConstructorGuard(), zero_init():
        with pytest.raises(TypeError):
            torch.zeros("three", dtype=FP32)  # type: ignore[call-overload]
        with pytest.raises(ZeroDivisionError), pristine():
            raise ZeroDivisionError
        assert_truthful()


def test_shutdown_and_restore_init_context() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    with ConstructorGuard(), zero_init():
        for _ in range(2):
            pp.shutdown_init_context()
            assert_plain()
            pp.restore_init_context()
            assert_truthful()


def test_guard_opened_while_the_init_context_is_shut_down() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    with zero_init():
        pp.shutdown_init_context()
        with ConstructorGuard():
            assert_plain()
            pp.restore_init_context()
            assert_truthful()
        assert_stock()


def test_a_pristine_section_makes_plain_fp32_cpu_tensors_without_autocast() -> None:
    torch.set_default_dtype(BF16)
    try:
        for context in (zero_init, ConstructorGuard, lambda: torch.device("meta")):
            with context(), torch.autocast("cpu", dtype=BF16):  # type: ignore[attr-defined]
                with pristine():
                    assert not torch.is_autocast_enabled("cpu")
                    assert torch.is_grad_enabled()
                    for made in (torch.ones(2), torch.linspace(0, 1, 2), torch.arange(2) / 3):
                        assert (made.dtype, made.device.type) == (FP32, "cpu")
                    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP32
                    assert torch.ones(2, dtype=BF16).dtype == BF16
                    assert torch.Tensor([1.5]).tolist() == [1.5]
                    assert not interception_active()
                assert torch.is_autocast_enabled("cpu")
                assert torch.get_default_dtype() == BF16
    finally:
        torch.set_default_dtype(FP32)


def test_mode_contexts_may_overlap_in_any_order() -> None:
    guard = ConstructorGuard()
    with zero_init():
        with torch.device("cpu"):
            guard.open()
        assert_truthful()
        device = torch.device("cpu")
        device.__enter__()
        guard.close()
        device.__exit__(None, None, None)
        with torch.overrides.BaseTorchFunctionMode():
            guard.open()
        assert_truthful()
        guard.close()


def test_a_default_device_may_come_and_go() -> None:
    with zero_init():
        torch.set_default_device("cpu")
        with ConstructorGuard():
            assert_truthful()
            torch.set_default_device(None)
            assert_truthful()
            torch.set_default_device("cpu")
        torch.set_default_device(None)


def test_the_mode_is_only_there_inside_an_open_init() -> None:
    def modes() -> int:
        return len(torch.overrides._get_current_function_mode_stack())

    with ConstructorGuard():
        assert modes() == 0
        with zero_init():
            assert modes() == 1
        assert modes() == 0
        with pristine():
            assert modes() == 0


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("how", ["section", "sections", "default", "both", "none"])
def test_a_section_of_a_device_is_left_and_entered_again(how: str, raises: bool) -> None:
    stack = torch.overrides._get_current_function_mode_stack
    with ExitStack() as around:
        if how in ("default", "both"):
            torch.set_default_device("meta")
            around.callback(torch.set_default_device, None)
        for _ in range({"section": 1, "sections": 2, "both": 1}.get(how, 0)):
            around.enter_context(torch.device("meta"))
        before = stack()
        with contextlib.suppress(KeyError), pristine():
            assert torch.arange(2).device == torch.device("cpu")
            with torch.device("meta"):
                assert torch.arange(2).is_meta
            assert torch.tensor([1.0]).device.type == "cpu"
            if raises:
                raise KeyError
        assert len(stack()) == len(before)
        assert all(map(operator.is_, stack(), before))
        assert torch.arange(2).is_meta is (how != "none")


def test_a_default_device_that_was_taken_back_is_the_cpu() -> None:
    torch.set_default_device("meta")
    torch.set_default_device(None)
    with pristine():
        assert torch.arange(2).device == torch.device("cpu")


def test_operations_in_a_section_of_a_device_run_no_python() -> None:
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        called.append(frame.f_code.co_name)

    with torch.device("meta"), pristine():
        table = torch.arange(4.0)
        sys.setprofile(note)
        try:
            table.cos().numel()
        finally:
            sys.setprofile(None)
    assert "__torch_function__" not in called
