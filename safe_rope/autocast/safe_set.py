"""Which parameters an engine communicates in the autocast dtype."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from safe_rope.autocast import hooks, preflight
from safe_rope.autocast.defaults import default_safe_parameters
from safe_rope.autocast.derive import derive_safe_parameters
from safe_rope.autocast.example_inputs import find_example_inputs
from safe_rope.autocast.explicit import check_safe_modules
from safe_rope.autocast.safety import SafetyReport
from safe_rope.autocast.settings import AutocastSettings
from safe_rope.errors import ConfigError, PrecisionWarning

logger = logging.getLogger(__name__)


def choose(
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
            model, *inputs.args, dtype=settings.dtype, device_type=hooks.device_type(), **inputs.kwargs
        )
    except Exception:
        if inputs.source == "example_inputs":
            raise
        logger.info("the model cannot be traced with inputs from %s", inputs.source, exc_info=True)
        return default_safe_parameters(model, settings.dtype)


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
