"""What engines, FSDP, PEFT and compilers put around a model, and what that means for its position tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.torch_private import WRAPPED, fsdp_class, fully_sharded_policy, has_run, ignored_modules

_ENGINES = ("deepspeed.", "torch.nn.parallel.", "accelerate.")


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the model itself, and what is around it from the outside in."""
    around: list[nn.Module] = []
    while (inner := _inner(model)) is not None:
        around.append(model)
        model = inner
    return model, around


def _inner(model: nn.Module) -> nn.Module | None:
    for name in WRAPPED:
        if name in model._modules:
            return model._modules[name]
    if type(model).__module__.startswith(_ENGINES) and "module" in model._modules:
        return model._modules["module"]
    get_base_model: Any = getattr(model, "get_base_model", None)
    if not (hasattr(model, "peft_config") and callable(get_base_model)):
        return None
    base: nn.Module = get_base_model()
    return base if base is not model else None


def compute_dtypes(chain: Iterable[nn.Module]) -> tuple[torch.dtype, ...]:
    """The dtypes that a module's activations may have: FSDP's param_dtype, else the nearest parameters'.

    Args:
        chain: the module, what holds it, and so on up to what is wrapped around the model.

    """
    around = list(chain)
    for module in around:
        dtype = _param_dtype(module)
        if dtype is not None:
            return (dtype,)
    for module in around:
        found = {one.dtype: None for one in module.parameters() if one.is_floating_point()}
        if found:
            return (*sorted(found, key=lambda dtype: dtype.itemsize),)
    return (torch.float32,)


def _param_dtype(module: nn.Module) -> torch.dtype | None:
    """What FSDP casts the parameters and the inputs of a unit to, if the module is one and it does."""
    first, second = fsdp_class("FullyShardedDataParallel"), fsdp_class("FSDPModule")
    policy: Any = None
    if first is not None and isinstance(module, first):
        policy = module.mixed_precision
    elif second is not None and isinstance(module, second):
        policy = fully_sharded_policy(module)
    dtype = getattr(policy, "param_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def pending_casts(model: nn.Module) -> dict[nn.Module, torch.dtype]:
    """Modules whose buffers FSDP will cast to a 16-bit dtype at the first forward, and to which."""
    sharded = fsdp_class("FullyShardedDataParallel")
    pending: dict[nn.Module, torch.dtype] = {}
    if sharded is None:
        return pending
    for unit in model.modules():  # outer units first: the innermost decides
        if not isinstance(unit, sharded) or has_run(unit):
            continue
        ignored = ignored_modules(unit)
        for module in unit.modules():
            pending.pop(module, None)
            if unit.mixed_precision.buffer_dtype in LOW and module not in ignored:
                pending[module] = unit.mixed_precision.buffer_dtype
    return pending
