"""A second device for machines without one: a GPU's rules, the CPU's memory and operators.

It stands for what a GPU asks of code that knows of tensors on two devices. `install` changes the process for
good, as accelerate and DeepSpeed find an accelerator then: tests use it in processes of their own.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import torch

NAME = "second"


def install() -> None:
    """Build the device, which takes half a minute once, and make it known to torch by its name."""
    from torch.utils import cpp_extension

    torch.utils.rename_privateuse1_backend(NAME)
    os.environ.setdefault("MAX_JOBS", "1")
    source = Path(__file__).with_name("device.cpp")
    cpp_extension.load("safe_rope_second_device", [str(source)], extra_cflags=["-O0"])
    module: Any = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda *args: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.Tensor.__deepcopy__ = _copied  # type: ignore[method-assign]


_deepcopy: Any = torch.Tensor.__deepcopy__


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Copy as on a GPU: torch copies the storage of a device of this kind to the CPU."""
    if (
        tensor.device.type != NAME
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or id(tensor) in memo
    ):
        return _deepcopy(tensor, memo)
    copied = tensor.detach().clone()
    if type(tensor) is torch.nn.Parameter:
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    copied.__dict__.update(vars(tensor))
    return memo.setdefault(id(tensor), copied.requires_grad_(tensor.requires_grad))
