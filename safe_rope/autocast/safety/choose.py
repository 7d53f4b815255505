"""Choose the parameters that an engine communicates in the autocast dtype: traced, by class, or as listed."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from safe_rope.autocast import _deepspeed, preflight
from safe_rope.autocast.safety.derive import derive_safe_parameters
from safe_rope.autocast.safety.inputs import find_example_inputs
from safe_rope.autocast.safety.parameters import Shared, shared_parameters
from safe_rope.autocast.safety.report import ParameterSafety, SafetyReport
from safe_rope.autocast.safety.verdicts import make_entry, short
from safe_rope.autocast.settings import AutocastSettings
from safe_rope.errors import ConfigError, PrecisionWarning

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
    model: nn.Module,
    settings: AutocastSettings,
    example: Any = None,
    training_data: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> tuple[frozenset[str], SafetyReport]:
    """Choose the parameters that the engine communicates in the autocast dtype.

    Returns:
        their names, and the report that they come from.

    Raises:
        ConfigError: the example inputs are not what the model's forward takes.

    Warns:
        PrecisionWarning: nothing could be traced, so that modules' classes decide; or the config lists
            classes that the model does not have, or with a parameter that it reads in FP32, which stays FP32.

    """
    report = _report(model, settings, example, training_data, collate_fn)
    for text in report.warnings:
        logger.info("%s", text)
    if settings.safe_modules == "auto":
        return report.safe, report
    check = check_safe_modules(model, preflight.import_classes(settings.safe_modules), report)
    if not check.ok:
        warnings.warn(f"lower_precision_safe_modules: {check}", PrecisionWarning, stacklevel=4)
    return check.safe, report


def _report(
    model: nn.Module,
    settings: AutocastSettings,
    example: Any,
    training_data: Any,
    collate_fn: Callable[[Any], Any] | None,
) -> SafetyReport:
    inputs = find_example_inputs(model, example, training_data, collate_fn)
    if inputs is None:
        return default_safe_parameters(model, settings.dtype)
    try:
        return derive_safe_parameters(
            model, *inputs.args, dtype=settings.dtype, device_type=_deepspeed.device_type(), **inputs.kwargs
        )
    except Exception:
        if inputs.source == "example_inputs":
            raise
        logger.info("the model cannot be traced with inputs from %s", inputs.source, exc_info=True)
        return default_safe_parameters(model, settings.dtype)


def parameters_named(model: nn.Module, names: frozenset[str]) -> list[nn.Parameter]:
    """Return the floating parameters of these names, each once.

    Raises:
        ConfigError: the model has no parameter of one of the names.

    """
    known = dict(model.named_parameters(remove_duplicate=False))
    lacking = sorted(names - known.keys())
    if lacking:
        raise ConfigError(f"{type(model).__name__} has no parameters {', '.join(lacking[:3])}")
    found = {id(known[name]): known[name] for name in sorted(names)}
    return [parameter for parameter in found.values() if parameter.is_floating_point()]


def default_safe_parameters(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> SafetyReport:
    """Call safe the parameters that one module alone holds, of one of DeepSpeed's default classes.

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


@dataclass(frozen=True)
class SafeModulesCheck:
    """What is wrong with a list of safe module classes, and which parameters it leaves.

    Attributes:
        safe: names of the parameters of the listed classes that are safe.
        unsafe: the parameters of the listed classes that are not, with what reads them.
        unknown: one message for each listed class of which the model has no module.
    """

    safe: frozenset[str]
    unsafe: tuple[ParameterSafety, ...]
    unknown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every class occurs and every parameter of them is safe."""
        return not (self.unsafe or self.unknown)

    def __str__(self) -> str:
        lines = list(self.unknown)
        if self.unsafe:
            shown = "; ".join(f"{entry.name} is {entry.reason}" for entry in self.unsafe[:_SHOWN])
            more = f"; and {len(self.unsafe) - _SHOWN} more" if len(self.unsafe) > _SHOWN else ""
            lines.append(
                f"{len(self.unsafe)} parameter(s) of the listed classes are not safe in low precision and "
                f"stay as they are: {shown}{more}"
            )
        return "\n".join(lines)


def check_safe_modules(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], report: SafetyReport
) -> SafeModulesCheck:
    """Compare the parameters of ``classes`` with what ``report`` says about them.

    Args:
        model: the model.
        classes: module classes, or their qualified names ("torch.nn.Linear"); a class stands for its
            subclasses too.
        report: from `derive_safe_parameters` or `default_safe_parameters`.

    """
    known: dict[str, type[nn.Module]] = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            if issubclass(cls, nn.Module):
                known |= dict.fromkeys(_names(cls), cls)
    listed: list[type[nn.Module]] = []
    unknown = []
    for wanted in classes:
        found = known.get(wanted if isinstance(wanted, str) else _names(wanted)[0])
        if found is not None:
            listed.append(found)
        else:
            unknown.append(_unknown(model, wanted, known))
    held = of_classes(model, tuple(listed)) if listed else frozenset()
    entries = [entry for entry in report.parameters if entry.name in held]
    return SafeModulesCheck(
        frozenset(entry.name for entry in entries if entry.safe),
        tuple(entry for entry in entries if not entry.safe),
        tuple(unknown),
    )


def _names(cls: type[nn.Module]) -> list[str]:
    names = [f"{cls.__module__}.{cls.__qualname__}"]
    if cls.__module__.startswith("torch.nn.modules."):
        names.append(f"torch.nn.{cls.__qualname__}")
    return names


def _unknown(model: nn.Module, wanted: type[nn.Module] | str, known: dict[str, type[nn.Module]]) -> str:
    name = wanted if isinstance(wanted, str) else _names(wanted)[-1]
    candidates = [
        entry for entry in known if entry not in ("torch.nn.Module", "torch.nn.modules.module.Module")
    ]
    # The class's own name counts, wherever it lives.
    by_end = {entry.rpartition(".")[2]: entry for entry in candidates}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_end, 1, 0.6)
    hint = f"; did you mean {by_end[near[0]]}?" if near else ""
    return f"{type(model).__name__} has no module of the class {name}{hint}"
