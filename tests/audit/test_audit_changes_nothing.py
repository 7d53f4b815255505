"""audit() changes neither the model nor its surroundings, and is not changed by them."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from audited import PlainRotary, of, use
from rotary_models import build, first_rotary, rope_types
from torch import nn

import safe_rope
from safe_rope.registry import find
from safe_rope.rotation import _installed


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module: identity, version and bits of tensors, values of the rest."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "dtype": torch.get_default_dtype()}
    for path, module in model.named_modules():
        tensors = {**vars(module), **module._buffers, **module._parameters}
        seen[f"{path} class"] = type(module)
        seen[f"{path} names"] = (sorted(vars(module)), sorted(module._buffers))
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                bits = None if value.is_meta else value.detach().clone()
                seen[f"{path}.{name}"] = (id(value), value._version, value.dtype, value.grad is None, bits)
            elif isinstance(value, int | float | str | None):
                seen[f"{path}.{name}"] = value
    return seen


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, tuple) and value and isinstance(value[-1], torch.Tensor):
            assert value[:-1] == after[name][:-1], name
            assert value[-1].equal(after[name][-1]), name
        else:
            assert value == after[name] or value is after[name], name


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
@pytest.mark.parametrize("rope_type", rope_types())
@pytest.mark.parametrize("used", [0, 6000, 12000])
def test_an_audit_changes_nothing(rope_type: str, protected: bool, used: int) -> None:
    model = build(rope_type=rope_type)
    if protected:
        safe_rope.protect(model)
    if used:
        use(model, used)
    before = snapshot(model)
    report = safe_rope.audit(model)
    assert_same(before, snapshot(model))
    assert report.ok, str(report)
    assert len(report.modules[0].rows) == 10


def test_an_audit_leaves_the_application_and_its_count_alone() -> None:
    model = build()
    safe_rope.protect(model)
    patch = find(first_rotary(model))
    namespace = sys.modules[patch.modules[0]]
    wrapper = namespace.apply_rotary_pos_emb
    gc.collect()
    users = {key: replacement.users for key, replacement in _installed._installed.items()}
    assert not any("__safe_rope" in str(key) for key in users), "what a function runs is no application"
    assert safe_rope.audit(model).ok
    gc.collect()
    assert {key: replacement.users for key, replacement in _installed._installed.items()} == users

    def foreign(*args: Any, **kwargs: Any) -> None: ...

    namespace.apply_rotary_pos_emb = foreign
    try:
        report = safe_rope.audit(model)
        assert namespace.apply_rotary_pos_emb is foreign
    finally:
        namespace.apply_rotary_pos_emb = wrapper
    assert not report.ok
    assert "apply_rotary_pos_emb was replaced" in of(report, "application", "unknown")[0].source


@pytest.mark.parametrize("make", [build, PlainRotary], ids=["llama", "plain"])
def test_the_surroundings_have_no_influence(make: Any) -> None:
    model = make()
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    expected = report.to_dict()
    with torch.autocast("cpu", torch.bfloat16):
        assert safe_rope.audit(model).to_dict() == expected
    with torch.inference_mode():
        assert safe_rope.audit(model).to_dict() == expected
    with torch.device("meta"):
        assert safe_rope.audit(model).to_dict() == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert safe_rope.audit(model).to_dict() == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_hooks_and_foreign_wrappers_are_neither_called_nor_copied() -> None:
    model = build()
    rotary = first_rotary(model)

    class Engine:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the engine was copied")

        def hook(self, *args: Any) -> None:
            raise AssertionError("the hook was called")

    rotary.register_forward_pre_hook(Engine().hook)
    rotary.engine = Engine()
    assert safe_rope.audit(model).ok
