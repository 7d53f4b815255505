"""Whether a model takes certain inputs, tried on fake tensors: without memory, and without a trace left."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only

from safe_rope.autocast._borrowed import borrowed
from safe_rope.autocast._parameters import device_of, shared_parameters
from safe_rope.autocast._stand_ins import FakeStandIns

logger = logging.getLogger(__name__)

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``model(*args, **kwargs)`` comes to an end, as far as shapes and dtypes can tell."""
    groups = shared_parameters(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            stand_ins = FakeStandIns(groups, None, device_of(groups))
            given, named = tree_map_only(Tensor, stand_ins.value, (args, kwargs))
            with borrowed(model, stand_ins, None), torch.no_grad():
                model(*given, **named)
    except _DEPENDS_ON_VALUES:
        return True
    except Exception:  # a model may object in any way
        logger.debug("the model does not take %s %s", args, kwargs, exc_info=True)
        return False
    return True
