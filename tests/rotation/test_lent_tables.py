"""A repeated table is a copy that is made when somebody writes: what is read is what a copy would hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from safe_rope.rotation import fp32_application
from safe_rope.rotation._cos_sin import CosSin, plain


def _tables() -> tuple[CosSin, torch.Tensor, torch.Tensor]:
    values = torch.arange(12.0).view(3, 4)
    return CosSin(values, torch.bfloat16, True), values, values.clone()


def _write_to_numpy(table: torch.Tensor) -> None:
    np.multiply(table.numpy(), 2, out=table.numpy())


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda table: table.mul_(2),
    "view": lambda table: table[0, 1].zero_(),
    "view of a view": lambda table: table[0].t()[1:].add_(1),
    "setitem": lambda table: table.__setitem__((0, 0), 5.0),
    "out": lambda table: torch.add(table, 1, out=table),
    "data": lambda table: table.data.fill_(3),
    "numpy": _write_to_numpy,
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_copy_stays_there(write: str) -> None:
    table, values, before = _tables()
    copy = table.repeat(1, 1, 1)
    assert copy.shape == (1, 3, 4)
    assert torch.equal(plain(copy)[0], before)
    WRITES[write](copy)
    expected = before[None].clone()
    WRITES[write](expected)
    assert torch.equal(plain(copy), expected)
    assert torch.equal(values, before)


@pytest.mark.parametrize("write", ["mul_", "setitem", "data", "view"])
def test_what_is_written_to_the_table_is_not_in_the_copy(write: str) -> None:
    table, values, before = _tables()
    copy = table.repeat(1, 1)
    second = table.repeat(1, 1, 1)
    if write == "view":
        table[0].zero_()
    else:
        WRITES[write](table)
    assert not torch.equal(values, before)
    assert torch.equal(plain(copy), before)
    assert torch.equal(plain(second)[0], before)


def test_a_copy_is_read_without_being_made() -> None:
    table, values, _ = _tables()
    copy = table.repeat(1, 1, 1)
    rows = torch.gather(copy, 1, torch.tensor([[[2] * 4]]))
    assert torch.equal(plain(rows)[0, 0], values[2])
    assert plain(copy).data_ptr() == values.data_ptr()
    assert plain(table.repeat(2, 1, 1)).data_ptr() != values.data_ptr()
    assert copy.contiguous() is copy


@pytest.mark.parametrize("written", ["cos", "sin", "source"])
def test_the_same_tables_turn_by_what_was_written_to_them_meanwhile(written: str) -> None:
    def stock(tensor: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        sin, cos = (torch.repeat_interleave(table[:, :, None, :], 2, 3) for table in (sin, cos))
        return tensor * cos + torch.stack((-tensor[..., 1::2], tensor[..., ::2]), -1).flatten(-2) * sin

    torch.manual_seed(0)
    turn, x, table = fp32_application(stock), torch.randn(1, 1, 4, 16).bfloat16(), torch.randn(1, 1, 16)
    for _ in range(2):  # the second tables are found to be equal to the first
        both = CosSin(table.clone(), torch.bfloat16)
        sin, cos = both.split(8, -1)
        before = turn(x, sin, cos)
        assert torch.equal(before, turn(x, sin, cos))
        {"cos": cos, "sin": sin, "source": both}[written].mul_(2)
        exact = stock(x.float(), plain(sin), plain(cos)).bfloat16()
        assert torch.equal(turn(x, sin, cos), exact)
        assert not torch.equal(before, exact)
