"""The dtype that a tensor would have had without the guard, followed until it becomes a parameter.

A truthful constructor returns FP32 where zero.Init would have returned BF16. A buffer should stay so; a
parameter must not, or partitions, memory and optimizer groups change. So such a tensor is marked with its
*shadow dtype*. A torch function mode replays every operation that has a marked input on meta tensors of the
shadow dtypes, marks the outputs whose dtype comes out different, and ``nn.Parameter`` casts marked data once.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from safe_rope import _pristine

logger = logging.getLogger(__name__)

# Keyed by identity, beside the tensors: an attribute would be pickled, deep-copied and saved with them.
_marks: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype]] = {}

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME_DTYPE = (torch.Tensor.__deepcopy__, torch.Tensor.cpu, torch.Tensor.cuda)
_DEVICE_NAME = re.compile(r"(cpu|cuda|xpu|mps|npu|hpu|mlu|ipu|xla)(:\d+)?")


def mark(tensor: torch.Tensor, shadow: torch.dtype | None) -> None:
    """Note that ``tensor`` would have had the dtype ``shadow``; None or its own dtype takes the mark off."""
    key = id(tensor)
    if shadow is None or shadow == tensor.dtype:
        _marks.pop(key, None)
    else:
        _marks[key] = (weakref.ref(tensor, lambda _: _marks.pop(key, None)), shadow)


def shadow_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype ``tensor`` would have had, None if that is the one it has."""
    entry = _marks.get(id(tensor))
    if entry is None or entry[0]() is not tensor or entry[1] == tensor.dtype:
        return None
    return entry[1]


class _ShadowMode(TorchFunctionMode):
    """Passes every operation through; marks the outputs of those with marked inputs."""

    users = 0
    enabled = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        defaulted = _pristine.thread.outer_default is not None
        if not self.enabled or not (_marks or defaulted):
            return func(*args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        if not defaulted and not any(id(tensor) in _marks for tensor in inputs):
            return func(*args, **kwargs)
        if func == _SET_DATA:
            return _set_data(func, *args)
        result = func(*args, **kwargs)
        try:
            _mark_outputs(func, args, kwargs, inputs, result)
        except Exception:
            logger.debug("no shadow dtype for the result of %s", func, exc_info=True)
        return result


def _set_data(func: Callable[..., Any], tensor: torch.Tensor, value: Any) -> Any:
    shadow = shadow_dtype(value) if isinstance(value, torch.Tensor) else None
    if shadow is not None and isinstance(tensor, torch.nn.Parameter):
        return func(tensor, value.to(shadow))
    result = func(tensor, value)
    mark(tensor, shadow)
    return result


def _mark_outputs(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor], result: Any
) -> None:
    outputs = list(_tensors(result))
    known = {id(tensor) for tensor in inputs}  # an in-place result keeps the mark it has
    fresh = [i for i, tensor in enumerate(outputs) if tensor.is_floating_point() and id(tensor) not in known]
    if not fresh:
        return
    if func in _SAME_DTYPE:
        mark(outputs[0], shadow_dtype(args[0]))
        return
    try:
        replayed = list(_tensors(_replay(func, args, kwargs)))
        shadows = [replayed[i].dtype for i in fresh]
    except Exception:
        shadows = _promoted(args, kwargs, inputs, [outputs[i].dtype for i in fresh])
    for i, shadow in zip(fresh, shadows, strict=True):
        mark(outputs[i], shadow)


def _replay(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("meta"))
        outer = _pristine.thread.outer_default
        if outer is not None:
            stack.enter_context(_default_dtype(outer))
        return func(*_on_meta(args), **_on_meta(kwargs))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = shadow_dtype(value) or value.dtype
        return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device="meta")
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE_NAME.fullmatch(value)):
        return torch.device("meta")
    if type(value) in (list, tuple):
        return type(value)(_on_meta(item) for item in value)
    if type(value) is dict:
        return {key: _on_meta(item) for key, item in value.items()}
    return value


def _promoted(
    args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor], actual: list[torch.dtype]
) -> list[torch.dtype]:
    """Type promotion of the shadow dtypes, for an operation that meta tensors cannot do."""
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    if not floating or any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return actual
    real = functools.reduce(torch.promote_types, [tensor.dtype for tensor in floating])
    shadow = functools.reduce(torch.promote_types, [shadow_dtype(t) or t.dtype for t in floating])
    return [shadow if dtype == real else dtype for dtype in actual]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


# ---- where tracking is on ------------------------------------------------------------------------------


class _ThreadMode(threading.local):
    mode: _ShadowMode | None = None


_thread = _ThreadMode()
_lock = threading.RLock()
_scopes = 0
_parameter_new: tuple[Any, Any] | None = None  # (the staticmethod that was there, ours)


def start() -> _ShadowMode:
    """Track shadow dtypes in this thread; give the result to `stop`. Nests."""
    global _scopes
    with _lock:
        mode = _thread.mode
        if mode is None or not mode.enabled:
            if mode is not None:
                _take_off_stack(mode)
            mode = _ShadowMode()
            _put_on_stack(mode)
            _thread.mode = mode
        mode.users += 1
        _scopes += 1
        if _scopes == 1:
            _wrap_parameter()
        return mode


def stop(mode: _ShadowMode) -> None:
    """Undo one `start`. Called from another thread, the mode stays on that thread's stack, without effect."""
    global _scopes
    with _lock:
        mode.users -= 1
        _scopes -= 1
        if mode.users == 0:
            mode.enabled = False
            if _take_off_stack(mode) and _thread.mode is mode:
                _thread.mode = None
        if _scopes == 0:
            _marks.clear()
            _unwrap_parameter()


def tracking() -> bool:
    """Whether this thread tracks shadow dtypes."""
    return _thread.mode is not None and _thread.mode.enabled


def tidy() -> None:
    """Take a mode that another thread has stopped off this thread's stack."""
    mode = _thread.mode
    if mode is not None and not mode.enabled and _take_off_stack(mode):
        _thread.mode = None


def _put_on_stack(mode: _ShadowMode) -> None:
    # At the bottom, so that whoever leaves a mode of theirs pops theirs and not this one. A torch.device
    # context insists on the very bottom where torch places it there itself.
    modes = _pop_all()
    at = 1 if modes and isinstance(modes[0], DeviceContext) and hasattr(modes[0], "prev_mode") else 0
    _push_all([*modes[:at], mode, *modes[at:]])


def _take_off_stack(mode: _ShadowMode) -> bool:
    modes = _pop_all()
    _push_all([other for other in modes if other is not mode])
    return any(other is mode for other in modes)


def _pop_all() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]


def _push_all(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


# ---- nn.Parameter --------------------------------------------------------------------------------------


def _wrap_parameter() -> None:
    global _parameter_new
    inner = torch.nn.Parameter.__new__

    @functools.wraps(inner)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_cast(args[0]), *args[1:])
        elif "data" in kwargs:
            kwargs["data"] = _cast(kwargs["data"])
        return inner(cls, *args, **kwargs)

    _parameter_new = (torch.nn.Parameter.__dict__["__new__"], staticmethod(new))
    torch.nn.Parameter.__new__ = _parameter_new[1]  # type: ignore[method-assign]


def _unwrap_parameter() -> None:
    global _parameter_new
    if _parameter_new is None:
        return
    before, ours = _parameter_new
    _parameter_new = None
    # A wrapper that somebody put around ours stays; ours then finds no marks and passes everything through.
    if torch.nn.Parameter.__dict__["__new__"] is ours:
        torch.nn.Parameter.__new__ = before  # type: ignore[method-assign]


def _cast(data: Any) -> Any:
    shadow = shadow_dtype(data) if isinstance(data, torch.Tensor) else None
    if shadow is None:
        return data
    try:
        # In place, as DeepSpeed does it: the parameter and the caller's tensor keep sharing their storage.
        data.data = data.data.to(shadow)
    except RuntimeError:
        return data.detach().to(shadow)
    mark(data, None)
    return data
