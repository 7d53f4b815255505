"""A protected model's tables and buffers are right after every cast, move, copy and write from outside."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import families, survival
from torch import nn

import safe_rope

pytestmark = [pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning"), pytest.mark.contract]


def _through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def _through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=False)  # type: ignore[no-any-return]


def _on_meta_and_back(model: nn.Module) -> nn.Module:
    model.to("meta").to_empty(device="cpu")
    for parameter in model.parameters():  # to_empty leaves whatever the memory held
        nn.init.normal_(parameter, std=0.02)
    return model


def _halve(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 0.5).to(torch.bfloat16) if tensor.is_floating_point() else tensor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "to_bf16": lambda model: model.to(torch.bfloat16),
    "to_fp16": lambda model: model.to(dtype=torch.float16),
    "half": lambda model: model.half(),
    "bfloat16_then_float": lambda model: model.bfloat16().float(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.bfloat16),
    "cpu": lambda model: model.bfloat16().cpu(),
    "to_device_and_dtype": lambda model: model.to("cpu", torch.bfloat16),
    "meta_then_to_empty": _on_meta_and_back,
    "apply_that_scales": lambda model: model._apply(_halve),
    "apply_that_keeps": lambda model: model._apply(lambda t: t),
    "apply_of_children_to_bf16": lambda model: model.apply(lambda module: module.to(torch.bfloat16)),
    "requires_grad": lambda model: model.requires_grad_(False).requires_grad_(True),
    "train_then_eval": lambda model: model.train().eval(),
    "share_memory": lambda model: model.share_memory(),
    "deepcopy": lambda model: copy.deepcopy(model.bfloat16()),
    "copy": lambda model: copy.copy(model.bfloat16()),
    "pickle": lambda model: _through_pickle(model.bfloat16()),
    "torch_save": lambda model: _through_a_file(model.bfloat16()),
    "deepcopy_of_pickle_to_bf16": lambda model: copy.deepcopy(_through_pickle(model)).bfloat16(),
}


def _stock_runs(family: str, change: str) -> bool:
    # 4.36's Mistral has a mask that is no FP64, and GPT-NeoX one that must stay boolean.
    try:
        survival.assert_runs(CHANGES[change](families.build(family)))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_tables_survive(family: str, tables: str, change: str) -> None:
    if ("pickle" in change or change == "torch_save") and not survival.can_be_pickled(family):
        pytest.skip("the stock model cannot be pickled")
    model = CHANGES[change](survival.build(family, tables))
    survival.assert_shown_right(model, family, tables)
    if change not in ("type", "double") or _stock_runs(family, change):
        survival.assert_runs(model)
    survival.assert_right(model, family, tables)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_protect_repairs_a_model_that_was_cast(family: str) -> None:
    model = families.build(family).to(torch.bfloat16)
    (module, *_) = families.rotary_modules(model).values()
    assert families.phase_error(families.read_tables(module), families.reference(family)) > 1e-3
    safe_rope.protect(model)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_protect_repairs_a_model_that_was_on_meta(family: str) -> None:
    model = families.build(family).to("meta")
    torch.use_deterministic_algorithms(True)  # empty memory holds NaN then, and nothing that it held before
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    safe_rope.protect(model)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_on_meta_buffers_are_on_meta(family: str) -> None:
    model = survival.build(family).to("meta")
    for module in families.rotary_modules(model).values():
        assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
        assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_is_done_to_a_deepcopy_does_not_reach_the_original(family: str) -> None:
    original = survival.build(family)
    duplicate = copy.deepcopy(original)
    for mine, other in zip(*map(families.running_modules, (original, duplicate)), strict=True):
        assert mine._buffers["inv_freq"] is not other._buffers["inv_freq"]
        with torch.no_grad():
            other.inv_freq.fill_(7)
        assert not (mine.inv_freq == 7).any()
    survival.assert_right(original, family, "exact")
    del original
    survival.assert_runs(duplicate)
    survival.assert_right(duplicate, family, "exact")


def _write(buffer: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(torch.zeros_like(buffer))


WRITES: dict[str, Callable[[nn.Module, str], None]] = {
    "in_place": lambda module, name: _write(getattr(module, name)),
    "data": lambda module, name: setattr(getattr(module, name), "data", getattr(module, name).bfloat16()),
    "data_in_place": lambda module, name: _write(getattr(module, name).data),
    "setattr": lambda module, name: setattr(module, name, getattr(module, name).half()),
    "buffers_entry": lambda module, name: module._buffers.update({name: torch.zeros(3)}),
    "register_buffer": lambda module, name: module.register_buffer(name, torch.zeros(3), persistent=False),
    "garbage_in_inference_mode": lambda module, name: _write_in_inference_mode(module, name),
}


def _write_in_inference_mode(module: nn.Module, name: str) -> None:
    with torch.inference_mode():
        getattr(module, name).zero_()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_outside_code_writes_does_not_last(family: str, write: str) -> None:
    model = survival.build(family)
    for module in families.running_modules(model):
        for name in list(module._buffers):
            WRITES[write](module, name)
    survival.assert_runs(model)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_shared_memory_holds_the_tables_too(family: str) -> None:
    model = survival.build(family)
    survival.assert_runs(model)
    model.share_memory()
    assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
    survival.assert_runs(model)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_layers_that_each_had_a_cache_share_one_storage(family: str) -> None:
    model = survival.build(family, layers=3)
    modules = list(families.rotary_modules(model).values())
    names = [name for name in survival.CACHES if name in modules[0]._buffers]
    if not names:
        stock = survival.stock_module(family)
        assert not any(name in stock._buffers for name in survival.CACHES), "there is nothing to share"
        return
    for stage in (lambda m: m, lambda m: m.bfloat16(), copy.deepcopy, _through_pickle, _on_meta_and_back):
        model = stage(model)
        survival.assert_runs(model)
        modules = list(families.rotary_modules(model).values())
        for name in names:
            assert len({getattr(module, name).data_ptr() for module in modules}) == 1
    survival.assert_runs(model, length=families.MAX_POSITIONS + 8) if family == "llama" else None
    assert len({getattr(module, names[0]).data_ptr() for module in modules}) == 1
