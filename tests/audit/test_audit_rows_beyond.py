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


def phases(rows: int) -> torch.Tensor:
    return torch.outer(torch.arange(rows).float(), 10000.0 ** -(torch.arange(PAIRS) / PAIRS))


def turns(rows: int) -> torch.Tensor:
    return torch.polar(torch.ones(rows, PAIRS), phases(rows))


def padded(rows: int) -> torch.Tensor:
    return torch.cat((torch.zeros(1, 2 * PAIRS), sines(rows)[1:]))


def slow_sines(rows: int) -> torch.Tensor:
    return (0.02 * torch.arange(rows).float())[:, None].mul(torch.tensor([1.0, 0.7])).sin()


def saturated(rows: int) -> torch.Tensor:
    steps = torch.arange(rows).float()[:, None] * torch.tensor([0.013, 0.0171])
    return steps.clamp(max=float(steps[FIRST - 1, 0]))


RIGHT: dict[str, Any] = {
    "complex": turns,
    "complex, scaled": lambda rows: 1.1 * turns(rows),
    "scaled": lambda rows: 1.1386 * sines(rows),
    "padded": padded,
    "sines of few columns": lambda rows: phases(rows)[:, :2].sin(),
    "slow sines": slow_sines,
    "phases": phases,
    "phases below 1": lambda rows: phases(rows) / FIRST,
    "decays": lambda rows: torch.linspace(0.9, 0.99, 8) ** torch.arange(rows).float()[:, None],
    "saturated": saturated,
}


def audited(make: Any, table: torch.Tensor) -> str:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("freqs", make(FIRST), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.freqs[: x.shape[0]]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding, self.linear = Made(), nn.Linear(2, 2)
            self.encoding.freqs = table

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoding(self.linear(x))

    return safe_rope.audit(Holder()).verdict


@pytest.mark.parametrize("rows", [FIRST + 1, 1024])
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_tables_of_any_kind_go_on(make: Any, rows: int) -> None:
    assert audited(make, make(rows)) == "ok"


def test_a_table_of_eight_rows_that_has_not_come_to_its_largest_goes_on() -> None:
    class Eight(Short):
        def __init__(self) -> None:
            super().__init__()
            self.table = self.table[:8, PAIRS:].clone()

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding, self.linear = Eight(), nn.Linear(2, 2)
            self.encoding.table = sines(1024)[:, PAIRS:].clone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoding(self.linear(x))

    assert safe_rope.audit(Holder()).ok


@pytest.mark.parametrize("how", ["moved", "zero", "nan"])
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_tables_of_any_kind_that_do_not_go_on_are_not_right(make: Any, how: str) -> None:
    table = make(1024)
    if how == "moved":
        table[FIRST:] = table[FIRST:].roll(300, 0)
    else:
        table[FIRST:] = 0.0 if how == "zero" else torch.nan
    if torch.equal(table, make(1024)):
        return  # each of those rows is the same
    assert audited(make, table) == "unknown"
