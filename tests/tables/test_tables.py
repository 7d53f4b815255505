"""The values of the tables: against float64, mpmath and the installed transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import mpmath
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from safe_rope.tables import RotaryTable, StockTable, _angles, _exact
from safe_rope.tables._exact import _store
from safe_rope.tables._levels import COARSE, FINE, TOP, Levels
from safe_rope.tables._stock import StockLookup

THETAS = [1e4, 5e5, 1e6]
TWO_DIGIT_POSITIONS = COARSE.rows << COARSE.shift


def inverse_frequencies(theta: float = 1e4, dim: int = 128) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float64) / dim
    return (1.0 / theta**exponents).to(torch.float32)


@pytest.fixture(autouse=True)
def _fifty_digits() -> Iterator[None]:
    with mpmath.workdps(50):
        yield


def error_in_ulps(got: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest error in units of FP32's last place at the true value (float64)."""
    ulp = torch.ldexp(torch.ones_like(true), torch.frexp(true).exponent - 24)
    return float(((got.to(torch.float64) - true).abs() / ulp).max())


def phases(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Exact below 2**29: a product of a 29-bit and a 24-bit number."""
    return positions.to(torch.float64)[:, None] * inv_freq.to(torch.float64)


def true_cos_sin(position: int, inv_freq: float, scaling: float = 1.0) -> tuple[Any, Any]:
    phase = mpmath.mpf(position) * mpmath.mpf(inv_freq)
    return scaling * mpmath.cos(phase), scaling * mpmath.sin(phase)


def test_the_constant_is_two_pi() -> None:
    bits = _angles.FRACTION_BITS + _angles._GUARD_BITS
    with mpmath.workprec(2 * bits):
        assert int(mpmath.ldexp(2 * mpmath.pi, bits)) == _angles._TWO_PI


@pytest.mark.torch
@pytest.mark.parametrize("theta", THETAS)
def test_every_position_below_65536_is_within_one_ulp(theta: float) -> None:
    inv_freq = inverse_frequencies(theta)
    positions = torch.arange(65536)
    cos, sin = RotaryTable(inv_freq).lookup(positions)
    assert cos.dtype == sin.dtype == torch.float32
    phase = phases(positions, inv_freq)
    assert error_in_ulps(cos, phase.cos()) <= 1
    assert error_in_ulps(sin[1:], phase.sin()[1:]) <= 1
    assert not sin[0].any()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("theta", THETAS)
def test_random_blocks_below_ten_million_are_within_one_ulp(theta: float, dim: int) -> None:
    inv_freq = inverse_frequencies(theta, dim)
    table = RotaryTable(inv_freq)
    generator = torch.Generator().manual_seed(int(theta) + dim)
    for start in torch.randint(1, 10_000_000 - 1000, (25,), generator=generator).tolist():
        positions = torch.arange(start, start + 1000)
        cos, sin = table.lookup(positions)
        phase = phases(positions, inv_freq)
        assert error_in_ulps(cos, phase.cos()) <= 1
        assert error_in_ulps(sin, phase.sin()) <= 1


@pytest.mark.parametrize(("kind", "ulps"), [(RotaryTable, 1), (StockTable, 0)])
def test_other_runtimes_get_plain_operators_that_are_within_one_ulp(kind: Any, ulps: int) -> None:
    table = kind(inverse_frequencies(5e5), 1.25)
    positions = torch.randint(-10_000_000, 10_000_000, (50, 40))
    made = table.evaluate(positions)
    for other, own in zip(made, table.lookup(positions), strict=True):
        assert error_in_ulps(other, own.double()) <= ulps


@pytest.mark.parametrize("power", [12, 23, 24, 29, 31, 40, 62])
def test_positions_around_a_power_of_two_are_within_one_ulp(power: int) -> None:
    inv_freq = inverse_frequencies()
    positions = [2**power + offset for offset in (-2, -1, 0, 1, 2)]
    cos, sin = RotaryTable(inv_freq).lookup(torch.tensor(positions))
    for row, position in enumerate(positions):
        pairs = [true_cos_sin(position, value) for value in inv_freq.tolist()]
        assert error_in_ulps(cos[row], torch.tensor([float(c) for c, _ in pairs], dtype=torch.float64)) <= 1
        assert error_in_ulps(sin[row], torch.tensor([float(s) for _, s in pairs], dtype=torch.float64)) <= 1


def test_the_largest_int64_has_a_phase() -> None:
    inv_freq = inverse_frequencies(dim=8)
    cos, _ = RotaryTable(inv_freq).lookup(torch.tensor([2**63 - 1]))
    true = [float(true_cos_sin(2**63 - 1, value)[0]) for value in inv_freq.tolist()]
    assert error_in_ulps(cos[0], torch.tensor(true, dtype=torch.float64)) <= 1


@pytest.mark.parametrize("scaling", [1.0, 1.2079441541679836])
@pytest.mark.parametrize("digit", [FINE, COARSE, TOP])
def test_level_entries_are_correctly_rounded(digit: Any, scaling: float) -> None:
    inv_freq = (*inverse_frequencies(5e5).tolist(), 0.0, -0.75, 3.0e8, 1.17e-38)
    cos, sin = Levels(inv_freq, scaling).level(digit)
    carried = scaling if digit is COARSE else 1.0
    generator = torch.Generator().manual_seed(digit.shift)
    for row in [0, 1, digit.rows - 1, *torch.randint(digit.rows, (40,), generator=generator).tolist()]:
        true = [true_cos_sin(row << digit.shift, value, carried) for value in inv_freq]
        assert cos[row].tolist() == [float(c) for c, _ in true]
        assert sin[row].tolist() == [float(s) for _, s in true]


@pytest.mark.parametrize("digit", [FINE, COARSE, TOP])
def test_a_row_computed_alone_has_the_bits_of_the_level(digit: Any) -> None:
    levels = Levels(tuple(inverse_frequencies().tolist()), 0.9)
    index = torch.tensor([0, 1, digit.rows // 3, digit.rows - 1])
    assert torch.equal(levels.rows(digit, index), levels.level(digit)[:, index])


def test_bits_do_not_depend_on_how_positions_are_grouped() -> None:
    inv_freq = inverse_frequencies(5e5)
    start = TWO_DIGIT_POSITIONS - 700  # crosses the limits of the fine and of the coarse level
    positions = torch.arange(start, start + 1400)
    cos, sin = RotaryTable(inv_freq).lookup(positions)
    shuffle = torch.randperm(1400, generator=torch.Generator().manual_seed(0))
    gathered = RotaryTable(inv_freq).lookup(positions[shuffle])
    assert torch.equal(gathered[0], cos[shuffle])
    assert torch.equal(gathered[1], sin[shuffle])
    for row in (0, 699, 700, 1399):
        single = RotaryTable(inv_freq).lookup(positions[row])
        assert torch.equal(single[0], cos[row])
        assert torch.equal(single[1], sin[row])


def test_the_accelerator_path_gives_the_bits_of_the_cpu_path() -> None:
    table = RotaryTable(inverse_frequencies(), 1.25)
    limits = (1 << 12, 1 << 23, TWO_DIGIT_POSITIONS, 1 << 30)
    near = [limit + offset for limit in limits for offset in range(-3, 4)]
    positions = torch.tensor([0, 1, *near, 2**31 - 1])
    expected = torch.stack(table.lookup(positions, torch.float64))
    blocks = table._lookup._on_accelerator(positions)  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([rows for _, rows in blocks], dim=1), expected)


def test_levels_are_combined_by_products_and_sums_that_round_one_by_one() -> None:
    inv_freq = inverse_frequencies()
    levels = Levels(tuple(inv_freq.tolist()), 1.0)
    position = 9_876_543
    fine, coarse = levels.level(FINE)[:, position & 4095], levels.level(COARSE)[:, position >> 12]
    cos, sin = RotaryTable(inv_freq).lookup(torch.tensor(position), torch.float64)
    for j, (a, b, c, d) in enumerate(zip(*fine.tolist(), *coarse.tolist(), strict=True)):
        assert cos[j].item() == a * c - b * d  # Python's floats are never contracted
        assert sin[j].item() == b * c + a * d


def test_the_accelerator_path_marks_what_it_cannot_refuse_with_nan() -> None:
    lookup = RotaryTable(inverse_frequencies())._lookup
    positions = torch.tensor([-(2**31), -(2**63), 2**31, 2**63 - 1, 5, -5])
    ((_, rows),) = lookup._on_accelerator(positions)  # type: ignore[attr-defined]
    assert rows[:, :4].isnan().all()
    assert not rows[:, 4:].isnan().any()
    assert torch.equal(rows[0, 4], rows[0, 5])
    assert torch.equal(rows[1, 4], -rows[1, 5])


@pytest.mark.parametrize("shape", [(), (1,), (5000,)])
def test_a_device_without_float64_is_served_by_the_cpu(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = RotaryTable(inverse_frequencies())
    positions = torch.full(shape, 3_456_789)
    expected = table.lookup(positions)
    monkeypatch.setattr(_exact, "_has_float64", lambda device_type: False)  # as for mps
    for got, true in zip(table.lookup(positions), expected, strict=True):
        assert torch.equal(got, true)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("table_class", [RotaryTable, StockTable])
def test_cuda_has_the_bits_of_the_cpu(table_class: type[RotaryTable | StockTable]) -> None:
    table = table_class(inverse_frequencies(5e5), 1.25)
    for positions in (torch.arange(70000), torch.randint(0, 2**31 - 1, (5000,))):
        for on_cpu, on_cuda in zip(table.lookup(positions), table.lookup(positions.cuda()), strict=True):
            assert torch.equal(on_cpu, on_cuda.cpu())


def test_packed_and_batched_positions_give_each_position_its_row() -> None:
    table = RotaryTable(inverse_frequencies())
    cos, sin = table.lookup(torch.arange(6000))
    packed = torch.cat(
        (torch.arange(700), torch.arange(5000, 5900), torch.arange(3), torch.arange(4000, 4300))
    )
    batched = torch.stack((packed, packed))
    for positions in (packed, batched, batched.t(), batched[:, ::2], batched[None]):
        got = table.lookup(positions)
        assert torch.equal(got[0], cos[positions])
        assert torch.equal(got[1], sin[positions])
        assert got[0].is_contiguous()


@pytest.mark.parametrize("table_class", [RotaryTable, StockTable])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8])
def test_every_integer_dtype_is_a_position(dtype: torch.dtype, table_class: type[Any]) -> None:
    table = table_class(inverse_frequencies())
    positions = torch.arange(100)
    for got, expected in zip(table.lookup(positions.to(dtype)), table.lookup(positions), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("table_class", [RotaryTable, StockTable])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (2, 3, 4), (3, 100)])
def test_the_result_has_the_shape_of_the_positions(shape: tuple[int, ...], table_class: type[Any]) -> None:
    cos, sin = table_class(inverse_frequencies(dim=16)).lookup(torch.ones(shape, dtype=torch.int64))
    assert cos.shape == sin.shape == (*shape, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_results_are_rounded_once(dtype: torch.dtype) -> None:
    # Just above a tie of bfloat16 and of float16, by less than FP32 sees: two roundings go down to even.
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-11 + 2.0**-40, 1.0], dtype=torch.float64)
    got = torch.empty(3, dtype=dtype)
    _store(got, x)
    with mpmath.workprec({torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]):
        assert got.tolist() == [float(+mpmath.mpf(value)) for value in x.tolist()]

    inv_freq = inverse_frequencies()
    positions = torch.arange(123_456, 123_656)
    exact, _ = RotaryTable(inv_freq).lookup(positions, torch.float64)
    cos, _ = RotaryTable(inv_freq).lookup(positions, dtype)
    neighbours = (torch.nextafter(cos, torch.full_like(cos, direction)) for direction in (-2.0, 2.0))
    error = (cos.to(torch.float64) - exact).abs()
    for neighbour in neighbours:
        assert (error <= (neighbour.to(torch.float64) - exact).abs()).all()


def test_float64_results_are_near_the_true_value() -> None:
    inv_freq = inverse_frequencies()
    cos, _ = RotaryTable(inv_freq, 1.5).lookup(torch.tensor([9_999_999]), torch.float64)
    true = [float(true_cos_sin(9_999_999, value, 1.5)[0]) for value in inv_freq.tolist()]
    assert (cos[0] - torch.tensor(true, dtype=torch.float64)).abs().max() < 4e-16


def test_attention_scaling_multiplies_before_the_rounding() -> None:
    inv_freq, scaling = inverse_frequencies(), 1.2079441541679836
    positions = torch.arange(9000)
    cos, _ = RotaryTable(inv_freq, scaling).lookup(positions)
    assert error_in_ulps(cos, phases(positions, inv_freq).cos() * scaling) <= 0.5000001


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stock_table_has_the_bits_of_the_stock_module(dtype: torch.dtype, dim: int) -> None:
    inv_freq, cos, sin = stock_cos_sin(dim, 4096, dtype)
    got_cos, got_sin = StockTable(inv_freq).lookup(torch.arange(4096), dtype)
    assert torch.equal(got_cos, cos[:, : dim // 2])
    assert torch.equal(got_sin, sin[:, dim // 2 :])


def test_the_stock_table_has_the_bits_of_linear_scaling_in_4_36() -> None:
    if not hasattr(modeling_llama, "LlamaLinearScalingRotaryEmbedding"):
        pytest.skip("this transformers divides inv_freq, not the positions")
    module = modeling_llama.LlamaLinearScalingRotaryEmbedding(128, 4096, scaling_factor=3.0)
    cos, _ = module(torch.zeros(1), seq_len=4096)
    got, _ = StockTable(module.inv_freq, position_divisor=3.0).lookup(torch.arange(4096))
    assert torch.equal(got, cos[:, :64])


def test_the_stock_table_of_a_device_has_the_bits_of_the_direct_computation() -> None:
    lookup = StockTable(inverse_frequencies(), 1.1)._lookup
    positions = torch.tensor([3, 999, 0])
    for length in (1000, 1001, 5000):
        table = lookup._table(torch.device("cpu"), length)  # type: ignore[attr-defined]
        assert table[0].shape[0] >= length
        for part, direct in zip(table, lookup(positions, torch.float32), strict=True):
            assert torch.equal(part[positions], direct)


def stock_cos_sin(
    dim: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inv_freq and what the installed LlamaRotaryEmbedding gives, cos and sin ``[length, dim]``."""
    rotary_class = modeling_llama.LlamaRotaryEmbedding
    x = torch.zeros(1, dtype=dtype)
    if "config" in inspect.signature(rotary_class.__init__).parameters:
        module = rotary_class(LlamaConfig(hidden_size=2 * dim, num_attention_heads=2))
        cos, sin = module(x, torch.arange(length)[None])
        return module.inv_freq, cos[0], sin[0]
    module = rotary_class(dim, max_position_embeddings=length)
    cos, sin = module(x, seq_len=length)
    return module.inv_freq, cos, sin


@pytest.mark.parametrize("has_table", [False, True])
def test_what_a_cuda_graph_computes_is_within_an_ulp_of_the_cpu(has_table: bool) -> None:
    lookup = StockLookup(tuple((1e4 ** -(torch.arange(32) / 32)).tolist()), 1.25, 2.0)
    positions = torch.tensor([[0, 1, 63, 64, 4095, 131_071, -1]])
    expected = lookup(positions, torch.float32)
    if has_table:
        cos, sin = lookup(torch.arange(64), torch.float32)
        lookup._tables[positions.device] = cos, sin
    for got, true in zip(lookup._captured(positions), expected, strict=True):
        ulps = (got.view(torch.int32) - true.view(torch.int32)).abs()
        assert int(ulps.max()) <= 1
        assert not has_table or not ulps[:, :3].any()
