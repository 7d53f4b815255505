"""Rows of a table beyond those that its constructor makes: a parent has put a longer one there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

FIRST, PAIRS = 64, 16


def sines(rows: int, counted: torch.dtype = torch.float32) -> torch.Tensor:
    phases = torch.outer(torch.arange(rows, dtype=counted).float(), 10000.0 ** -(torch.arange(PAIRS) / PAIRS))
    return torch.cat((phases.cos(), phases.sin()), -1)


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", sines(FIRST), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class Lengthened(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.encoding, self.linear = Short(), nn.Linear(2, 2)
        self.encoding.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoding(self.linear(x))


def rounded(rows: int, low: torch.dtype) -> torch.Tensor:
    table = sines(rows)
    return torch.cat((table[:FIRST], table[FIRST:].to(low).float()))


def moved(rows: int) -> torch.Tensor:
    table = sines(rows)
    table[FIRST:] = table[FIRST:].roll(1, 0)
    return table


def one_row(rows: int) -> torch.Tensor:
    table = sines(rows)
    table[rows // 2] += 0.3
    return table


@pytest.mark.parametrize("rows", [FIRST + 1, 1024, 32768])
def test_rows_that_go_on_as_the_first_are_right(rows: int) -> None:
    assert safe_rope.audit(Lengthened(sines(rows))).ok


@pytest.mark.parametrize("rows", [1024, 32768])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rows: sines(rows, torch.bfloat16), id="counted in bfloat16"),
        pytest.param(lambda rows: rounded(rows, torch.bfloat16), id="bfloat16"),
        pytest.param(lambda rows: rounded(rows, torch.float16), id="float16"),
        pytest.param(lambda rows: torch.cat((sines(FIRST), torch.zeros(rows, 2 * PAIRS))), id="never filled"),
        pytest.param(moved, id="moved"),
        pytest.param(one_row, id="one row"),
    ],
)
def test_rows_that_do_not_go_on_as_the_first_are_not_right(make: Any, rows: int) -> None:
    model = Lengthened(make(rows))
    assert torch.equal(model.encoding.table[:FIRST], Short().table)
    assert float((model.encoding.table[:rows] - sines(rows)).abs().max()) > 2e-4
    report = safe_rope.audit(model)
    assert report.verdict == "unknown", str(report)
    assert "do not go on as those do" in report.findings[0].source


def test_a_table_of_nothing_is_no_table() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position_embeddings = nn.Parameter(torch.zeros(0, 1, 8, 4))
            self.weight = nn.Linear(2, 2)

    assert safe_rope.audit(Empty().requires_grad_(False)).ok
