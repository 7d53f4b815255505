"""The dtype that a tensor would have had without the guard, followed until it becomes a parameter.

A truthful constructor returns FP32 where zero.Init would have returned BF16. A buffer should stay so; a
parameter must not, or partitions, memory and optimizer groups change. So such a tensor is marked with its
*shadow dtype*. A torch function mode applies torch's rules of type promotion to the shadow dtypes of every
operation with a marked input. It marks the outputs whose dtype comes out different, and ``nn.Parameter``
casts marked data once.

The mode applies the rules, and does not run the operation on meta tensors. On first use torch imports the
Python code of its meta kernels, and that import fails while zero.Init has ``torch.Tensor.__new__`` replaced.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_rope._base.promotion import promoted, run_promoted
from safe_rope._base.replaced import Replaced
from safe_rope._base.tensors import tensors_in
from safe_rope._base.torch_private import SET_DATA, put_function_modes, stays_at_bottom, take_function_modes
from safe_rope.constructors import _surroundings

# Keyed by identity, beside the tensors: an attribute would be pickled, deep-copied and saved with them.
_marks: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype]] = {}

_LIKE_FIRST = {
    torch.Tensor.__deepcopy__,
    torch.Tensor.view_as,
    torch.Tensor.expand_as,
    torch.Tensor.reshape_as,
}
_CONVERSIONS = {
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
}


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


def has_marks() -> bool:
    """Whether any tensor would have had another dtype."""
    return bool(_marks)


class _ShadowMode(TorchFunctionMode):
    """Passes every operation through; marks the outputs of those with marked inputs."""

    users = 0
    enabled = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        defaulted = _surroundings.thread.outer_default is not None
        if not (self.enabled and _surroundings.thread.follow and (_marks or defaulted)):
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        if not defaulted and not any(id(tensor) in _marks for tensor in inputs):
            return func(*args, **kwargs)
        if func == SET_DATA:
            return _set_data(func, *args)
        result = run_promoted(func, args, kwargs)
        if func in _CONVERSIONS and result is args[0]:
            # Nothing to convert here, but without the guard this would be another tensor of another dtype.
            result = result.view_as(result)
        known = {id(tensor) for tensor in inputs}  # an in-place result keeps the mark it has
        for output in tensors_in(result):
            if output.is_floating_point() and id(output) not in known:
                mark(output, _output_shadow(func, args, kwargs, inputs, output.dtype))
        return result


def _set_data(func: Callable[..., Any], tensor: torch.Tensor, value: Any) -> Any:
    shadow = shadow_dtype(value) if isinstance(value, torch.Tensor) else None
    if shadow is not None and isinstance(tensor, torch.nn.Parameter):
        return func(tensor, value.to(shadow))
    result = func(tensor, value)
    mark(tensor, shadow)
    return result


def _output_shadow(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    actual: torch.dtype,
) -> torch.dtype:
    """Return the dtype that an output of dtype ``actual`` would have had."""
    if func in _LIKE_FIRST:
        return _dtype_without_guard(inputs[0])
    if func in _CONVERSIONS and (len(inputs) > 1 or not _keeps_dtype(func, args, kwargs)):
        return _dtype_without_guard(inputs[1]) if len(inputs) > 1 else actual
    if any(_is_array(value) for value in args):
        return actual  # it brings its own
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return actual
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    if not floating:
        outer = _surroundings.thread.outer_default
        return outer if outer is not None and actual == torch.get_default_dtype() else actual
    # As in type promotion, 0-dimensional tensors count only where there is no other.
    floating = [tensor for tensor in floating if tensor.dim() > 0] or floating
    if actual != promoted([tensor.dtype for tensor in floating]):
        return actual  # autocast, or an operation with a rule of its own
    return promoted([_dtype_without_guard(tensor) for tensor in floating]) or actual


def _is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's, and not one of its numbers, which are Python's to torch."""
    return hasattr(value, "dtype") and not isinstance(value, torch.Tensor) and hasattr(value, "__setitem__")


def _dtype_without_guard(tensor: torch.Tensor) -> torch.dtype:
    return shadow_dtype(tensor) or tensor.dtype


def _keeps_dtype(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a conversion of one tensor names a device and no dtype."""
    if func != torch.Tensor.to:
        return False
    return not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))


# ---- where tracking is on ------------------------------------------------------------------------------


class _ThreadMode(threading.local):
    mode: _ShadowMode | None = None


_thread = _ThreadMode()
_lock = threading.RLock()
_scopes = 0
_replaced = Replaced()


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
            _wrap_set_and_swap()
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
            _replaced.put_back()


def tracking() -> bool:
    """Whether this thread tracks shadow dtypes."""
    return _thread.mode is not None and _thread.mode.enabled


def tidy() -> None:
    """Take a mode that another thread has stopped off this thread's stack."""
    mode = _thread.mode
    if mode is not None and not mode.enabled and _take_off_stack(mode):
        _thread.mode = None


def _put_on_stack(mode: _ShadowMode) -> None:
    # At the bottom, so that whoever leaves a mode of theirs pops theirs and not this one. Only the mode of
    # torch.set_default_device insists on being below everything; that of `with torch.device(...)` does not.
    modes = take_function_modes()
    at = 1 if modes and stays_at_bottom(modes[0]) else 0
    put_function_modes([*modes[:at], mode, *modes[at:]])


def _take_off_stack(mode: _ShadowMode) -> bool:
    modes = take_function_modes()
    put_function_modes([other for other in modes if other is not mode])
    return any(other is mode for other in modes)


# ---- nn.Parameter, set_ and swap_tensors ---------------------------------------------------------------


def _wrap_parameter() -> None:
    inner = torch.nn.Parameter.__new__

    @functools.wraps(inner)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_cast(args[0]), *args[1:])
        elif "data" in kwargs:
            kwargs["data"] = _cast(kwargs["data"])
        return inner(cls, *args, **kwargs)

    # A wrapper that somebody puts around ours stays; ours then finds no marks and passes everything through.
    _replaced.put(torch.nn.Parameter, "__new__", staticmethod(new))


def _wrap_set_and_swap() -> None:
    """Let tensors be set to others and swapped that may be without a guard; no mode is told of either."""
    inner, set_ = torch.utils.swap_tensors, torch.Tensor.set_

    @functools.wraps(set_)
    def set_data(tensor: torch.Tensor, *source: Any, **kwargs: Any) -> torch.Tensor:
        if len(source) == 1 and not kwargs and isinstance(source[0], torch.Tensor):
            is_refused = source[0].dtype != tensor.dtype
            if is_refused and _dtype_without_guard(source[0]) == _dtype_without_guard(tensor):
                _set_data(SET_DATA, tensor, source[0])
                return tensor
        return set_(tensor, *source, **kwargs)

    @functools.wraps(inner)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        shadows = [shadow_dtype(one) for one in (t2, t1)]
        for one in (t1, t2):
            mark(one, None)  # torch swaps nothing that a weak reference leads to
        try:
            inner(t1, t2)  # type: ignore[no-untyped-call]
        except BaseException:
            shadows.reverse()
            raise
        finally:
            for one, shadow in zip((t1, t2), shadows, strict=True):
                mark(one, shadow)

    _replaced.put(torch.utils, "swap_tensors", swap_tensors)
    _replaced.put(torch.Tensor, "set_", set_data)


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
