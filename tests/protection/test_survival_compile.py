"""Compiled, exported or traced with fake tensors, a protected model keeps its tables' bits."""

from __future__ import annotations

import copy
import gc
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
from support import families, survival
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import safe_rope
from safe_rope._base import torch_private

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning"),
    pytest.mark.fresh,
]


def _logits(model: Any, length: int = 12, start: int = 0) -> torch.Tensor:
    positions = torch.arange(start, start + length)[None]
    with torch.no_grad():
        return model(survival.tokens(length), position_ids=positions, use_cache=False).logits  # type: ignore[no-any-return]


def _stock_compiles(family: str, **options: Any) -> bool:
    """Whether this transformers can be compiled at all by this torch."""
    model = families.build(family)
    try:
        _logits(torch.compile(model, **options))
    except Exception:
        return False
    finally:
        torch._dynamo.reset()
    return True


def _require(family: str, **options: Any) -> None:
    if not _stock_compiles(family, **options):
        pytest.skip("this torch cannot compile the stock model of this transformers either")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "tables"), [*((f, "exact") for f in families.FAMILIES), ("llama", "fp32")]
)
def test_one_graph_gives_the_eager_logits(family: str, tables: str) -> None:
    _require(family, fullgraph=True, backend="aot_eager")
    model = survival.build(family, tables, layers=1).to(torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(_logits(compiled), _logits(model))
    survival.assert_right(model, family, tables)


@pytest.mark.torch
def test_one_graph_is_made_while_the_guard_is_open() -> None:
    """The forward builds a list of layers, which the guard watches, and is the first call of the model."""
    _require("llama", fullgraph=True, backend="eager")
    with safe_rope.guard():
        model = families.build("llama", layers=1)
        compiled = torch.compile(
            lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="eager"
        )
        with torch.no_grad():
            compiled(survival.tokens())
    survival.assert_right(model, "llama", "exact")


@pytest.mark.parametrize("family", ["llama"])
def test_one_graph_gives_the_eager_gradients(family: str) -> None:
    _require(family, fullgraph=True, backend="aot_eager")
    gradients = []
    for compile_it in (False, True):
        model = survival.build(family, layers=1)
        ids = survival.tokens()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        run(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-7)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_export_to_onnx_gets_operators_that_every_runtime_has(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, options = survival.tokens(), {"use_cache": False, "return_dict": False}
    try:
        torch.export.export(families.build(family), (ids,), options, strict=False)
    except Exception:
        pytest.skip("this torch cannot export the stock model of this transformers either")
    model = survival.build(family, layers=1)
    # The rest of an exporter is a package of its own.
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    exported = torch.export.export(model, (ids,), options, strict=False)
    monkeypatch.undo()
    assert not any("safe_rope" in str(node.target) for node in exported.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(ids, **options)[0], model(ids, **options)[0])


@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_compiled_tables_have_the_eager_bits(family: str, tables: str) -> None:
    (module, *_) = families.rotary_modules(survival.build(family, tables)).values()
    x = torch.zeros(1, 1, 1, families.HEAD_DIM, dtype=torch.bfloat16)
    asked: Any = torch.tensor([families.POSITIONS])
    if hasattr(module, "cos_cached"):
        asked = max(families.POSITIONS) + 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = module(x, asked)
        return cos * 2, sin * 2

    for eager, compiled in zip(module(x, asked), doubled(asked), strict=True):
        assert torch.equal(eager * 2, compiled)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_eager_tables_and_near_logits() -> None:
    _require("llama", fullgraph=True, backend="aot_eager")
    model = survival.build("llama", layers=1)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(_logits(compiled), _logits(model), atol=1e-5)
    (module, *_) = families.rotary_modules(model).values()
    if not hasattr(module, "cos_cached"):
        x, ids = torch.zeros(1, 1, 1, families.HEAD_DIM), torch.tensor([families.POSITIONS])
        run = torch.compile(lambda: module(x, ids), fullgraph=True)
        for eager, lowered in zip(module(x, ids), run(), strict=True):
            assert torch.equal(eager, lowered)
    survival.assert_right(model, "llama", "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_compiled_layers_in_an_eager_model_rotate_as_eager_ones(family: str) -> None:
    model = survival.build(family).to(torch.bfloat16)
    eager = _logits(model)
    layers = next(child for name, child in model.base_model.named_children() if name == "layers")
    for layer in layers:
        layer.compile(backend="aot_eager")
    assert torch.equal(_logits(model), eager)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("family", families.ONE_OFTEN)
def test_what_runs_between_two_graphs_may_make_other_tensors_of_tables(family: str) -> None:
    """Hooks of DeepSpeed's ZeRO-3 break graphs after each module, and return views of what it returned."""

    @torch._dynamo.disable
    def view(module: Any, args: Any, result: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.view_as(one), result)

    model = survival.build(family, layers=1).to(torch.bfloat16)
    eager = _logits(model)
    for module in families.rotary_modules(model).values():
        module.register_forward_hook(view)
    assert torch.equal(_logits(torch.compile(model, backend="eager")), eager)
    survival.assert_right(model, family, "exact")


@pytest.mark.slow
def test_what_is_compiled_is_kept_in_the_compilers_cache() -> None:
    config = pytest.importorskip("torch._inductor.config")
    if not hasattr(config, "unsafe_marked_cacheable_functions"):
        pytest.skip("before torch 2.6 nothing of a library's own is kept")
    counters = torch._dynamo.utils.counters["aot_autograd"]
    before = counters["autograd_cache_bypass"]
    _logits(torch.compile(survival.build("llama", layers=1), fullgraph=True))
    assert counters["autograd_cache_bypass"] == before


@pytest.mark.slow
def test_a_longer_sequence_compiles_no_more_often_than_in_stock() -> None:
    counts = []
    for build in (families.build, survival.build):
        # Eager attention: 4.36 asks SDPA with an argument that no compiler takes for a variable length.
        model = build("llama", layers=1, attn_implementation="eager")
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for length in (8, 9, 33):
            assert torch.allclose(_logits(compiled, length), _logits(model, length), atol=1e-5)
        counts.append(counter.frame_count)
    stock, mine = counts
    assert mine <= stock


def test_a_model_that_dies_while_another_is_compiled_changes_no_function_there() -> None:
    gc.collect()
    namespace = survival.modelling("llama")
    function = namespace.apply_rotary_pos_emb
    stock = survival.code_of(function)
    models = [survival.build("llama", layers=1)]
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        replaced = survival.code_of(function)
        models.clear()
        gc.collect()
        seen.append((replaced, survival.code_of(function)))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    ((before, after),) = seen
    assert before is after
    assert before is not stock
    gc.collect()
    assert survival.code_of(function) is stock


class Rotates(torch.nn.Module):
    """Rotates by the application function of a stock architecture."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return self.function(q, k, cos, sin)


def test_a_model_that_dies_while_guards_are_made_of_an_export_changes_no_function_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    function = survival.modelling("llama").apply_rotary_pos_emb
    stock = survival.code_of(function)
    models = [survival.build("llama", layers=1)]
    builder = torch._dynamo.guards.GuardBuilder
    made = builder.__init__
    seen = []

    def after_a_death(*args: Any, **kwargs: Any) -> None:
        models.clear()
        gc.collect()
        seen.append(survival.code_of(function))
        made(*args, **kwargs)

    monkeypatch.setattr(builder, "__init__", after_a_death)
    states = torch.rand(2, 1, 4, 3, 8)
    tables = torch.rand(2, 1, 3, 8)
    exported = torch.export.export(Rotates(function), (*states, *tables), strict=True)
    assert seen
    assert stock not in seen
    expected = function(*states, *tables)
    assert all(map(torch.equal, exported.module()(*states, *tables), expected))
    gc.collect()
    assert survival.code_of(function) is stock


@pytest.mark.slow
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_compiled_tables_that_follow_the_length_cross_their_limit(rope_type: str) -> None:
    if hasattr(survival.stock_module("llama"), "cos_cached"):
        pytest.skip("this transformers rebuilds a cache there, which no graph can hold")
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": 2.0}
    if rope_type == "longrope":
        half = families.HEAD_DIM // 2
        scaling |= {
            "short_factor": [1.0] * half,
            "long_factor": [3.0] * half,
            "original_max_position_embeddings": 16,
        }
    limit = 32 if rope_type == "longrope" else 16
    model = survival.build("llama", layers=1, rope_scaling=scaling, max_position_embeddings=limit)
    eager = survival.build("llama", layers=1, rope_scaling=scaling, max_position_embeddings=limit)
    compiled = torch.compile(model, backend="aot_eager")
    for length in (8, 24, 8, 30, 15):
        assert torch.allclose(_logits(compiled, length), _logits(eager, length), atol=1e-5), length


@pytest.mark.parametrize("family", families.FAMILIES)
def test_export_gives_the_eager_logits_where_stock_can_be_exported(family: str) -> None:
    ids = survival.tokens()
    options = {"use_cache": False, "return_dict": False}
    try:
        torch.export.export(families.build(family), (ids,), options, strict=False)
    except Exception:
        pytest.skip("this torch cannot export the stock model of this transformers either")
    model = survival.build(family, layers=1).to(torch.bfloat16)
    exported = torch.export.export(model, (ids,), options, strict=False)
    with torch.no_grad():
        assert torch.equal(exported.module()(ids, **options)[0], model(ids, **options)[0])
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_fake_forward_gives_shapes_and_leaves_the_tables_real(family: str, tables: str) -> None:
    model = survival.build(family, tables).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = model(torch.zeros(2, 12, dtype=torch.long)).logits
    assert logits.shape == (2, 12, families.VOCABULARY)
    for module in families.rotary_modules(model).values():
        assert {type(buffer) for buffer in module.buffers()} == {torch.Tensor}
    survival.assert_runs(model)
    survival.assert_right(model, family, tables)


def test_more_classes_than_dynamo_keeps_graphs_for_one_code() -> None:
    """Dynamo keeps eight graphs for a code object, and a ninth class has one of its own."""
    torch._dynamo.reset()
    for index in range(10):

        class Rotary(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.outer(torch.arange(x.shape[1]).to(self.inv_freq), self.inv_freq).cos()

        with safe_rope.guard():
            module = Rotary()
        module.to(torch.bfloat16)
        cos = torch.compile(module, fullgraph=True, backend="eager")(torch.zeros(1, 600, 32))
        true = (torch.arange(600).double()[:, None] * module._buffers["inv_freq"].double()).cos()
        assert (cos.double() - true).abs().max() < 2**-8, index


def test_a_dtype_that_only_a_buffer_tells_is_the_stock_models_in_a_graph() -> None:
    """fairseq's sinusoids take the dtype of a buffer of one element, and integers for arguments."""

    class Sinusoids(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = self.rows(64)
            self.register_buffer("_float_tensor", torch.ones(1))

        @staticmethod
        def rows(length: int) -> torch.Tensor:
            phase = torch.outer(torch.arange(1.0 * length), 1e4 ** (-torch.arange(0, 32, 2) / 32))
            return torch.cat((phase.sin(), phase.cos()), dim=1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] >= len(self.weights):
                self.weights = self.rows(ids.shape[1] + 1)
            self.weights = self.weights.to(self._float_tensor)
            return self.weights[ids.ne(1).cumsum(1)]

    def compiled() -> torch.Tensor:
        torch._dynamo.reset()
        module.to(torch.bfloat16)
        found: torch.Tensor = torch.compile(module, backend="eager")(torch.full((1, 600), 7))
        return found

    module = Sinusoids()
    stock = compiled()
    with safe_rope.guard():
        module = Sinusoids()
    with pytest.warns(safe_rope.PrecisionWarning, match="computes from _float_tensor"):
        guarded = compiled()
    assert guarded.dtype == stock.dtype == torch.bfloat16
    assert torch.equal(guarded, stock)


@pytest.mark.parametrize("circular", [False, True])
def test_a_plain_attribute_is_read_in_a_graph(circular: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo before torch 2.13 asks the property again that stands for it."""

    class Sines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.outer(torch.arange(600.0), 1e4 ** (-torch.arange(0, 32, 2) / 32)).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[: x.shape[1]].to(x)

    if circular:
        monkeypatch.setattr(torch_private, "_FINDS_PROPERTIES_AGAIN", True)
    x = torch.zeros(1, 600, 16, dtype=torch.bfloat16)
    with safe_rope.guard():
        model = torch.nn.Sequential(Sines())
    model.to(torch.bfloat16)
    duplicate = copy.deepcopy(model)
    compiled = torch.compile(duplicate, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), Sines().table.bfloat16()[None])
    own = torch.rand(600, 16)
    duplicate[0].table = own
    assert torch.equal(compiled(x), own.bfloat16()[None])
