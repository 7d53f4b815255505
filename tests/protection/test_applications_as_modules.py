"""Application functions that a library has made modules of, as Hugging Face's ``kernels`` does."""

from __future__ import annotations

import copy
import gc
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from held_model import SOURCE
from support import survival, written_modules

import safe_rope

pytestmark = pytest.mark.contract
AS_MODULE = """
import inspect
class Function(nn.Module):
    def forward(self, *args, **kwargs):
        return stock_function(*args, **kwargs)
given = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
given += inspect.signature(apply_rotary_pos_emb).parameters.values()
Function.forward.__signature__ = inspect.Signature(given)
stock_function, apply_rotary_pos_emb = apply_rotary_pos_emb, Function()
"""
CALLS = ("attribute", "global")


@pytest.fixture(params=CALLS)
def both(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, ModuleType]]:
    """A model file, and the same where its application function is a module, called by either name."""
    source = SOURCE
    if request.param == "global":
        source = source.replace("self.rotary_fn(q", "apply_rotary_pos_emb(q")
    start = source.index("class HeldAttention")
    as_module = source[:start] + AS_MODULE + source[start:]
    plain, made = written_modules.write(tmp_path, monkeypatch, modeling_plain=source, modeling_made=as_module)
    function, stock = made.apply_rotary_pos_emb, type(made.apply_rotary_pos_emb)
    yield plain, made
    gc.collect()
    assert made.apply_rotary_pos_emb is function
    assert type(function) is stock


def guarded(module: Any) -> Any:
    with safe_rope.guard() as session:
        model = module.HeldModel()
    assert "applied in FP32" in str(session.report)
    return model.to(torch.bfloat16)


def test_it_rotates_in_fp32_like_the_function_and_so_do_copies(both: Any) -> None:
    plain, made = both
    expected = plain.output(guarded(plain))
    assert not torch.equal(expected, plain.output(plain.HeldModel().to(torch.bfloat16)))
    model = guarded(made)
    assert torch.equal(made.output(model), expected)
    for copied in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), copy.copy(model)):
        assert torch.equal(made.output(copied), expected)


def test_a_stock_model_beside_a_guarded_one_is_as_it_was(both: Any) -> None:
    _, made = both
    stock = made.HeldModel().to(torch.bfloat16)
    expected = made.output(stock)
    model = guarded(made)
    assert torch.equal(made.output(stock), expected)
    assert torch.equal(made.output(copy.deepcopy(stock)), expected)
    del model


def test_trying_what_it_computes_is_no_call_that_a_hook_sees(both: Any) -> None:
    _, made = both
    seen: list[Any] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(module))
    try:
        model = guarded(made)
    finally:
        handle.remove()
    assert not seen, model


def test_a_kernel_that_is_taken_out_of_it_again_leaves_the_function(both: Any) -> None:
    _, made = both
    model = guarded(made)
    before, function = made.output(model), made.apply_rotary_pos_emb
    function.forward = types.MethodType(type(function).forward, function)  # as kernels falls back to it
    assert torch.equal(made.output(model), before)
    del model
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "stock_function", lambda q, k, *_: (q, k))
        assert function(1, 2, 3, 4) == (1, 2), "nothing of ours is left in it"
    vars(function).pop("forward", None)


def test_the_function_is_pickled_as_the_stock_one(both: Any) -> None:
    _, made = both
    model = guarded(made)
    assert type(made.apply_rotary_pos_emb) is not made.Function
    assert type(pickle.loads(pickle.dumps(made.apply_rotary_pos_emb))) is made.Function
    del model


def test_a_kernel_that_is_put_into_it_gets_fp32_and_is_rounded_once(both: Any) -> None:
    _, made = both
    seen: list[Any] = []

    def kernel(self: Any, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        seen.extend((q, k, cos, sin))
        q, k = made.stock_function(q, k, cos, sin, unsqueeze_dim)
        return 2 * q, k

    model = guarded(made)
    before = made.output(model)
    function = model.attention.rotary_fn
    function.forward = types.MethodType(kernel, function)
    changed = made.output(model)
    assert seen[-4:]
    assert {(type(x), x.dtype) for x in seen} == {(torch.Tensor, torch.float32)}
    assert changed.dtype == torch.bfloat16
    assert not torch.equal(changed, before)
    q = model.attention.qkv.weight[:32]
    with torch.no_grad():
        q.mul_(2), model.attention.qkv.bias[:32].mul_(2)
        del function.forward
        assert torch.equal(made.output(model), changed), "twice the query, exactly"


def test_a_graph_of_the_whole_model_rotates_as_it_does_outside_one(both: Any) -> None:
    _, made = both
    model = guarded(made)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(made.states(model)), made.output(model))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mistral"])
def test_kernels_own_modules_are_rotated_in_fp32(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernels", reason="Hugging Face's kernels are not installed")
    namespace = survival.modelling(family)
    function = namespace.apply_rotary_pos_emb
    if not isinstance(function, torch.nn.Module):
        pytest.skip("this release of transformers takes no kernels of the release that is installed")
    (inner,) = (cell.cell_contents for cell in type(function).forward.__closure__)
    model, ids = survival.build(family).to(torch.bfloat16), survival.tokens()
    with torch.no_grad():
        got = model(ids, use_cache=False).logits
    monkeypatch.setattr(namespace, "apply_rotary_pos_emb", inner)
    plain = survival.build(family).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(ids, use_cache=False).logits, got)
