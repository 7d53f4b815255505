"""What torch.fx traces and torch.jit.script compiles: nobody protects the tables that are kept there."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base.text import class_name
from safe_rope._base.torch_private import modules_being_scripted
from safe_rope._protection.shown import STATE
from safe_rope._recognition.holdings import get_table, set_table, twin
from safe_rope._recognition.reference import stock_class
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation._cos_sin import CosSin, rounded

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


def scripted(module: nn.Module, state: Any) -> nn.Module:
    """Return what torch.jit.script compiles: a stock module, which it puts into the model as well."""
    stock = stock_class(module)
    warnings.warn(
        f"torch.jit.script compiles {class_name(stock)} as it is without safe_rope, and leaves the model "
        "with it: nothing protects its tables from here on. Script a model in torch.float32, or use "
        "torch.compile",
        PrecisionWarning,
        stacklevel=2,
    )
    for around in modules_being_scripted(sys._getframe(2)):
        for name, buffer in around._buffers.items():
            if isinstance(buffer, CosSin):
                around._buffers[name] = rounded(buffer)
    other = twin(module, stock, state.names(module))
    del vars(other)[STATE]
    for name in state.names(module):
        table = get_table(other, name)
        if isinstance(table, torch.Tensor):
            set_table(other, name, state.saved(name, table))
    return other
