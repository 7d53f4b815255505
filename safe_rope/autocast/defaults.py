"""Which parameters to call safe where nothing can be traced: those of layers that autocast casts."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from safe_rope.autocast._parameters import Shared, shared_parameters
from safe_rope.autocast._verdicts import make_entry, short
from safe_rope.autocast.safety import SafetyReport
from safe_rope.errors import PrecisionWarning

DEFAULT_CLASSES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""DeepSpeed's default of lower_precision_safe_modules."""

_ADVICE = (
    "there is no input to trace the model with, so that only the weights of Linear and convolution layers, "
    "where one layer alone holds them, travel in {dtype}, and everything else in float32; pass "
    "example_inputs=... (what the model's forward takes) to find every parameter that may"
)


def default_safe_parameters(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> SafetyReport:
    """Call safe what modules of DeepSpeed's default classes hold themselves, and nobody else.

    A subclass counts where it has its base's forward; one with its own may read the weight in any way. A
    parameter that is tied to another, shares memory with one, or is held by several modules is left out.

    Args:
        model: any model, partitioned or not; nothing is run.
        dtype: the low dtype.

    Returns:
        SafetyReport: with the same warning as below.

    Warns:
        PrecisionWarning: always, with how to do better.

    """
    low = short(dtype)
    advice = _ADVICE.format(dtype=low)
    warnings.warn(advice, PrecisionWarning, stacklevel=2)
    layers = of_classes(model, DEFAULT_CLASSES, inherited_forward=True)
    entries = {}
    for group in shared_parameters(model):
        for name in group.names:
            safe, reason = _verdict(name, group, layers, dtype)
            entries[name] = make_entry(name, group, safe, reason)
    ordered = (entries[name] for name, _ in model.named_parameters(remove_duplicate=False))
    return SafetyReport(tuple(ordered), (advice,), low)


def _verdict(name: str, group: Shared, layers: frozenset[str], dtype: torch.dtype) -> tuple[bool, str]:
    parameter = group.parameters[0]
    if parameter.dtype == dtype:
        return True, f"already {short(dtype)}"
    if parameter.dtype != torch.float32:
        return False, f"{short(parameter.dtype)}, which autocast does not cast"
    if len(group.names) > 1:
        return False, "not traced"
    if name not in layers:
        return False, "in no layer that autocast is known to cast; not traced"
    return True, "the weight of a layer that autocast casts; not traced"


def of_classes(
    model: nn.Module, classes: tuple[type[nn.Module], ...], inherited_forward: bool = False
) -> frozenset[str]:
    """Return the names of the parameters that modules of ``classes``, or of subclasses, hold themselves.

    Args:
        model: the model.
        classes: module classes.
        inherited_forward: leave out modules whose class has a forward that is none of ``classes``'.

    """
    forwards = {cls.forward for cls in classes}
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, classes) and not (inherited_forward and type(module).forward not in forwards)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
