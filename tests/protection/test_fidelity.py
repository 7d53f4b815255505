"""But for its tables a protected model is the stock one; unprotected models are not touched at all."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, survival
from torch import nn

import safe_rope
from safe_rope._protection.rewrite import stock_class

pytestmark = [
    pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning"),
    pytest.mark.contract,
    pytest.mark.fresh,
]


def _signature(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}


def _all_buffers(model: nn.Module) -> dict[str, torch.Size]:
    # Layers of a protected model share their tables, which named_buffers() would leave out as duplicates.
    return {name: buffer.shape for name, buffer in model.named_buffers(remove_duplicate=False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_state_dict_is_the_stock_one(family: str, dtype: torch.dtype) -> None:
    stock, model = families.build(family, layers=2).to(dtype), survival.build(family).to(dtype)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert _signature(model.state_dict()) == _signature(stock.state_dict())
    for name, value in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert _all_buffers(model) == _all_buffers(stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_saved_files_are_the_stock_ones_byte_for_byte(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for name, model in (
        ("stock", families.build(family, layers=2)),
        ("guarded", survival.build(family)),
        ("fp32", survival.build(family, "fp32")),
    ):
        survival.assert_runs(model)
        model.to(dtype).save_pretrained(tmp_path / name, safe_serialization=True)
    expected = _contents(tmp_path / "stock")
    assert any(name.endswith(".safetensors") for name in expected)
    assert _contents(tmp_path / "guarded") == expected
    assert _contents(tmp_path / "fp32") == expected


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = survival.tokens()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradients_have_the_stock_shapes_and_dtypes(family: str, dtype: torch.dtype) -> None:
    stock, model = families.build(family, layers=2).to(dtype), survival.build(family).to(dtype)
    theirs, mine = _gradients(stock), _gradients(model)
    assert _signature(mine) == _signature(theirs)
    assert all(gradient.isfinite().all() for gradient in mine.values())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradients_in_fp32_are_the_stock_ones_to_the_bit(family: str) -> None:
    theirs, mine = _gradients(families.build(family, layers=2)), _gradients(survival.build(family, "fp32"))
    for name, gradient in theirs.items():
        assert torch.equal(mine[name], gradient), name


def _left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _right_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return {"attention_mask": mask}


ASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "right_padded": _right_padded,
    "left_padded": _left_padded,
    "positions_from_elsewhere": lambda: {"position_ids": torch.arange(3000, 3012)[None]},
    "outputs": lambda: {"output_attentions": True, "output_hidden_states": True},
}


def _tensors(output: Any) -> list[torch.Tensor]:
    extra = [t for name in ("attentions", "hidden_states") for t in (getattr(output, name, None) or ())]
    return [output.logits, *extra]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_fp32_logits_are_the_stock_ones_to_the_bit(family: str, ask: str) -> None:
    overrides: dict[str, Any] = {"attn_implementation": "eager"} if ask == "outputs" else {}
    if ask == "positions_from_elsewhere" and hasattr(survival.stock_module(family), "cos_cached"):
        # 4.36 makes as many rows as there are tokens, unless its cache is longer: the cache has 4,096.
        pytest.skip("this transformers cannot start at position 3,000 without a KV cache of that length")
    stock = families.build(family, layers=2, **overrides)
    model = survival.build(family, "fp32", **overrides)
    with torch.no_grad():
        theirs, mine = (_tensors(m(survival.tokens(), **ASKS[ask]())) for m in (stock, model))
    assert len(mine) == len(theirs) >= (5 if ask == "outputs" else 1)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_fp32_generation_past_the_limit_is_the_stock_one_to_the_bit(family: str, padded: bool) -> None:
    overrides = {"max_position_embeddings": 16}
    stock = families.build(family, layers=2, **overrides)
    model = survival.build(family, "fp32", **overrides)
    mask = _left_padded()["attention_mask"] if padded else torch.ones(2, 12, dtype=torch.long)
    results = [
        m.generate(
            survival.tokens(),
            attention_mask=mask,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for m in (stock, model)
    ]
    assert results[0].sequences.shape == (2, 36)
    assert torch.equal(results[1].sequences, results[0].sequences)
    for one, other in zip(results[1].scores, results[0].scores, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_classes_look_like_the_stock_ones(family: str) -> None:
    stock, model = families.build(family, layers=2), survival.build(family)
    assert repr(model) == repr(stock)
    for (path, theirs), (_, mine) in zip(stock.named_modules(), model.named_modules(), strict=True):
        assert isinstance(mine, type(theirs)), path
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(mine), name) == getattr(type(theirs), name), path
    for module in families.rotary_modules(model).values():
        assert stock_class(module) is type(survival.stock_module(family))


def _three_ways(model: Any) -> list[torch.Tensor]:
    """Logits in FP32, in FP32 under autocast, and in BF16, and BF16 gradients; leaves the model in BF16."""
    with torch.no_grad():
        results = [model(survival.tokens()).logits]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(model(survival.tokens()).logits)
    model.to(torch.bfloat16)
    with torch.no_grad():
        results.append(model(survival.tokens()).logits)
    return [*results, *_gradients(model).values()]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_unprotected_models_are_not_touched_while_protected_ones_live(family: str) -> None:
    expected = _three_ways(families.build(family, layers=2))
    protected = survival.build(family).to(torch.bfloat16)
    survival.assert_runs(protected)
    assert hasattr(survival.modelling(family).apply_rotary_pos_emb, "__wrapped__")
    got = _three_ways(families.build(family, layers=2))
    survival.assert_runs(protected)
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_unprotected_model_is_not_touched_by_a_guard_that_is_open(family: str) -> None:
    stock = families.build(family, layers=2)
    with torch.no_grad():
        expected = stock(survival.tokens()).logits
        with safe_rope.guard():
            torch.nn.Linear(1, 1)  # a guard around nothing warns
            assert torch.equal(stock(survival.tokens()).logits, expected)
    assert not any(isinstance(m, safe_rope._protection.rewrite.ProtectedRotary) for m in stock.modules())


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_stock_function_is_back_once_the_last_protected_model_is_gone(family: str, how: str) -> None:
    namespace = survival.modelling(family)
    gc.collect()
    function = namespace.apply_rotary_pos_emb
    stock = survival.code_of(function)
    assert not hasattr(function, "__wrapped__")
    assert getattr(stock, "co_filename", namespace.__file__) == namespace.__file__
    models = [survival.build(family), families.build(family)] if how == "guard" else [families.build(family)]
    if how == "protect":
        safe_rope.protect(models[0])
    replacement = survival.code_of(function)
    assert replacement is not stock
    assert namespace.apply_rotary_pos_emb is function, "whoever holds the function holds the FP32-aware one"
    models.append(survival.build(family))
    assert survival.code_of(function) is replacement, "one replacement serves every model"
    del models[0]
    gc.collect()
    assert survival.code_of(function) is replacement, "one protected model is still there"
    models.clear()
    gc.collect()
    assert survival.code_of(function) is stock
    assert not any(name.startswith("__safe_rope") for name in vars(namespace))
    assert not hasattr(function, "__wrapped__")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_function_that_somebody_put_in_place_meanwhile_stays(family: str, monkeypatch: Any) -> None:
    namespace = survival.modelling(family)
    model = survival.build(family)
    inner = namespace.apply_rotary_pos_emb

    def foreign(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    monkeypatch.setattr(namespace, "apply_rotary_pos_emb", foreign)
    survival.assert_runs(model)
    del model
    gc.collect()
    assert namespace.apply_rotary_pos_emb is foreign


def test_nothing_of_the_library_is_in_a_stock_module() -> None:
    survival.build("llama")
    stock = families.build("llama")
    for module in stock.modules():
        assert not any("safe_rope" in name for name in vars(module))
        assert type(module).__module__ in sys.modules
    assert isinstance(stock, nn.Module)
