"""Tables are right in a model that is loaded from files, whatever these hold and whatever the dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import families, small_models, survival

import safe_rope
from safe_rope._protection.rewrite import is_pinned, state_of

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


def _in_the_old_format(model: Any, file: Path) -> Any:
    torch.save(model, file, _use_new_zipfile_serialization=False)
    return torch.load(file, weights_only=False)  # fills tensors once all objects are made


def _onto_meta(model: Any, file: Path) -> Any:
    torch.save(model, file)
    loaded = torch.load(file, weights_only=False, map_location="meta").to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict())
    return loaded


@pytest.mark.parametrize("through", [_in_the_old_format, _onto_meta])
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_whole_model_keeps_its_tables_however_it_is_read(
    family: str, tables: str, through: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    if not survival.can_be_pickled(family):
        pytest.skip("the stock model cannot be pickled")
    model = survival.build(family, tables).to(torch.bfloat16)
    survival.assert_right(through(model, tmp_path / "model.pt"), family, tables)


@pytest.mark.parametrize("through", [_in_the_old_format, _onto_meta])
def test_a_whole_model_keeps_pinned_tables_however_it_is_read(
    through: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    with safe_rope.guard():
        model = small_models.build("gptj").eval()
    loaded = through(model, tmp_path / "model.pt").eval()
    tables = [getattr(part, "embed_positions", None) for part in model.modules()]
    again = [getattr(part, "embed_positions", None) for part in loaded.modules()]
    assert any(table is not None for table in tables)
    for table, other in zip(tables, again, strict=True):
        assert table is other is None or torch.equal(table, other)


def test_layers_with_one_table_share_it_when_they_are_read_again(tmp_path: Path) -> None:
    with safe_rope.guard():
        model = torch.nn.ModuleList(small_models.build("gptj") for _ in range(2))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    states = [state_of(part) for part in loaded.modules() if is_pinned(part)]
    assert len(states) == 2
    assert states[0].pins["embed_positions"].values is states[1].pins["embed_positions"].values
