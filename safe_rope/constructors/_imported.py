"""Constructors of DeepSpeed's that a file has imported inside of a zero.Init or an OnDevice.

``from torch import arange`` binds for good what stands in torch then, and that lowers what it makes after
the Init has ended, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_rope.constructors._truthful import CONSTRUCTORS, is_deepspeeds

_NAME = "wrapped_fn"
"""What DeepSpeed calls each function that it puts in a constructor's place."""
LEFT = "__old_new__"
"""What DeepSpeed leaves on ``torch.Tensor`` from the first Init on."""


def has_lowered() -> bool:
    """Whether an Init or an OnDevice has ever been open in this process."""
    return hasattr(torch.Tensor, LEFT)


def is_lowering(value: Any) -> bool:
    """Whether a value is a function that DeepSpeed has put in a constructor's place."""
    return isinstance(value, FunctionType) and value.__name__ == _NAME and is_deepspeeds(value.__globals__)


@contextmanager
def as_imported_from_torch() -> Iterator[None]:
    """Let such functions make in this thread what torch's own make, on CPU."""
    if not has_lowered():
        yield
        return
    with _Unlowered():
        yield


class _Unlowered(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.to and _is_called_by_lowering(sys._getframe(1)):
            return args[0]
        if getattr(func, "__name__", None) in CONSTRUCTORS and _is_called_by_lowering(sys._getframe(1)):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_called_by_lowering(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of modes above this one
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _NAME and is_deepspeeds(frame.f_globals)
