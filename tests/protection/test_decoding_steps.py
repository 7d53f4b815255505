"""Steps of decoding take rows that were made ahead: the tables, and what is done with them, are the same."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import survival
from transformers.models.llama import modeling_llama

from safe_rope.rotation import fp32_application
from safe_rope.rotation._cos_sin import CosSin, plain
from safe_rope.tables import RotaryTable

if "position_ids" not in inspect.signature(modeling_llama.LlamaRotaryEmbedding.forward).parameters:
    pytest.skip("before transformers 4.38 Llama asks for tables by length", allow_module_level=True)
# What other tests leave in a process may keep a module from making rows ahead.
pytestmark = pytest.mark.fresh
FIRST = 250


def _rope() -> Any:
    model = survival.build("llama")
    return next(m for m in model.modules() if type(m).__name__ == "LlamaRotaryEmbedding")


def _tables(rope: Any, position: int, batch: int = 1) -> tuple[CosSin, CosSin]:
    x = torch.zeros(batch, 1, 8, dtype=torch.bfloat16)
    cos, sin = rope(x, torch.full((batch, 1), position))
    assert isinstance(cos, CosSin)
    assert isinstance(sin, CosSin)
    return cos, sin


def _true(rope: Any, position: int, batch: int = 1) -> list[torch.Tensor]:
    table = RotaryTable(rope.inv_freq, rope.attention_scaling)
    return [torch.cat((half, half), -1) for half in table.lookup(torch.full((batch, 1), position))]


def _states(rope: Any, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    width = 2 * rope.inv_freq.numel()
    return [torch.randn(batch, 1, heads, width).to(dtype).transpose(1, 2) for heads in (4, 2)]


@pytest.mark.parametrize("batch", [1, 3])
def test_each_position_has_its_own_tables_in_whatever_order_it_is_asked_for(batch: int) -> None:
    rope = _rope()
    rows = 0
    for position in (*range(FIRST, FIRST + 140), FIRST + 3, FIRST + 4, FIRST + 5, 7, 4095, 4096, 4097, 0):
        tables = _tables(rope, position, batch)
        rows += tables[0].row is not None
        for got, expected in zip(tables, _true(rope, position, batch), strict=True):
            assert (got.shape, got.stride()) == (expected.shape, expected.stride())
            assert torch.equal(got + 0, expected), position
    assert rows > 100
    ids = torch.tensor([[5], [6], [5]])[:batch]
    cos, _ = rope(torch.zeros(batch, 1, 8), ids)
    assert torch.equal(cos + 0, torch.cat([_true(rope, int(i))[0] for i in ids]))


def _write_to_numpy(table: torch.Tensor) -> None:
    np.multiply(table.numpy(), 2, out=table.numpy())


def test_a_row_goes_with_another_sin_as_a_table_does() -> None:
    rope = _rope()
    (cos, sin), (q, k) = [_tables(rope, FIRST + step) for step in range(4)][-1], _states(rope)
    assert cos.row is not None
    expected = modeling_llama.apply_rotary_pos_emb(q, k, *map(CosSin, _true(rope, FIRST + 3)))
    for other in (plain(sin).clone(), sin):
        got = modeling_llama.apply_rotary_pos_emb(q, k, cos, other)
        assert all(map(torch.equal, got, expected))
    swapped = modeling_llama.apply_rotary_pos_emb(q, k, sin, cos)
    again = modeling_llama.apply_rotary_pos_emb(q, k, *map(CosSin, _true(rope, FIRST + 3)[::-1]))
    assert all(map(torch.equal, swapped, again))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda table: table.mul_(2),
    "view": lambda table: table[0, 0, 1].zero_(),
    "data": lambda table: table.data.fill_(3),
    "numpy": _write_to_numpy,
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_row_stays_there_and_is_what_rotates(write: str, batch: int) -> None:
    rope = _rope()
    tables = [_tables(rope, FIRST + step, batch) for step in range(4)]
    cos, sin = tables[-1]
    assert cos.row is not None
    q, k = _states(rope, batch)
    modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    WRITES[write](cos)
    expected = _true(rope, FIRST + 3, batch)
    WRITES[write](expected[0])
    assert torch.equal(plain(cos), expected[0])
    got = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    again = modeling_llama.apply_rotary_pos_emb(q, k, *map(CosSin, expected))
    assert all(map(torch.equal, got, again))
    for step in (3, 2, 4):
        for table, true in zip(
            _tables(rope, FIRST + step, batch), _true(rope, FIRST + step, batch), strict=True
        ):
            assert torch.equal(table + 0, true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_rotate_as_tables_do(batch: int, trained: bool, dtype: torch.dtype) -> None:
    rope = _rope()
    q, k = _states(rope, batch, dtype)
    if trained:
        q, k = q.requires_grad_(), k.requires_grad_()
    for step in range(4):
        row = _tables(rope, FIRST + step, batch)
        true = [CosSin(table) for table in _true(rope, FIRST + step, batch)]
        for swapped in (False, True):
            ours, others = (tables[::-1] if swapped else tables for tables in (row, true))
            for _ in range(2):  # as two layers
                got = modeling_llama.apply_rotary_pos_emb(q, k, *ours)
                expected = modeling_llama.apply_rotary_pos_emb(q, k, *others)
                assert all(map(torch.equal, got, expected))
                if trained:
                    weights = [torch.ones_like(one).cumsum(-1) for one in got]
                    gradients = torch.autograd.grad(got, (q, k), weights)
                    assert all(map(torch.equal, gradients, torch.autograd.grad(expected, (q, k), weights)))
    assert row[0].row is not None


@pytest.mark.parametrize("batch", [1, 3])
def test_who_turns_back_by_a_row_leaves_it_to_the_next_layer(batch: int) -> None:
    """DeepSeek-V4 rotates what attention gives by cos and -sin, in each layer."""
    rope = _rope()
    q, k = _states(rope, batch)
    for step in range(4):
        cos, sin = _tables(rope, FIRST + step, batch)
        c, s = _true(rope, FIRST + step, batch)
        later = -_tables(rope, FIRST + step + 1, batch)[1]
        pairs: dict[str, Callable[[Any, Any], Any]] = {
            "there": lambda cos, sin: (cos, sin),
            "back": lambda cos, sin: (cos, -sin),
            "there again": lambda cos, sin: (cos, operator.neg(-sin)),
            "cos for both": lambda cos, sin: (cos, -cos),
            "cos negated": lambda cos, sin: (-cos, sin),
            "swapped": lambda cos, sin: (-sin, cos),
            "shifted": lambda cos, sin: (cos, sin + 0.5),
            "doubled": lambda cos, sin: (cos, (-sin).mul_(2)),
        }
        chosen = {name: (choose(cos, sin), choose(c, s)) for name, choose in pairs.items()}
        chosen["another's"] = (cos, later), (c, -_true(rope, FIRST + step + 1, batch)[1])
        for name, (ours, true) in chosen.items():
            for _ in range(2):
                got = modeling_llama.apply_rotary_pos_emb(q, k, *ours)
                expected = modeling_llama.apply_rotary_pos_emb(q, k, *map(CosSin, true))
                assert all(map(torch.equal, got, expected)), (step, name)
        negated = -sin
        assert torch.equal(plain(negated.mul_(3)), -3 * s)
        assert negated.dtype == torch.bfloat16, "as what is computed of a table has"
        for table, true in ((cos, c), (sin, s)):
            assert torch.equal(table + 0, true)
    assert cos.row is not None
    assert sin.row is cos.row


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (4, 1, 1), (2, 3, 1, 1)])
def test_a_table_that_is_repeated_in_front_is_what_torch_repeats(counts: tuple[int, ...]) -> None:
    values = torch.randn(7, 4)
    table, expected = CosSin(values, torch.bfloat16), values.repeat(*counts)
    for got in (table.repeat(*counts), torch.Tensor.repeat(table, *counts)):
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        assert torch.equal(plain(got), expected)
        got.mul_(2)
        assert torch.equal(plain(got), expected * 2)
        assert torch.equal(plain(table), values)


def test_layers_with_a_table_each_rotate_with_what_each_holds() -> None:
    rope = _rope()
    q, k = _states(rope)
    for values in (
        _true(rope, 5),
        _true(rope, 5),
        _true(rope, 6),
        [-t for t in _true(rope, 0)],
        _true(rope, 0),
    ):
        got = modeling_llama.apply_rotary_pos_emb(q, k, *map(CosSin, values))
        expected = modeling_llama.apply_rotary_pos_emb.__wrapped__(q.float(), k.float(), *values)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.view(torch.int16), other.bfloat16().view(torch.int16))


def _apply(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    """Rotate as transformers 4.48 does, which takes positions and looks at none."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (_rotated(q) * sin), (k * cos) + (_rotated(k) * sin)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_that_are_not_alike_take_turns_with_a_row(batch: int, mode: Any) -> None:
    rope, apply = _rope(), fp32_application(_apply)
    kinds: list[list[torch.Tensor]] = [
        _states(rope, batch),
        [x[:, :1] for x in _states(rope, batch)],
        _states(rope, batch, torch.float32),
        [x.contiguous() for x in _states(rope, batch)],
        [_states(rope, batch)[0], _states(rope, batch, torch.float16)[1]],
        [x.transpose(1, 2) for x in _states(rope, batch)],
    ]
    orders: tuple[Callable[[Any, Any], Any], ...] = (
        lambda cos, sin: (cos, sin),
        lambda cos, sin: (sin, cos),
        lambda cos, sin: (cos, cos),
        lambda cos, sin: (cos, -sin),
        lambda cos, sin: (cos, sin),
    )
    with mode():
        for step in range(6):
            row = _tables(rope, FIRST + step, batch)
            cos, sin = map(CosSin, _true(rope, FIRST + step, batch))
            for order, (q, k), _ in itertools.product(orders, kinds, range(2)):
                heads_at = 2 if q.shape[1] == 1 and q.shape[2] > 1 else 1
                ids = torch.arange(batch)[:, None] if step % 2 else None
                got = apply(q, k, *order(*row), ids, heads_at)
                expected = apply(q, k, *order(cos, sin), ids, heads_at)
                for one, other in zip(got, expected, strict=True):
                    assert (one.dtype, one.stride()) == (other.dtype, other.stride())
                    assert torch.equal(one, other)
    assert row[0].row is not None
