"""A section is not broken up by a signal, and nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from safe_rope._base.uninterrupted import run_waiting, uninterrupted


class Interrupted(BaseException):
    pass


def raises(number: int, frame: Any) -> None:
    raise Interrupted(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, raises) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == dict.fromkeys(before, raises)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_waits_until_the_outermost_section_ends() -> None:
    done = []

    @uninterrupted()
    def outer() -> None:
        with uninterrupted():
            send()
            done.append("inner")
        done.append("outer")

    with pytest.raises(Interrupted):
        outer()
    assert done == ["inner", "outer"]


def test_of_two_different_signals_both_handlers_run() -> None:
    @uninterrupted()
    def section() -> None:
        send(signal.SIGINT)
        send(signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        section()
    assert caught.value.args == (signal.SIGTERM,)
    assert isinstance(caught.value.__context__, Interrupted)
    assert caught.value.__context__.args == (signal.SIGINT,)


def test_who_sends_the_same_signal_twice_is_not_kept_waiting() -> None:
    done = []

    @uninterrupted()
    def section() -> None:
        send()
        done.append("one")
        send()
        done.append("two")

    with pytest.raises(Interrupted):
        section()
    assert done == ["one"]


def test_a_long_section_may_end_where_it_says_so() -> None:
    done = []

    @uninterrupted()
    def section() -> None:
        run_waiting()
        send()
        done.append("one")
        run_waiting()
        done.append("two")

    with pytest.raises(Interrupted):
        section()
    assert done == ["one"]


def test_an_error_inside_is_not_hidden_and_a_decorated_function_returns() -> None:
    with pytest.raises(ValueError), uninterrupted():
        raise ValueError

    @uninterrupted()
    def function(depth: int) -> int:
        return function(depth - 1) + 1 if depth else 0

    assert function(3) == 3


def test_other_threads_have_no_sections() -> None:
    def section() -> None:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is raises
            done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=section)
    thread.start()
    thread.join()
    assert done == [True]


def test_what_ends_the_process_ends_it_inside_as_well() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
