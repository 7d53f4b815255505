"""The conditions that a constructor ran under, and how to run it under the same again."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from safe_rope import constructors
from safe_rope._base import torch_private
from safe_rope._base.dtypes import LOW
from safe_rope._base.methods import constructing, named_in, reached_by_forward
from safe_rope._base.promotion import run_promoted
from safe_rope.constructors._default_dtype import default_dtype


class Conditions(NamedTuple):
    """What a constructor ran under: the default dtype, and what lowered the tensors that it made.

    ``lowered`` is zero.Init's dtype, None outside of it. With ``truthful`` a constructor that was called with
    a dtype gave that dtype, as a guard has it. ``spared`` names those that something left alone. ``device``
    is where tensors were made that asked for none. ``imported``: its file holds constructors of an Init that
    has ended, which have lowered what they made.
    """

    default: torch.dtype = torch.float32
    lowered: torch.dtype | None = None
    truthful: bool = True
    spared: tuple[str, ...] = ()
    device: str = "cpu"
    imported: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing was in the way: what the constructor made is what its authors meant."""
        lowered = self.lowered is not None or self.imported
        return self.default not in LOW and not lowered and self.device == "cpu"

    def variants(self) -> Iterator[Conditions]:
        """Yield the conditions that cannot be told from these: transformers keeps zero.Init off arange."""
        yield self
        if self.lowered is not None:
            yield self._replace(spared=(*self.spared, "arange"))

    @classmethod
    def now(cls, module_class: type) -> Conditions:
        """Return what a constructor of ``module_class`` runs under now in this thread, with a guard open."""
        lowered, spared, device = constructors.lowering()
        device = device or torch_private.default_device_type()
        # `has_lowered`; each module that is built asks.
        imported = hasattr(torch.Tensor, constructors.LEFT) and _imports_lowering(module_class, constructing)
        return cls(torch.get_default_dtype(), lowered, True, spared, device, imported)

    @classmethod
    def usual(cls) -> Iterator[Conditions]:
        """Yield the conditions under which models are built that are damaged."""
        for low in LOW:
            yield cls(low)
            for default, spared in itertools.product((low, torch.float32), ((), ("arange",))):
                yield cls(default, low, False, spared)


def forward_lowers(cls: type) -> bool:
    """Whether the forward of a class calls constructors that an Init has left in its file."""
    return constructors.has_lowered() and _imports_lowering(cls, reached_by_forward)


@functools.lru_cache(maxsize=4096)
def _imports_lowering(cls: type, reached: Callable[[type], Iterable[FunctionType]]) -> bool:
    return any(constructors.is_lowering(one) for function in reached(cls) for one in named_in(function))


class _Lowering(TorchFunctionMode):
    """Does what zero.Init's constructors do, for one thread and with no global replaced."""

    def __init__(self, conditions: Conditions, device: torch.device | None) -> None:
        super().__init__()
        self.conditions = conditions
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        lowers = name in constructors.CONSTRUCTORS and name not in self.conditions.spared
        if lowers and self.device is not None and kwargs.get("device") is None and "out" not in kwargs:
            kwargs["device"] = self.device
        result = run_promoted(func, args, kwargs) if self.conditions.truthful else func(*args, **kwargs)
        if not lowers:
            return result
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        if self.conditions.truthful and kwargs.get("dtype") is not None:
            return result
        return result.to(self.conditions.lowered)


@contextlib.contextmanager
def replaying(conditions: Conditions, device: torch.device | None = None) -> Iterator[None]:
    """Do to what is made inside what the conditions did; on ``device``, where they made it there."""
    with default_dtype(conditions.default):
        if conditions.lowered is not None:
            with torch_private.PythonOfCompiled(), _Lowering(conditions, device):
                yield
        else:
            with contextlib.nullcontext() if device is None else device:
                yield
