"""The constructors of one thread, while another opens guards, pristine sections or neither."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.zero_init import assert_stock, assert_truthful, assert_unchanged, replaceable, zero_init

from safe_rope.constructors import ConstructorGuard, pristine

pytestmark = [pytest.mark.usefixtures("deepspeed_group", "everything_is_put_back"), pytest.mark.contract]
FP32, BF16 = torch.float32, torch.bfloat16


def in_threads(work: Callable[[], None], count: int) -> None:
    """Run ``work`` in ``count`` threads at once; raise what one of them raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def in_thread(work: Callable[[], None]) -> None:
    in_threads(work, 1)


def test_another_thread_gets_truthful_constructors() -> None:
    with ConstructorGuard(), zero_init():
        in_thread(assert_truthful)
        with pristine():
            assert torch.ones(3).dtype == FP32
            in_thread(assert_truthful)


def test_guard_of_another_thread() -> None:
    guard = ConstructorGuard()
    in_thread(guard.open)
    with zero_init():
        assert_truthful()
        in_thread(guard.close)
        assert_stock()
    with pristine():
        pass  # another thread cannot take a mode off this one's stack; what it left is without effect


def test_a_guard_opened_in_another_thread_leaves_no_mode_there() -> None:
    def work() -> None:
        with ConstructorGuard():
            assert_truthful()
            assert torch.overrides._get_current_function_mode_stack()
        assert not torch.overrides._get_current_function_mode_stack()

    with zero_init():
        in_thread(work)


def test_many_threads_open_and_close() -> None:
    def work() -> None:
        for _ in range(30):
            with ConstructorGuard():
                assert torch.ones(2, dtype=FP32).dtype == FP32
                with pristine():
                    assert torch.ones(2).dtype == FP32

    with zero_init():
        stock = replaceable()
        in_threads(work, 6)
        assert_unchanged(stock)


def test_the_default_dtype_of_pristine_sections_in_two_threads() -> None:
    torch.set_default_dtype(BF16)
    try:

        def work() -> None:
            for _ in range(200):
                with pristine(), pristine():
                    time.sleep(1e-5)
                    assert (torch.arange(3) / 2).dtype == FP32

        in_threads(work, 4)
        assert torch.get_default_dtype() == BF16
    finally:
        torch.set_default_dtype(FP32)
