"""A few of many combinations for every day, all of them for ``--all``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest


def in_turn(cases: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> list[Any]:
    """Combine every case with every value, all but one of which are exhaustive; which one takes turns.

    Args:
        cases: parameters of a test. Each of them meets every value, where it is in enough cases.
        values: of one more parameter, which comes last.

    """
    return list(_combined(cases, values))


def _combined(cases: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> Iterator[Any]:
    orders = [list(dict.fromkeys(column)) for column in zip(*cases, strict=True)]
    for case in cases:
        turn = sum(order.index(one) for order, one in zip(orders, case, strict=True)) % len(values)
        for number, value in enumerate(values):
            yield pytest.param(*case, value, marks=[] if number == turn else pytest.mark.exhaustive)
