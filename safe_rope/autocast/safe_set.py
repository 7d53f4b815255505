"""Which parameters an engine communicates in the autocast dtype, and where the example input comes from."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from safe_rope.autocast import preflight
from safe_rope.autocast.settings import AutocastSettings
from safe_rope.errors import ConfigError, PrecisionWarning

DEFAULT_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def as_inputs(example: Any) -> Inputs:
    """Return the positional and keyword arguments of the forward that ``example`` stands for.

    A mapping is keyword arguments, a tuple or list positional ones, anything else the only argument.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def first_batch(training_data: Any, collate_fn: Callable[[Any], Any] | None, size: int = 1) -> Any:
    """Return the first ``size`` samples of a dataset as DeepSpeed's loader would collate them."""
    from torch.utils.data import default_collate

    try:
        samples = [training_data[index] for index in range(size)]
    except (TypeError, KeyError, NotImplementedError):  # an iterable dataset
        iterator = iter(training_data)
        samples = [next(iterator) for _ in range(size)]
    return (collate_fn or default_collate)(samples)


def find_inputs(
    model: nn.Module, example: Any, training_data: Any, collate_fn: Callable[[Any], Any] | None
) -> Inputs | None:
    """Return inputs to trace ``model`` with: given ones, the first batch, or the model's own; else None."""
    if example is not None:
        return as_inputs(example)
    if training_data is not None:
        return as_inputs(first_batch(training_data, collate_fn))
    own = getattr(model, "dummy_inputs", None)  # transformers builds them from the config
    if isinstance(own, Mapping):
        return as_inputs(own)
    return None


def of_classes(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the names of the parameters that modules of ``classes``, or of subclasses, hold themselves."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, classes)
        for name, _ in module.named_parameters(recurse=False)
    )


def shared(model: nn.Module) -> frozenset[str]:
    """Return every name of the parameters that more than one module holds."""
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return frozenset(
        name for name, parameter in model.named_parameters(remove_duplicate=False) if uses[id(parameter)] > 1
    )


def choose(
    model: nn.Module,
    settings: AutocastSettings,
    example: Any = None,
    training_data: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> tuple[frozenset[str], Any]:
    """Choose the parameters that the engine communicates in the autocast dtype.

    Returns:
        their names, and the `SafetyReport` of the trace; None in its place where nothing could be traced.

    Warns:
        PrecisionWarning: nothing could be traced, so that modules' classes decide; or the config lists
            classes with a parameter that the model reads in FP32, which stays FP32.

    """
    report = _trace(model, settings, find_inputs(model, example, training_data, collate_fn))
    if settings.safe_modules == "auto":
        if report is not None:
            return frozenset(report.safe), report
        warnings.warn(
            "there is no input to trace the model with: Linear and convolution weights that one module holds "
            "are communicated in the autocast dtype, everything else in FP32. Give safe_rope.initialize "
            "example_inputs=... (what the model's forward takes) to find every safe parameter",
            PrecisionWarning,
            stacklevel=4,
        )
        return of_classes(model, DEFAULT_CLASSES) - shared(model), None
    listed = of_classes(model, preflight.import_classes(settings.safe_modules))
    unsafe = _unsafe(model, listed, report)
    if unsafe:
        shown = "; ".join(f"{name}: {reason}" for name, reason in sorted(unsafe.items())[:3])
        more = f"; and {len(unsafe) - 3} more" if len(unsafe) > 3 else ""
        warnings.warn(
            f"lower_precision_safe_modules lists {len(unsafe)} parameters that are not safe and "
            f"stay FP32: {shown}{more}",
            PrecisionWarning,
            stacklevel=4,
        )
    return listed - unsafe.keys(), report


def _trace(model: nn.Module, settings: AutocastSettings, inputs: Inputs | None) -> Any:
    if inputs is None:
        return None
    try:
        derive = importlib.import_module("safe_rope.autocast.derive")
    except ModuleNotFoundError:
        return None
    positional, keyword = inputs
    return derive.derive_safe_parameters(model, *positional, dtype=settings.dtype, **keyword)


def _unsafe(model: nn.Module, listed: frozenset[str], report: Any) -> dict[str, str]:
    if report is None:
        return dict.fromkeys(listed & shared(model), "more than one module holds it")
    return {p.name: p.reason for p in report.parameters if p.name in listed and not p.safe}


def parameters(model: nn.Module, names: frozenset[str]) -> list[nn.Parameter]:
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
