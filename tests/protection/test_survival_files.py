"""Tables are right in a model that is loaded from files, whatever these hold and whatever the dtype."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import families, survival

import safe_rope

pytestmark = [pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning"), pytest.mark.contract]

LOADS: dict[str, dict[str, Any]] = {
    "fp32": {"torch_dtype": torch.float32},
    "bf16": {"torch_dtype": torch.bfloat16},
    "fp16": {"torch_dtype": torch.float16},
    "auto": {"torch_dtype": "auto"},
    "bf16_low_memory": {"torch_dtype": torch.bfloat16, "low_cpu_mem_usage": True},
    "fp32_low_memory": {"low_cpu_mem_usage": True},
    "device_map": {"torch_dtype": torch.bfloat16, "device_map": {"": "cpu"}},
}


def _load(family: str, path: Path, **kwargs: Any) -> Any:
    if kwargs.keys() & {"low_cpu_mem_usage", "device_map"}:
        pytest.importorskip("accelerate", reason="transformers uses it for this")
    return families.model_class(family).from_pretrained(path, **kwargs).eval()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_from_pretrained_gives_right_tables(family: str, tables: str, load: str, tmp_path: Path) -> None:
    families.build(family, layers=2).to(torch.bfloat16).save_pretrained(tmp_path)
    with safe_rope.guard(tables=tables) as session:
        model = _load(family, tmp_path, **LOADS[load])
    assert len(session.report.protected) == len(families.rotary_modules(model))
    assert {entry.path for entry in session.report.protected} == set(families.rotary_modules(model))
    survival.assert_runs(model)
    survival.assert_right(model, family, tables)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_protected_model_can_be_saved_and_loaded_again(family: str, how: str, tmp_path: Path) -> None:
    original = survival.build(family, "fp32")
    original.save_pretrained(tmp_path)
    with safe_rope.guard(tables="fp32") if how == "guard" else contextlib.nullcontext():
        model = _load(family, tmp_path, torch_dtype=torch.float32)
    if how == "protect":
        safe_rope.protect(model, tables="fp32")
    survival.assert_right(model, family, "fp32")
    assert torch.equal(survival.assert_runs(model), survival.assert_runs(original))


def _with_tables(state: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """The checkpoint of a time when inv_freq was saved; these were saved in FP16."""
    tables = {f"{path}.inv_freq": torch.full((3,), 7.0).half() for path in families.rotary_modules(model)}
    return {**state, **tables}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_load_state_dict_keeps_tables(family: str, assign: bool) -> None:
    stock, model = families.build(family, seed=1, layers=2), survival.build(family)
    state = stock.to(torch.bfloat16).state_dict()
    assert not any(model.load_state_dict(state, assign=assign))
    survival.assert_right(model, family, "exact")
    # Names that stock takes for unexpected stay unexpected.
    extended = _with_tables(state, model)
    expected = stock.load_state_dict(extended, strict=False)
    assert model.load_state_dict(extended, strict=False, assign=assign) == expected
    survival.assert_runs(model)
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("load", ["bf16", "bf16_low_memory"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_tables_in_a_checkpoint_are_not_believed(family: str, load: str, tmp_path: Path) -> None:
    stock = families.build(family, layers=2)
    stock.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tables = {
        f"{p}.inv_freq": torch.full_like(m.inv_freq, 7.0) for p, m in families.rotary_modules(stock).items()
    }
    state = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**state, **tables}, file, metadata={"format": "pt"})
    with safe_rope.guard():
        model = _load(family, tmp_path, **LOADS[load])
    survival.assert_runs(model)
    survival.assert_right(model, family, "exact")
