"""Calls that torch.fx traces: nobody protects the tables that its graph keeps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from safe_rope._base.text import class_name
from safe_rope._recognition.reference import stock_class
from safe_rope.errors import PrecisionWarning

logger = logging.getLogger(__name__)


def is_traced(arguments: Iterable[Any]) -> bool:
    """Whether a call is traced by torch.fx, which gives it proxies for its arguments."""
    return any(isinstance(argument, torch.fx.Proxy) for argument in arguments)


def run_traced(module: Any, run: Callable[[], Any], as_stock: Callable[[], Any]) -> Any:
    """Say that the graph is not protected; return what ``run`` traces, ``as_stock`` where it cannot."""
    warnings.warn(
        f"torch.fx traces {class_name(stock_class(module))}: the graph keeps its tables as they are now and "
        "nothing protects them. Cast the model before it is traced, and compute positions in torch.float32",
        PrecisionWarning,
        stacklevel=2,
    )
    try:
        return run()
    except Exception:
        logger.info("%s is traced as stock", type(module).__name__, exc_info=True)
        return as_stock()
