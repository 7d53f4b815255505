"""Stops FP32 readers from seeing weights gathered in the autocast dtype.

Saving, loading and evaluating through the engine restore the FP32 weights first; other readers are refused.
A user can enter torch.autocast around an engine. If the engine has no autocast, this is refused, because its
communication would not follow. If it has one, this is mentioned once. DeepSpeed asks CUDA whether autocast is
on, whatever device is used, and only warns.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.torch_private import is_backward
from safe_rope.autocast import _deepspeed
from safe_rope.errors import ConfigError, PrecisionError, PrecisionWarning

logger = logging.getLogger(__name__)

_RESTORING = ("save_checkpoint", "save_16bit_model", "save_fp16_model", "load_checkpoint", "eval")


class Gather(Protocol):
    """A gather in the autocast dtype, of ZeRO 1 and 2 (gather12.py) or of ZeRO 3 (gather3.py)."""

    @property
    def rounded(self) -> bool:
        """Whether parameters hold values of the autocast dtype now."""

    def restore(self) -> None:
        """Gather FP32 values, on every rank; nothing where nothing is rounded."""

    @property
    def process_groups(self) -> list[Any]:
        """The groups of ranks that it gathers from."""


_gathers: ByIdentity[nn.Module, ref[Gather]] = ByIdentity()
"""The gather of the engine that a module is in, which its hooks keep."""


def restore_earlier(model: nn.Module) -> None:
    """Restore, on every rank, the weights that engines of ``model`` or of parts of it have rounded.

    Masters of the next engine would start from rounded weights, and from other ones on each rank. They do,
    with a PrecisionWarning, where the program has destroyed the process group of the earlier engine.
    """
    for module in model.modules():
        held = _gathers.get(module)
        gather = None if held is None else held()
        if gather is None:
            continue
        if not gather.rounded or all(map(_deepspeed.has_group, gather.process_groups)):
            gather.restore()
        else:
            text = (
                "the weights of this model were gathered in the autocast dtype by an earlier engine, whose "
                "process group is destroyed: training starts from the rounded weights. Call "
                "safe_rope.autocast.full_precision(engine) on every rank before the group is destroyed"
            )
            warnings.warn(text, PrecisionWarning, stacklevel=3)
            return


def restore_first(engine: Any, gather: Gather) -> None:
    """Let what saves, loads or evaluates through ``engine`` restore the weights of ``gather`` first.

    An export of the module or of a part of it is refused while they are rounded.
    """
    engine.low_precision_gather = gather

    def restored(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gather.restore()
        return original(*args, **kwargs)

    for name in _RESTORING:
        if hasattr(engine, name):
            _deepspeed.around(engine, name, restored)

    def refuse_export(*_: Any) -> None:
        if gather.rounded:
            raise PrecisionError(_message("its state_dict is read"))

    for module in engine.module.modules():  # a part of the model can be exported alone
        module.register_state_dict_pre_hook(refuse_export)
        _gathers[module] = ref(gather)


def refuse_outside(engine: Any, gather: Gather, dtype: torch.dtype) -> None:
    """Refuse a forward of the model, or of a part, without autocast to ``dtype``, if weights are rounded."""

    def refuse() -> None:
        if gather.rounded:
            raise PrecisionError(_message(f"it, or a part of it, is called without autocast to {dtype}"))

    _on_calls_outside(engine.module, dtype, refuse)


def gather_in_fp32_outside(engine: Any, safe: list[nn.Parameter], dtype: torch.dtype, gather: Gather) -> None:
    """Let ZeRO 3, where a forward is a collective anyway, have FP32 weights outside of autocast to ``dtype``.

    A forward under autocast gathers those of ``safe`` in ``dtype``, and finds what ``gather`` has gathered.
    Marks that a later engine of the model has made, or none, are what they were.
    """
    marks: list[tuple[nn.Parameter, torch.dtype]] = []

    def before() -> None:
        marks[:] = _deepspeed.marks(safe)
        _deepspeed.unmark(safe)
        gather.restore()

    def after() -> None:
        for parameter, low in marks:
            _deepspeed.mark([parameter], low)

    # Dynamo leaves DeepSpeed's own hooks out of its graphs, too.
    _on_calls_outside(engine.module, dtype, *map(torch.compiler.disable, (before, after)))


def _on_calls_outside(
    model: nn.Module, dtype: torch.dtype, before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Call these around a forward of ``model``, or of a part of it, without autocast to ``dtype``.

    Only the outermost call counts. What runs within the model's forward, or again in a backward, may leave
    autocast: that the weights which it reads there are exact is what makes others safe.
    """
    calls: list[bool] = []  # those that run now, and whether they are outside
    outermost: list[FrameType] = []  # torch's frame of the first of them
    device = _deepspeed.device_type()

    def is_outside() -> bool:
        if is_backward():
            return False
        # torch calls no hook after a forward that an interrupt ends: KeyboardInterrupt is no Exception.
        if not torch.compiler.is_compiling() and outermost and not _is_running(outermost[0]):
            while calls:
                leave()
        low = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
        return not (calls or low)

    def enter(*_: Any) -> None:
        outside = is_outside()
        if not (calls or torch.compiler.is_compiling()):
            outermost[:] = [sys._getframe(1)]
        calls.append(outside)
        if outside:
            before()

    def leave(*_: Any) -> None:
        outside = bool(calls) and calls.pop()
        if not (calls or torch.compiler.is_compiling()):
            outermost.clear()
        if outside and after is not None:
            after()

    def check(*_: Any) -> None:
        if is_outside():
            before()

    for module in model.modules():
        if module is not model and next(module.parameters(), None) is None:
            continue
        if module is model or after is not None:
            # Before DeepSpeed's own hooks, which gather; and after a forward that failed.
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)
        else:
            module.register_forward_pre_hook(check)


def _is_running(frame: FrameType) -> bool:
    """Whether ``frame`` runs, in this thread or in another: a forward may call its parts in threads."""
    return _leads_to(sys._getframe(1), frame) or any(
        _leads_to(top, frame) for top in sys._current_frames().values()
    )


def _leads_to(here: FrameType | None, frame: FrameType) -> bool:
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def watch_surroundings(engine: Any, own: torch.dtype | None) -> None:
    """Tell once of somebody else's torch.autocast around ``engine``, whose own is in the dtype ``own``.

    An engine with one replaces it. Without (None) the result is right in bfloat16, as DDP's is, with all
    communicated in the parameters' own dtype; float16, whose gradients need a loss scale, is refused.
    """
    device = _deepspeed.device_type()

    def check(module: Any, inputs: Any) -> None:
        if not torch.is_autocast_enabled(device):
            return
        if own is None:
            text = (
                f"torch.autocast is enabled for {device} around this engine, but the DeepSpeed config does "
                "not enable the section torch_autocast, so that communication does not follow it; add "
                '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} to the config, or leave '
                "torch.autocast before calling the engine"
            )
            if torch.get_autocast_dtype(device) == torch.float16 and not engine.fp16_enabled():
                if not torch.is_grad_enabled():
                    return  # there is no loss to scale
                raise ConfigError(f"{text}: nothing scales the loss for gradients in float16")
            warnings.warn(text, PrecisionWarning, stacklevel=4)
        elif engine.global_rank == 0:
            logger.info("torch.autocast around the engine: its own torch_autocast settings (%s) hold", own)
        handle.remove()

    handle = engine.register_forward_pre_hook(check)


def _message(what: str) -> str:
    return (
        "the model's weights were gathered in the autocast dtype, which training does not notice, and now "
        f"{what}: expected FP32 weights. Call safe_rope.autocast.full_precision(engine) on every rank before"
    )
