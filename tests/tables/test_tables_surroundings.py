"""Tables do not depend on what surrounds them and are no state: modes, compilers, copies, threads, errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from support.one_rank import environment

from safe_rope import tables
from safe_rope.tables import RotaryTable, StockTable, shared_table
from safe_rope.tables._rows import shared_rows

pytestmark = pytest.mark.fresh

TABLE_CLASSES = [RotaryTable, StockTable]


def inverse_frequencies(theta: float = 1e4, dim: int = 64) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float64) / dim
    return (1.0 / theta**exponents).to(torch.float32)


@pytest.fixture(autouse=True)
def _forget_tables() -> Iterator[None]:
    """Every test builds its tables itself, in the surroundings that it names."""
    forget()
    yield
    forget()


def forget() -> None:
    for interned in (tables._tables, tables._lookups):
        interned._recent.clear()
    gc.collect()


def start_anew() -> None:
    forget()
    assert not tables._lookups._live, "something still holds a table"


@pytest.fixture
def zero_init() -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    deepspeed = pytest.importorskip("deepspeed")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with environment():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        yield lambda: deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default_bfloat16": lambda: default_dtype(torch.bfloat16),
    "default_float64": lambda: default_dtype(torch.float64),
    "meta_device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}

POSITIONS = [
    torch.arange(5000),
    torch.tensor([3, 70_000]),
    torch.tensor([[2**33 + 5, 9], [2**31, 20_000_000]]),
]


def everything(table: RotaryTable | StockTable) -> list[torch.Tensor]:
    return [part for positions in POSITIONS for part in table.lookup(positions)]


def assert_same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_change_no_bit(name: str, table_class: type[Any]) -> None:
    inv_freq = inverse_frequencies()
    expected = everything(table_class(inv_freq, 1.25))
    start_anew()
    with SURROUNDINGS[name]():
        got = everything(table_class(inv_freq, 1.25))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_zero_init_changes_no_bit(zero_init: Any, table_class: type[Any]) -> None:
    inv_freq = inverse_frequencies()
    expected = everything(table_class(inv_freq, 1.25))
    start_anew()
    with zero_init():
        assert torch.empty(2, dtype=torch.float64).dtype == torch.bfloat16, "zero.Init intercepts nothing"
        got = everything(table_class(inv_freq, 1.25))
        assert torch.equal(table_class(inv_freq).inv_freq, inv_freq)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_a_table_built_in_inference_mode_serves_training(table_class: type[Any]) -> None:
    with torch.inference_mode():
        table = table_class(inverse_frequencies(), 1.25)
        table.lookup(torch.arange(300))
    if table_class is RotaryTable:
        assert not any(level.is_inference() for level in table._lookup.levels._cpu.values())
    weight = torch.ones(32, requires_grad=True)
    for positions in (torch.arange(300), torch.tensor([1])):
        cos, sin = table.lookup(positions)
        assert not cos.is_inference()
        (cos * weight + sin * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_lookups_have_the_same_bits_and_compile_once(backend: str, table_class: type[Any]) -> None:
    table = table_class(inverse_frequencies())
    compiled_graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled_graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def rotate(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = table.lookup(position_ids)
        return torch.cat((cos, cos), dim=-1), sin

    torch._dynamo.reset()
    compiled = torch.compile(rotate, backend=count, fullgraph=True, dynamic=True)
    for length in (7, 100, 5000, 64):
        positions = torch.arange(length)[None] + 40
        assert_same_bits(list(compiled(positions)), list(rotate(positions)))
    assert len(compiled_graphs) == 1
    calls = [node for node in compiled_graphs[0].graph.nodes if "rotary_lookup" in str(node.target)]
    assert len(calls) == 1


class PlainObject:
    def lookup(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + 1


def test_an_exported_lookup_is_one_operator() -> None:
    class Other(torch.nn.Module):
        table = PlainObject()

        def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
            return self.table.lookup(position_ids)

    try:
        torch.export.export(Other(), (torch.arange(9),))
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch exports no module that keeps an object of a plain class")

    class Model(torch.nn.Module):
        table = RotaryTable(inverse_frequencies())

        def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
            return self.table.lookup(position_ids)[0]

    model = Model()
    program = torch.export.export(model, (torch.arange(9),))
    assert [str(node.target) for node in program.graph.nodes].count("safe_rope.rotary_lookup.default") == 1
    assert torch.equal(program.module()(torch.arange(9)), model(torch.arange(9)))


def test_a_traced_lookup_keeps_its_positions_variable() -> None:
    table = RotaryTable(inverse_frequencies())
    traced = torch.jit.trace(lambda p: table.lookup(p), torch.arange(100))
    assert_same_bits(list(traced(torch.arange(7, 107))), list(table.lookup(torch.arange(7, 107))))


@pytest.mark.parametrize("through", ["compile", "export", "trace"])
def test_a_graph_looks_up_sequences_that_are_all_at_one_position(through: str) -> None:
    table = RotaryTable(inverse_frequencies())
    positions = torch.full((3, 1), 4711)

    class Lookup(torch.nn.Module):
        def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = table.lookup(positions)
            return cos, sin

    graphs: dict[str, Callable[[], Callable[..., Any]]] = {
        "compile": lambda: torch.compile(Lookup(), backend="aot_eager", fullgraph=True),
        "export": lambda: torch.export.export(Lookup(), (positions,)).module(),
        "trace": lambda: torch.jit.trace(Lookup(), positions),
    }
    rows = [row[[11, 11, 11], None] for row in table.lookup(torch.arange(4700, 4800))]
    assert_same_bits(list(graphs[through]()(positions)), rows)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 32)])
@pytest.mark.parametrize("position", [0, 100, 5000])
@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_the_operator_takes_a_single_position(
    table_class: type[Any], position: int, shape: tuple[int, ...]
) -> None:
    table = table_class(inverse_frequencies())
    positions = torch.full(shape, position)
    got = torch.ops.safe_rope.rotary_lookup(positions, table.key, torch.float32)
    assert got[0].untyped_storage().data_ptr() != got[1].untyped_storage().data_ptr()
    assert_same_bits(list(got), list(table.lookup(positions)))


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_the_operator_passes_torch_s_own_check(table_class: type[Any]) -> None:
    table = table_class(inverse_frequencies())
    for positions in (torch.arange(5), torch.ones((2, 0), dtype=torch.int32)):
        torch.library.opcheck(
            torch.ops.safe_rope.rotary_lookup.default, (positions, table.key, torch.float32)
        )


def test_torch_calls_the_lookup_itself_where_it_has_no_gradient() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
    assert all(has_kernel("safe_rope::rotary_lookup", key) for key in keys)


def test_dynamo_compiles_nothing_of_a_lookup_below_the_end_of_a_graph() -> None:
    key, codes = RotaryTable(inverse_frequencies()).key, []

    def backend(graph: Any, _: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    @torch._dynamo.disable(recursive=False)
    def called(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.safe_rope.rotary_lookup(positions, key, torch.float32))

    def region(positions: torch.Tensor) -> list[torch.Tensor]:
        return [row * 2 for row in called(positions + 1)]

    positions = torch.tensor([5000, 7])
    compiled = torch.compile(region, backend=backend)
    assert_same_bits(compiled(positions), region(positions))
    assert len(codes) == 2


@pytest.mark.parametrize("position", [0, 5000])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 4)])
@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_a_lookup_under_vmap_is_that_of_each_sample(
    table_class: type[Any], shape: tuple[int, ...], position: int
) -> None:
    table = table_class(inverse_frequencies())
    positions = position + torch.arange(math.prod(shape)).view(shape)
    samples = [torch.stack(rows) for rows in zip(*map(table.lookup, positions), strict=True)]
    assert_same_bits(list(torch.vmap(table.lookup)(positions)), samples)
    last = positions.movedim(0, -1).contiguous()
    assert_same_bits(list(torch.vmap(table.lookup, in_dims=-1)(last)), samples)
    weight = torch.ones(32)
    by_sample = torch.func.grad(lambda weight, sample: (table.lookup(sample)[0] * weight).sum())
    got = torch.vmap(by_sample, in_dims=(None, 0))(weight, positions)
    assert_same_bits([got], [torch.stack([by_sample(weight, sample) for sample in positions])])


def test_meta_positions_give_meta_results() -> None:
    cos, _ = RotaryTable(inverse_frequencies()).lookup(torch.empty((2, 3), dtype=torch.int64, device="meta"))
    assert cos.is_meta
    assert cos.shape == (2, 3, 32)
    assert cos.dtype == torch.float32


def test_the_module_can_be_reloaded() -> None:
    reference = RotaryTable(inverse_frequencies()).lookup(torch.arange(9))
    reloaded = importlib.reload(tables)
    table = reloaded.RotaryTable(inverse_frequencies())
    assert_same_bits(list(table.lookup(torch.arange(9))), list(reference))
    opaque = torch.ops.safe_rope.rotary_lookup(torch.arange(9), table.key, torch.float32)
    assert_same_bits(list(opaque), list(reference))


def test_equal_content_is_one_table() -> None:
    first = shared_table("exact", inverse_frequencies(), 1.5)
    assert shared_table("exact", inverse_frequencies().clone(), 1.5) is first
    assert shared_table("exact", inverse_frequencies(), 1.25) is not first
    assert shared_table("fp32", inverse_frequencies(), 1.5) is not first
    assert RotaryTable(inverse_frequencies(), 1.5)._lookup is first._lookup


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_copies_are_the_same_table_and_pickles_are_small(kind: Any) -> None:
    table = shared_table(kind, inverse_frequencies(), 1.5)
    expected = everything(table)
    assert copy.deepcopy(table) is table
    data = pickle.dumps(table)
    assert len(data) < 1000
    buffer = io.BytesIO()
    torch.save(table, buffer)
    buffer.seek(0)
    del table
    start_anew()
    for restored in (pickle.loads(data), torch.load(buffer, weights_only=False)):
        assert restored.attention_scaling == 1.5
        assert torch.equal(restored.inv_freq, inverse_frequencies())
        assert_same_bits(everything(restored), expected)


def test_tables_that_nobody_holds_are_bounded_and_held_ones_stay() -> None:
    held = shared_table("exact", inverse_frequencies(9.0))
    for theta in range(10, 60):
        shared_table("exact", inverse_frequencies(float(theta)))
    gc.collect()
    assert len(tables._tables._live) <= tables._KEPT + 1
    assert len(tables._lookups._live) <= 2 * tables._KEPT + 1
    assert shared_table("exact", inverse_frequencies(9.0)) is held


def test_an_exact_table_takes_at_most_seven_megabytes_and_does_not_grow() -> None:
    lookup: Any = RotaryTable(inverse_frequencies(dim=128))._lookup
    for length in (100, 100_000):
        lookup(torch.arange(length), torch.float32)
    lookup(20_000_000 + torch.randperm(5000), torch.float32)
    full = sum(level.nbytes for level in lookup.levels._cpu.values())
    assert 0 < full <= 7_000_000
    lookup(torch.arange(2**40, 2**40 + 100_000), torch.float32)
    assert sum(level.nbytes for level in lookup.levels._cpu.values()) == full


def test_threads_get_the_same_table_and_the_same_bits() -> None:
    inv_freq = inverse_frequencies(5e5)
    expected = everything(RotaryTable(inv_freq))
    start_anew()
    start = threading.Barrier(8)
    results: list[tuple[Any, list[torch.Tensor]]] = []

    def work() -> None:
        start.wait()
        table = shared_table("exact", inv_freq)
        results.append((table, everything(table)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(table) for table, _ in results}) == 1
    assert len(results) == 8
    for _, got in results:
        assert_same_bits(got, expected)


@pytest.mark.parametrize("within", ["_make_lookup", "_new_table", "_compute", "_build"])
def test_who_comes_while_a_table_is_made_in_the_same_thread_gets_it_too(within: str) -> None:
    """As a handler of a signal that saves the model, or a finalizer that garbage collection runs."""
    inv_freq = inverse_frequencies(5e5)
    start_anew()
    results: list[Any] = []

    def make() -> Any:
        table = shared_table("fp32", inv_freq)
        rows = shared_rows(table, 64, "half")
        return table, rows, rows.on(torch.device("cpu")), everything(table)

    def called(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == within and "tables" in frame.f_code.co_filename:
            sys.setprofile(None)
            results.append(make())

    def work() -> None:
        sys.setprofile(called)
        try:
            results.append(make())
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert len(results) == 2, "it waits for itself"
    inner, outer = results
    assert inner[0] is outer[0]
    assert inner[1] is outer[1]
    assert all(one is other for one, other in zip(inner[2], outer[2], strict=True))
    assert_same_bits(inner[3], outer[3])


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize(
    "bad", [torch.arange(3.0), torch.tensor([True]), torch.zeros(1).bfloat16(), [1, 2], 3]
)
def test_positions_that_are_no_integers_are_refused(bad: Any, table_class: type[Any]) -> None:
    with pytest.raises(TypeError, match="position_ids must be an integer tensor, got"):
        table_class(inverse_frequencies()).lookup(bad)


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("length", [1, 2, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_negative_positions_turn_the_other_way(
    length: int, dtype: torch.dtype, table_class: type[Any]
) -> None:
    table = table_class(inverse_frequencies())
    positions = torch.arange(length)
    for signed in (positions - length, positions.flip(0) - 1, positions * 1000 - 7000, -positions - 2**33):
        cos, sin = table.lookup(signed, dtype)
        mirrored_cos, mirrored_sin = table.lookup(-signed, dtype)
        assert torch.equal(cos, mirrored_cos)
        assert torch.equal(sin, -mirrored_sin)
    ids = torch.tensor([[-1, 0, 1]])
    cos, sin = table.lookup(ids, torch.float64)
    phase = ids[..., None].double() * inverse_frequencies().double()
    assert torch.allclose(cos, phase.cos(), atol=1e-7)
    assert torch.allclose(sin, phase.sin(), atol=1e-7)


@pytest.mark.parametrize("bad", [-(2**63), 2**63])
def test_a_position_without_a_magnitude_is_refused(bad: int) -> None:
    dtype = torch.int64 if bad < 0 else torch.uint64
    for positions in ([bad, 0], [bad], [bad, bad]):
        with pytest.raises(ValueError, match="position_ids must be"):
            RotaryTable(inverse_frequencies()).lookup(torch.tensor(positions, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 5, -3, 70_000])
def test_a_batch_at_one_position_has_the_bits_of_a_long_row(position: int, dtype: torch.dtype) -> None:
    table = RotaryTable(inverse_frequencies())
    expected = table.lookup(torch.arange(position - 40, position + 40), dtype)
    for ids in (torch.full((4, 1), position), torch.full((1, 7), position, dtype=torch.int32)):
        for got, rows in zip(table.lookup(ids, dtype), expected, strict=True):
            assert got.shape[:-1] == ids.shape
            assert got.is_contiguous()
            assert_same_bits(got, rows[40].expand(got.shape))


def test_a_run_past_the_largest_int64_is_refused() -> None:
    wrapping = torch.arange(100) + (2**63 - 50)
    with pytest.raises(ValueError, match="position_ids must be below"):
        RotaryTable(inverse_frequencies()).lookup(wrapping)


def test_an_output_dtype_that_holds_no_cosine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be .* got torch.int64"):
        RotaryTable(inverse_frequencies()).lookup(torch.arange(3), torch.int64)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([1.0], TypeError, "got list"),
        (torch.ones(3, dtype=torch.float64), TypeError, "got torch.float64"),
        (torch.ones(3, dtype=torch.bfloat16), TypeError, "got torch.bfloat16"),
        (torch.ones(3, device="meta"), ValueError, "got meta"),
        (torch.ones(3, 1), ValueError, r"got \[3, 1\]"),
        (torch.ones(0), ValueError, r"got \[0\]"),
        (torch.tensor([1.0, float("nan")]), ValueError, "must be finite"),
        (torch.tensor([1.0, float("inf")]), ValueError, "must be finite"),
    ],
)
def test_a_bad_inv_freq_is_refused(kind: Any, bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        shared_table(kind, bad)
    assert "RopeSpec.inv_freq()" in str(raised.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_factor_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="attention_scaling must be"):
        RotaryTable(inverse_frequencies(), bad)
    with pytest.raises(ValueError, match="position_divisor must be"):
        StockTable(inverse_frequencies(), position_divisor=bad)


def test_contradictory_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"position_divisor 1\.0, got 2\.0"):
        shared_table("exact", inverse_frequencies(), position_divisor=2.0)
    with pytest.raises(ValueError, match='kind must be "exact" or "fp32"'):
        shared_table("half", inverse_frequencies())  # type: ignore[arg-type]
