"""Stops FP32 readers from seeing weights gathered in the autocast dtype.

Saving, loading and evaluating through the engine restore the FP32 weights first; other readers are refused.
A user can enter torch.autocast around an engine. If the engine has no autocast, this is refused, because its
communication would not follow. If it has one, this is mentioned once. DeepSpeed asks CUDA whether autocast is
on, whatever device is used, and only warns.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.threads import running_frames
from safe_rope._base.torch_private import calls_of_modules, is_backward
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


_Modules = ByIdentity[nn.Module, None]

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

    An export or a copy of the module, or of a part of it, is refused while they are rounded.
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

    def refuse_copy() -> None:
        if gather.rounded:
            raise PrecisionError(_message("it, or a part of it, is copied or pickled"))

    hook = _Hook(refuse_export, refuse_copy)
    for module in _parts_with_parameters(engine.module):  # each can be exported alone
        module.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        _gathers[module] = ref(gather)


def refuse_outside(engine: Any, gather: Gather, dtype: torch.dtype) -> None:
    """Refuse a forward of the model, or of a part, without autocast to ``dtype``, if weights are rounded."""
    model, ours, device = engine.module, _modules(engine.module), _deepspeed.device_type()
    called: list[bool] = []  # whether the model is; what Dynamo traces sees no frames

    # Dynamo takes a compiled model that it meets here for the module within: it must not meet ``model``.
    def refuse(module: nn.Module, within: bool) -> None:
        traced = torch.compiler.is_compiling()
        # Dynamo breaks its graph where it is asked for a backward, and cannot where it must be whole.
        if _is_low(device, dtype) or (traced and within) or not gather.rounded or is_backward():
            return
        if traced or _is_outermost(module, model, ours):
            raise PrecisionError(_message(f"it, or a part of it, is called without autocast to {dtype}"))

    def check(module: nn.Module, *_: Any) -> None:
        refuse(module, within=bool(called))

    def enter(module: nn.Module, *_: Any) -> None:
        refuse(module, within=False)
        called[:] = [True]

    def leave(*_: Any) -> None:
        called.clear()

    for module in _parts_with_parameters(model):
        if module is model:
            module.register_forward_pre_hook(_Hook(enter), prepend=True)
            module.register_forward_hook(_Hook(leave), always_call=True)
        else:
            module.register_forward_pre_hook(_Hook(check))


def gather_in_fp32_outside(engine: Any, safe: list[nn.Parameter], dtype: torch.dtype, gather: Gather) -> None:
    """Let ZeRO 3, where a forward is a collective anyway, have FP32 weights outside of autocast to ``dtype``.

    A forward under autocast gathers those of ``safe`` in ``dtype``, and finds what ``gather`` has gathered.
    Marks that a later engine of the model has made, or none, are what they were.
    """
    model, ours, device = engine.module, _modules(engine.module), _deepspeed.device_type()
    marks: list[tuple[nn.Parameter, torch.dtype]] = []  # taken off while a call outside runs

    def put_back() -> None:
        for parameter, low in marks:
            _deepspeed.mark([parameter], low)
        marks.clear()

    def enter(module: nn.Module, *_: Any) -> None:
        low = _is_low(device, dtype)
        if is_backward() or (low and not marks) or not _is_outermost(module, model, ours):
            return
        put_back()  # torch calls no hook after a forward that an interrupt ends
        if not low:
            marks[:] = _deepspeed.marks(safe)
            _deepspeed.unmark(safe)
            gather.restore()

    def leave(module: nn.Module, *_: Any) -> None:
        if marks and _is_outermost(module, model, ours):
            put_back()

    # Dynamo leaves DeepSpeed's own hooks out of its graphs, too.
    before, after = map(_Hook, map(torch.compiler.disable, (enter, leave)))
    for module in _parts_with_parameters(model):
        # Before DeepSpeed's own hooks, which gather; and after a forward that failed.
        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)


class _Hook:
    """A hook that copies of its module do not have, nor what is pickled of it.

    ``before_copy`` may refuse the copy.
    """

    def __init__(self, call: Callable[..., None], before_copy: Callable[[], None] = lambda: None) -> None:
        self._call = call
        self._before_copy = before_copy

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script, which compiles a module's hooks, cannot compile safe_rope's, which keep FP32 "
            "readers away from weights in the autocast dtype. Call safe_rope.initialize(..., "
            "low_precision_gather=False), which needs none at ZeRO 1 and 2, or torch.jit.trace"
        )

    def __reduce__(self) -> Any:
        self._before_copy()
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing


def _modules(model: nn.Module) -> _Modules:
    """All of ``model``; none is what takes the address of a part that is gone."""
    modules: _Modules = ByIdentity()
    modules.update((module, None) for module in model.modules())
    return modules


def _parts_with_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are hooked: ``model``, and what holds parameters. TorchScript takes no hooks."""
    for module in model.modules():
        holds = module is model or next(module.parameters(), None) is not None
        if holds and not isinstance(module, torch.jit.ScriptModule):
            yield module


def _is_low(device: str, dtype: torch.dtype) -> bool:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype


def _is_outermost(module: nn.Module, model: nn.Module, ours: _Modules) -> bool:
    """Whether this call of ``module`` is part of no other of ``ours``.

    What runs within a forward may leave autocast: that the weights which it reads there are exact is what
    makes others safe. A forward may call its parts, but not the whole ``model``, in other threads. A call of
    the engine is none of ``ours``: what it calls is the model.
    """
    around = (one for one in calls_of_modules(sys._getframe(1)) if one in ours)
    nearest = next(around, None)
    if nearest is module:
        nearest = next(around, None)
    if nearest is not None or module is model:
        return nearest is None
    others = (top for thread, top in running_frames().items() if thread != threading.get_ident())
    return not any(one in ours for top in others for one in calls_of_modules(top))


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
