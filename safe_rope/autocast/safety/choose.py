"""Choose the parameters that an engine communicates in the autocast dtype: traced, by class, or as listed."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import dtype_name
from safe_rope._base.text import counted
from safe_rope.autocast import _deepspeed
from safe_rope.autocast.safety.derive import derive_safe_parameters
from safe_rope.autocast.safety.inputs import ExampleInputs, example_inputs
from safe_rope.autocast.safety.parameters import Shared, shared_parameters
from safe_rope.autocast.safety.ranks import Agree
from safe_rope.autocast.safety.report import SafetyReport
from safe_rope.autocast.safety.verdicts import by_dtype, make_entries
from safe_rope.autocast.settings import AutocastSettings
from safe_rope.errors import PrecisionWarning

logger = logging.getLogger(__name__)

DEFAULT_CLASSES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""DeepSpeed's default of lower_precision_safe_modules."""

_ADVICE = (
    "there is no input to trace the model with, so that only the weights of Linear and convolution layers, "
    "where one layer alone holds them, travel in {dtype}, and everything else in float32; pass "
    "example_inputs=... (what the model's forward takes) to find every parameter that may"
)

_SHOWN = 3


def choose_parameters(
    model: nn.Module, settings: AutocastSettings, *sources: Any, agree: Agree = lambda report: report
) -> tuple[list[nn.Parameter], SafetyReport]:
    """Choose the parameters that the engine communicates in the autocast dtype.

    ``sources`` are those of `example_inputs`; ``agree`` makes the report one that all ranks share. Returns
    the parameters, each once, and the report that they come from.

    Raises:
        ConfigError: the example inputs are not what the model's forward takes.

    Warns:
        PrecisionWarning: nothing could be traced, and modules' classes decide. Or the config lists classes
            that the model does not have, or with a parameter that it reads in FP32, which stays FP32.

    """
    found = traced(model, settings.dtype, *sources)
    listed = () if settings.safe_modules == "auto" else settings.safe_modules
    report = found[1] if found is not None else default_safe_parameters(model, settings.dtype, listed)
    report = agree(report)
    for text in report.warnings:
        logger.info("%s", text)
    names = report.safe
    if settings.safe_modules != "auto":
        names, complaints = check_safe_modules(model, settings.safe_modules, report)
        if complaints:
            message = "lower_precision_safe_modules: " + "\n".join(complaints)
            warnings.warn(message, PrecisionWarning, stacklevel=4)
    known = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(known[name]): known[name] for name in sorted(names)}
    return [parameter for parameter in chosen.values() if parameter.is_floating_point()], report


def traced(model: nn.Module, dtype: torch.dtype, *sources: Any) -> tuple[ExampleInputs, SafetyReport] | None:
    """Trace the model with the first of its inputs that it takes; None where it takes none."""
    for inputs in example_inputs(model, *sources):
        try:
            return inputs, derive_safe_parameters(
                model, *inputs.args, dtype=dtype, device_type=_deepspeed.device_type(), **inputs.kwargs
            )
        except Exception:  # a model may object in any way
            if inputs.taken_from == "example_inputs":
                raise
            logger.info("the model cannot be traced with inputs from %s", inputs.taken_from, exc_info=True)
    return None


def default_safe_parameters(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, listed: tuple[type[nn.Module], ...] = ()
) -> SafetyReport:
    """Call safe the parameters that one module alone holds, of one of DeepSpeed's default classes.

    A subclass counts where it has its base's forward; one with its own may read the weight in any way. A
    parameter that is tied to another, shares memory with one, or is held by several modules is left out.
    Of the classes ``listed`` by the user everything else is taken on trust. Nothing is run.

    Warns:
        PrecisionWarning: always, with how to do better, which the report says too.

    """
    low = dtype_name(dtype)
    advice = _ADVICE.format(dtype=low)
    warnings.warn(advice, PrecisionWarning, stacklevel=2)
    layers = of_classes(model, DEFAULT_CLASSES, inherited_forward=True) | of_classes(model, listed)

    def verdict(group: Shared) -> tuple[bool, str, None]:
        safe, reason = True, "the weight of a layer that autocast casts; not traced"
        if len(group.names) > 1:
            safe, reason = False, "not traced"
        elif group.names[0] not in layers:
            safe, reason = False, "in no layer that autocast is known to cast; not traced"
        own = by_dtype(group, dtype)
        return *(own if safe and own else (safe, reason)), None

    return SafetyReport(make_entries(model, shared_parameters(model), verdict), (advice,), low)


def of_classes(
    model: nn.Module, classes: tuple[type[nn.Module], ...], inherited_forward: bool = False
) -> frozenset[str]:
    """Return the names of the parameters that modules of ``classes``, or of subclasses, hold themselves.

    With ``inherited_forward``, only of modules whose class has the forward of one of ``classes``.
    """
    forwards = {cls.forward for cls in classes}
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, classes) and not (inherited_forward and type(module).forward not in forwards)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )


def check_safe_modules(
    model: nn.Module, classes: Sequence[type[nn.Module]], report: SafetyReport
) -> tuple[frozenset[str], list[str]]:
    """Compare the parameters of ``classes``, which stand for their subclasses too, with what ``report`` says.

    Returns the names of the safe ones, and complaints. There is one for each class of which the model has no
    module, and one about all parameters that are not safe, with what reads them.
    """
    listed = tuple(cls for cls in classes if any(isinstance(module, cls) for module in model.modules()))
    complaints = [_unknown(model, cls) for cls in classes if cls not in listed]
    held = of_classes(model, listed)
    entries = [entry for entry in report.parameters if entry.name in held]
    unsafe = [f"{entry.name} is {entry.reason}" for entry in entries if not entry.safe]
    if unsafe:
        more = f"; and {len(unsafe) - _SHOWN} more" if len(unsafe) > _SHOWN else ""
        complaints.append(
            f"low precision is not safe for {counted(len(unsafe), 'parameter')} of the listed classes, "
            f"and FP32 stays there: {'; '.join(unsafe[:_SHOWN])}{more}"
        )
    return frozenset(entry.name for entry in entries if entry.safe), complaints


def _unknown(model: nn.Module, wanted: type[nn.Module]) -> str:
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    # The class's own name counts, wherever it lives.
    by_name = {c.__name__: c for c in classes if issubclass(c, nn.Module) and c is not nn.Module}
    near = difflib.get_close_matches(wanted.__name__, by_name, 1, 0.6)
    hint = f"; did you mean {_qualified(by_name[near[0]])}?" if near else ""
    return f"{type(model).__name__} has no module of the class {_qualified(wanted)}{hint}"


def _qualified(cls: type[nn.Module]) -> str:
    package = "torch.nn" if cls.__module__.startswith("torch.nn.modules.") else cls.__module__
    return f"{package}.{cls.__qualname__}"
