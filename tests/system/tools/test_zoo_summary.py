"""The survey's summary says what was asked, and calls nothing the guard's fault that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from laboratory.zoo.summary import fails, markdown, problems, summarize

FAILS = {"error": "RuntimeError: no"}
RIGHT: dict[str, Any] = {"damaged": {}}


def row(**scenario: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "status": "built",
        "pair": "5.23.0 + 0.19.8",
        "tables": 1,
        "names": ["inv_freq"],
        "scenarios": {"S1": scenario},
        "protection": {"full": 1},
    }


@pytest.mark.parametrize(
    ("scenario", "said", "fault"),
    [
        ({"stock": RIGHT, "guard": FAILS}, ["S1: fails with the guard only: RuntimeError: no"], True),
        ({"guard": FAILS}, ["S1: fails with the guard, not asked without it: RuntimeError: no"], False),
        ({"stock": FAILS, "guard": FAILS}, [], False),
        ({"stock": FAILS}, [], False),
        ({"stock": RIGHT, "guard": RIGHT}, [], False),
        (
            {"stock": RIGHT, "guard": {"damaged": {"a.inv_freq": "off"}}},
            ["S1: `a.inv_freq` is damaged with the guard: off"],
            True,
        ),
    ],
)
def test_what_is_wrong_with_an_architecture(scenario: dict[str, Any], said: list[str], fault: bool) -> None:
    found = row(**scenario)
    assert [str(problem) for problem in problems(found)] == said
    assert fails(found) == fault
    for line in said:
        assert f"llama, {line}" in summarize([found])
        assert f"- llama, {line}" in markdown([found])


def test_a_kind_that_was_not_asked_for_has_no_count() -> None:
    (line,) = (line for line in markdown([row(guard=FAILS)]).splitlines() if line.startswith("| S1"))
    assert line == "| S1: direct `zero.Init` | not asked | 0 of 0 | not asked |"
    (line,) = (line for line in markdown([row(stock=RIGHT)]).splitlines() if line.startswith("| S1"))
    assert line == "| S1: direct `zero.Init` | 0 of 1 | not asked | not asked |"
