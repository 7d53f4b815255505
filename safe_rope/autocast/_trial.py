"""Whether a model takes certain inputs, tried on fake tensors where they suffice; nothing is left behind."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only

from safe_rope.autocast._borrowed import borrowed
from safe_rope.autocast._flow import Flow, Modules
from safe_rope.autocast._parameters import device_of, shared_parameters
from safe_rope.autocast._stand_ins import FakeStandIns, StandIns, fake_tensors
from safe_rope.autocast._undo import Undo

logger = logging.getLogger(__name__)

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``model(*args, **kwargs)`` comes to an end, as far as can be told cheaply.

    Where fake tensors are stopped by what only values can tell, the inputs count as taken.
    """
    for fake in (True, False):
        try:
            _run(model, args, kwargs, fake)
        except _DEPENDS_ON_VALUES:
            return True
        except Exception:  # a model may object in any way, and so may fake tensors
            logger.debug("the model does not take %s %s", args, kwargs, exc_info=True)
        else:
            return True
    return False


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fake: bool) -> None:
    groups = shared_parameters(model)
    undo = Undo(active=not fake)
    with contextlib.ExitStack() as stack:
        stack.callback(undo.restore)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if fake:
            stack.enter_context(fake_tensors())
        kind = FakeStandIns if fake else StandIns
        stand_ins = kind(groups, None, device_of(groups))
        given, named = tree_map_only(Tensor, stand_ins.value, (args, kwargs))
        with borrowed(model, stand_ins, None), torch.no_grad(), Flow(torch.bfloat16, Modules(model), undo):
            model(*given, **named)
