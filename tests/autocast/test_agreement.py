"""Ranks, here threads, that share one report on what is safe."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from safe_rope.autocast import _deepspeed, initialize
from safe_rope.autocast.safety import ParameterSafety, SafetyReport, agreement, ranks
from safe_rope.errors import ConfigError, PrecisionWarning


def report(**safe: bool) -> SafetyReport:
    entries = (ParameterSafety(name, yes, "cast" if yes else "read", 4, 16) for name, yes in safe.items())
    return SafetyReport(tuple(entries))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs functions as ranks; returns what each returned or raised."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "default_store", lambda: store)

    def run(*functions: Callable[[], SafetyReport]) -> list[Any]:
        found: list[Any] = [None] * len(functions)

        def one(rank: int) -> None:
            try:
                with agreement(lambda join: (rank, list(range(len(functions))))) as agree:
                    found[rank] = agree(functions[rank]())
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(functions))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        return found

    return run


def test_reports_that_agree_stay_as_they_are(together: Any) -> None:
    own = [report(a=True, b=False) for _ in range(3)]
    assert all(one is other for one, other in zip(own, together(*(lambda r=r: r for r in own)), strict=True))


def test_what_is_unsafe_on_one_rank_is_unsafe_on_all_that_have_it(together: Any) -> None:
    for _ in range(2):  # a second engine of the same ranks
        own = report(a=True, b=True), report(a=False, b=True), report(c=True)
        found = together(*(lambda one=one: one for one in own))
        assert [sorted(one.safe) for one in found] == [["b"], ["b"], ["c"]]
        assert found[0].parameters[0].reason == "read, on rank 1"
        assert found[1].parameters[0].reason == "read"
        for one in found:
            assert "disagree about 1 parameter, such as a (read, on rank 1)" in one.warnings[0]


class UnprintableError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError


ENDS = [RuntimeError("no such input"), SystemExit(3), KeyboardInterrupt(), UnprintableError()]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("end", ENDS, ids=lambda one: type(one).__name__)
def test_a_rank_that_fails_tells_the_others(failing: int, end: BaseException, together: Any) -> None:
    def fails() -> SafetyReport:
        raise end

    found = together(*(fails if rank == failing else lambda: report(a=True) for rank in range(3)))
    for rank, error in enumerate(found):
        if rank == failing:
            assert error is end
        else:
            assert isinstance(error, ConfigError)
            assert f"rank {failing} could not tell" in str(error)
            assert type(end).__name__ in str(error)
            assert "no such input" in str(error) or end is not ENDS[0]


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_what_failed_before_is_over(failing: set[int], together: Any) -> None:
    def fails() -> SafetyReport:
        raise RuntimeError("no such input")

    for _ in range(2):
        found = together(*(fails if rank in failing else lambda: report(a=True) for rank in range(3)))
        assert all(
            isinstance(one, RuntimeError if rank in failing else ConfigError)
            for rank, one in enumerate(found)
        )
        own = [report(a=True) for _ in range(3)]
        found = together(*(lambda r=r: r for r in own))
        assert all(one is other for one, other in zip(own, found, strict=True))


def test_the_first_rank_tells_that_its_wait_has_ended(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, who: int | str) -> Any:
        if who != "all":
            raise KeyboardInterrupt
        return heard(self, who)

    heard = ranks._Talk._get
    monkeypatch.setattr(ranks._Talk, "_get", interrupted)
    first, other = together(*[lambda: report(a=True)] * 2)
    assert isinstance(first, KeyboardInterrupt)
    assert "rank 0 could not tell which parameters are safe: KeyboardInterrupt" in str(other)


def test_a_store_that_is_gone_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "default_store", lambda: None / 0)
    with pytest.raises(SystemExit), agreement(lambda join: (0, [0, 1])):
        raise SystemExit


def test_a_rank_alone_forms_no_group_for_an_error() -> None:
    asked: list[bool] = []

    def alone(join: bool) -> tuple[int, list[int]]:
        asked.append(join)
        return 0, [0]

    with pytest.raises(RuntimeError), agreement(alone):
        raise RuntimeError
    assert asked == [False]
    with agreement(alone) as agree:
        own = report(a=True)
        assert agree(own) is own
    assert asked == [False, True]


@pytest.mark.parametrize(
    "wrong", [{"torch_autocast": {"enabled": True, "dtype": "nonsense"}}, "no such file"]
)
def test_a_wrong_config_is_told(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "default_store", lambda: store)
    monkeypatch.setattr(_deepspeed, "ranks", lambda mpu, join, **_: (1, [0, 1]))
    with pytest.raises(ConfigError) as raised:
        initialize(model=nn.Linear(2, 2), config=wrong)
    with pytest.raises(ConfigError) as told, agreement(lambda join: (0, [0, 1])) as agree:
        agree(report(a=True))
    assert f"rank 1 could not tell which parameters are safe: ConfigError: {raised.value}" in str(told.value)
