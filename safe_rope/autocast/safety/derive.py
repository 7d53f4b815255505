"""Which parameters may be gathered in the low dtype without changing the forward by one bit.

Autocast rounds the weights of its operators to the low dtype before they are used. A parameter whose every
use goes through that rounding may as well arrive rounded: rounding twice is rounding once. Which ones these
are depends on the model's code, not on the classes of its modules, so one step is traced.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base.tensors import tensors
from safe_rope._base.text import counted
from safe_rope._base.torch_private import pytree, reentrant_checkpoints
from safe_rope.autocast._operators import MemoryReads, Watch
from safe_rope.autocast.safety.borrowed import borrowed
from safe_rope.autocast.safety.contents import random_state_kept
from safe_rope.autocast.safety.flow import Flow, Modules
from safe_rope.autocast.safety.parameters import Shared, device_of, shared_parameters
from safe_rope.autocast.safety.report import SafetyReport
from safe_rope.autocast.safety.siblings import called_like, unreached_siblings
from safe_rope.autocast.safety.stand_ins import FakeStandIns, StandIns, fake_tensors
from safe_rope.autocast.safety.undo import Undo
from safe_rope.autocast.safety.verdicts import report_on_flow
from safe_rope.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKWARD_LIMIT = 2**31
"""Bytes of parameters up to which a trace on real memory runs the backward, which keeps every cast weight."""


def derive_safe_parameters(
    model: nn.Module,
    *args: Any,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str | None = None,
    **kwargs: Any,
) -> SafetyReport:
    """Trace one step of ``model(*args, **kwargs)`` under autocast and say which parameters are safe.

    A parameter is safe if every use of it in the forward and the backward goes through a cast to ``dtype``.
    Only views and pure movement of data may come before the cast. Gathering it in ``dtype`` is then
    bit-identical. Any other reader (an embedding lookup, a norm, an operator that autocast does not know)
    makes it unsafe, for all the names it is tied under. What holds for the traced path and device holds for
    others only as far as these use the same operators.

    The trace runs on fake tensors, which hold no memory. A model on the meta device and one that ZeRO-3 has
    partitioned are therefore traced from their shapes, and nothing is gathered. If the path depends on values
    (experts that loop over the tokens routed to them), the step is run for real. It then uses the parameters'
    memory, or constants if not all of that is here. The model is traced in train and in eval mode. The
    model, its buffers, gradients and modes and the random state are restored.

    Args:
        model: a model with FP32 parameters.
        *args: positional arguments of its forward.
        dtype: the low dtype, torch.bfloat16 or torch.float16.
        device_type: the device that it will run on ("cuda"); by default where its parameters are.
        **kwargs: keyword arguments of its forward.

    Returns:
        SafetyReport: one entry for each name of each parameter.

    Raises:
        ConfigError: dtype is neither, or autocast does not support it on the device.
        Exception: whatever the model raises for these arguments.

    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"dtype must be torch.bfloat16 or torch.float16, got {dtype}; autocast knows no other"
        )
    groups = shared_parameters(model)
    device = torch.device(device_type) if device_type else device_of(groups)
    low = autocast(device, dtype)
    try:
        return _trace(model, groups, device, low, (args, kwargs), fake=True)
    except Exception as error:  # whatever a model does that fake tensors cannot
        logger.debug("tracing on fake tensors failed, tracing on real ones", exc_info=True)
        try:
            return _trace(model, groups, device, low, (args, kwargs), fake=False)
        except Exception as second:
            raise second from error


def _trace(
    model: nn.Module, groups: list[Shared], device: torch.device, low: torch.autocast, inputs: Any, fake: bool
) -> SafetyReport:
    """Trace the step in each mode of the model; report what was seen and what could not be."""
    modules, undo = Modules(model), Undo(active=not fake)
    flow = Flow(low.fast_dtype, modules, undo)
    with random_state_kept(device.type == "cuda"), modules.watched(), contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))  # the backward's, and ours
        stack.enter_context(torch.inference_mode(False))
        if hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # its caches would keep the trace's
        stack.callback(undo.restore)
        stand_ins = (
            StandIns(groups, flow, device)
            if not fake
            else FakeStandIns(groups, flow, device, stack.enter_context(fake_tensors()))
        )
        notes = []
        for training in (None, not model.training):
            with borrowed(model, stand_ins, training):
                try:
                    notes += _step(model, low, inputs, flow, modules, stand_ins)
                except Exception as error:  # these may be inputs for train mode only
                    if fake or training is not False:
                        raise
                    notes.append(f"eval mode could not be traced ({type(error).__name__}: {error})")
        unused = {name for group, uses in flow.uses.items() if not uses.any for name in group.names}
        plan = unreached_siblings(model, unused, modules.called)
        if plan:
            with borrowed(model, stand_ins, None), called_like(model, plan) as called:
                _step(model, low, inputs, flow, modules, stand_ins)
            if called:
                notes.append(
                    f"the example input does not reach {counted(len(called), 'module')}, "
                    f"such as {min(called)}; they were called as their siblings were, with the same arguments"
                )
    return report_on_flow(model, groups, flow, notes)


def _step(
    model: nn.Module, low: torch.autocast, inputs: Any, flow: Flow, modules: Modules, stand_ins: StandIns
) -> list[str]:
    """Run forward and backward; return what of them could not be traced."""
    args, kwargs = pytree.tree_map_only(Tensor, stand_ins.value, inputs)
    with torch.enable_grad(), Watch(flow.run, higher_order=True), MemoryReads():
        with low:
            output = model(*args, **kwargs)
        flow.read(output, "the model's output")
        ends = [end for end in tensors(output) if end.requires_grad]
        weights = stand_ins.trainable()
        if not (ends and weights):
            return []
        if stand_ins.real_bytes > _BACKWARD_LIMIT:
            return ["the backward was not traced, which matters for custom autograd functions only"]
        modules.in_backward = True
        try:
            ones = [torch.ones_like(end) for end in ends]
            with reentrant_checkpoints(weights):
                torch.autograd.backward(ends, ones, inputs=weights)
        except Exception as error:  # the forward's verdict stands; only custom functions can differ
            return [f"the backward could not be traced ({type(error).__name__}: {error})"]
        finally:
            modules.in_backward = False
            for weight in weights:
                weight.grad = None
    return []


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the autocast context of the trace: without the cache, which would hide casts.

    Raises:
        ConfigError: autocast is not available for ``dtype`` on ``device``.

    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = torch.autocast(device.type, dtype=dtype, cache_enabled=False)
        except RuntimeError as error:
            raise ConfigError(f"expected a device that autocast knows, got {device.type}: {error}") from error
    if not context._enabled:
        raise ConfigError(
            f"expected a device on which autocast works with {dtype}, got {device.type}; "
            "derive where the model will run, or choose the other dtype"
        )
    return context
