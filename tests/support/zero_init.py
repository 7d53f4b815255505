"""What the tests of this folder share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from safe_rope.constructors import CONSTRUCTORS, interception_active

FP32, BF16 = torch.float32, torch.bfloat16


def zero_init(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A real zero.Init whose model dtype is ``dtype``."""
    import deepspeed

    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.zero.Init(config_dict_or_path=config)


def default_zero_init() -> Any:
    """A real zero.Init for BF16, with every threshold as DeepSpeed sets it."""
    import deepspeed

    return deepspeed.zero.Init(
        config_dict_or_path={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
    )


@contextmanager
def plain_torch() -> Iterator[None]:
    """The original constructors, as they stand in torch where there is no zero.Init."""
    before = {name: getattr(torch, name) for name in CONSTRUCTORS}
    try:
        for name in CONSTRUCTORS:
            setattr(torch, name, getattr(torch._C._VariableFunctions, name))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def replaceable() -> dict[str, Any]:
    """Every global that a guard may replace, as the object that stands there now."""
    found: dict[str, Any] = {name: getattr(torch, name) for name in CONSTRUCTORS}
    found["Tensor.__new__"] = torch.Tensor.__new__
    for cls in (torch.nn.Parameter, torch.nn.UninitializedParameter):
        found[cls.__name__] = inspect.getattr_static(cls, "__new__")
    found["set_"], found["swap_tensors"] = torch.Tensor.set_, torch.utils.swap_tensors
    found["modes"] = tuple(torch.overrides._get_current_function_mode_stack())
    found["default dtype"] = torch.get_default_dtype()
    from deepspeed.runtime.zero import partition_parameters as pp

    cls = pp.InsertPostInitMethodToModuleSubClasses
    for name in ("_add_tensor_creation_wrappers", "_remove_tensor_creation_wrappers"):
        found[name] = inspect.getattr_static(cls, name)
    from deepspeed.utils.init_on_device import OnDevice

    for name in ("__enter__", "__exit__"):
        found[f"OnDevice.{name}"] = inspect.getattr_static(OnDevice, name)
    return found


def assert_unchanged(before: dict[str, Any]) -> None:
    """Every replaceable global is the very object that it was."""
    after = replaceable()
    changed = [
        name
        for name, value in before.items()
        if after[name] is not value and not (isinstance(value, tuple) and after[name] == value)
    ]
    assert not changed, f"not restored: {changed}"


def assert_truthful() -> None:
    """Inside zero.Init and a guard: an explicit dtype holds, a parameter is what zero.Init makes of it."""
    assert interception_active()
    assert torch.arange(5, dtype=FP32).dtype == FP32
    assert torch.ones(3, dtype=torch.float64).dtype == torch.float64
    assert torch.tensor([0.1], dtype=FP32).item() == pytest.approx(0.1, abs=1e-8)
    assert torch.ones(3).dtype == BF16
    assert torch.nn.Parameter(torch.ones(3, dtype=FP32)).dtype == BF16


def assert_stock() -> None:
    """Inside zero.Init without a guard."""
    assert not interception_active()
    assert torch.arange(5, dtype=FP32).dtype == BF16
    assert torch.nn.Parameter(torch.linspace(0, 1, 3)).dtype == FP32


def assert_plain() -> None:
    """Outside zero.Init."""
    assert not interception_active()
    for name in ("arange", "ones", "tensor"):
        assert getattr(torch, name) is getattr(torch._C._VariableFunctions, name)
    assert torch.ones(3).dtype == FP32
