"""The wrapper that goes around one of DeepSpeed's constructors, and a set of them for one open Init."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from safe_rope._base.replaced import Replaced
from safe_rope._base.torch_private import TRUE_CONSTRUCTORS, TRUE_NEW
from safe_rope.constructors import _shadow, _surroundings

logger = logging.getLogger(__name__)

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""The functions of ``torch`` that zero.Init replaces, besides ``torch.Tensor.__new__``; OnDevice, four."""


class _ThreadState(threading.local):
    unguarded: int = 0


_thread = _ThreadState()
_live: dict[str, Callable[..., Any]] = {}
"""Our wrappers that stand in torch now, by the names of what they replace."""


def is_deepspeeds(scope: dict[str, Any]) -> bool:
    """Whether code with these globals is DeepSpeed's."""
    name = scope.get("__name__")
    return isinstance(name, str) and name.startswith("deepspeed.")


class Target(NamedTuple):
    """A constructor to wrap: the attribute ``name`` of ``owner``, and what honours a dtype in its place."""

    owner: Any
    name: str
    plain: Callable[..., Any]


def new_tensor(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """``torch.Tensor(...)`` with a dtype: plain torch takes none, zero.Init's does, as ``new_empty``."""
    like: torch.Tensor = TRUE_CONSTRUCTORS.empty(0, device=device)
    return like.new_empty(*(args or (0,)), **kwargs)


class _Policy(NamedTuple):
    """What the function under ours does to a floating result."""

    dtype: torch.dtype
    device: torch.device | None


class Lowering(NamedTuple):
    """What becomes of tensors that are made without a dtype; None for what nothing changes.

    ``spared`` names the constructors that are left alone.
    """

    dtype: torch.dtype | None = None
    spared: tuple[str, ...] = ()
    device: str | None = None


NOT_LOWERED = Lowering()


class _DeviceProbe(TorchFunctionMode):
    """Sees which device the function under ours asks torch for, before any ambient device takes part."""

    device: torch.device | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            self.device = torch.device(kwargs["device"])
        elif getattr(func, "__name__", None) in CONSTRUCTORS:
            kwargs["device"] = torch.device("cpu")  # never meta: see _shadow on importing its kernels here
        return func(*args, **kwargs)


def _learn(inner: Callable[..., Any], name: str) -> _Policy | None:
    """Ask ``inner`` for empty FP32 and FP16 tensors; None if it lowers nothing or does not understand."""
    samples: dict[str, Any] = {"tensor": ([],), "full": ((0,), 0.0), "__new__": (torch.Tensor, 0)}
    sample = samples.get(name, (0,))
    try:
        with torch.no_grad(), _DeviceProbe() as probe:
            single, half = (inner(*sample, dtype=dtype) for dtype in (torch.float32, torch.float16))
    except Exception:  # what stands there may refuse such a call in any way
        logger.debug("cannot learn what %r does to a dtype; leaving it as it is", inner, exc_info=True)
        return None
    return _Policy(single.dtype, probe.device) if single.dtype == half.dtype else None


def _requested(dtype: Any) -> torch.dtype | None:
    """Return an explicitly requested floating dtype, None for everything else."""
    if dtype is float:
        return torch.float64
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _asks_for_another(policy: _Policy | None, kwargs: dict[str, Any]) -> TypeGuard[_Policy]:
    """Whether a call asks for another floating dtype than what stands under ours gives."""
    out = kwargs.get("out")
    # The dtype of an ``out`` was asked for when that was made.
    dtype = _requested(out.dtype if isinstance(out, torch.Tensor) else kwargs.get("dtype"))
    return policy is not None and dtype not in (None, policy.dtype)


def _as_asked(plain: Callable[..., Any], policy: _Policy, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Call what honours a dtype, on the device where what stands under ours puts its results."""
    if policy.device is not None and kwargs.get("out") is None and kwargs.get("device") is None:
        kwargs["device"] = policy.device
    result: torch.Tensor = plain(*args, **kwargs)
    return result


class Session:
    """Our wrappers around DeepSpeed's constructors, for as long as an Init or OnDevice has them in place."""

    def __init__(self) -> None:
        self.live = True
        self.truthful = False
        self._policies: dict[str, _Policy] = {}
        self._installed = Replaced()
        self._modes: list[Any] = []

    def install(self, targets: list[Target]) -> None:
        """Put ours around every target; all of them or none."""
        _surroundings.remember_device_constructors(name for owner, name, _ in targets if owner is torch)
        try:
            for owner, name, plain in targets:
                ours = self._wrap(name, getattr(owner, name), plain)
                self._installed.put(owner, name, ours)
                _live[name] = ours
            self._install_lazy_parameter()
        except BaseException:
            self.remove()
            raise

    def lowering(self) -> Lowering:
        """Return what the constructors under ours do to a tensor."""
        policy = next(iter(self._policies.values()), None)
        if policy is None:
            return NOT_LOWERED
        spared = tuple(name for name in CONSTRUCTORS if name not in self._policies)
        return Lowering(policy.dtype, spared, policy.device.type if policy.device is not None else None)

    def track(self) -> None:
        """Follow shadow dtypes in the thread that calls."""
        if not _shadow.tracking():
            self._modes.append(_shadow.start())

    def remove(self) -> None:
        """Put back what ours covers."""
        self.live = False
        _live.clear()
        self._installed.put_back()
        while self._modes:
            _shadow.stop(self._modes.pop())

    def _wrap(self, name: str, inner: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        true = TRUE_NEW if name == "__new__" else getattr(TRUE_CONSTRUCTORS, name)
        learned = _learn(inner, name)
        if learned is not None:
            self._policies[name] = learned

        @functools.wraps(inner)
        def constructor(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return imported(*args, **kwargs)
            if _thread.unguarded or _called_by_deepspeed():
                return inner(*args, **kwargs)
            policy, out = learned, kwargs.get("out")
            if _surroundings.thread.depth:
                result = true(*args, **kwargs)
                if (
                    policy is not None
                    and out is None
                    and _surroundings.thread.follow
                    and result.is_floating_point()
                ):
                    _shadow.mark(result, policy.dtype)
                return result
            if not self.truthful or not _asks_for_another(policy, kwargs):
                return inner(*args, **kwargs)
            result = _as_asked(plain, policy, args, kwargs)
            _shadow.mark(result, policy.dtype)
            return result

        def imported(*args: Any, **kwargs: Any) -> Any:
            # A file that was imported in the session has bound this name for good.
            if _surroundings.thread.depth:
                return true(*args, **kwargs)
            if name in _live and _live[name] is not constructor:
                return _live[name](*args, **kwargs)
            is_over = (torch.Tensor.__new__ if name == "__new__" else getattr(torch, name)) is true
            if is_over and _asks_for_another(learned, kwargs):
                return _as_asked(plain, learned, args, kwargs)
            return inner(*args, **kwargs)

        return constructor

    def _install_lazy_parameter(self) -> None:
        # Its constructor makes its own data, so there is none to cast: leave that to zero.Init.
        inner = torch.nn.UninitializedParameter.__new__

        @functools.wraps(inner)
        def new(*args: Any, **kwargs: Any) -> Any:
            _thread.unguarded += 1
            try:
                return inner(*args, **kwargs)
            finally:
                _thread.unguarded -= 1

        self._installed.put(torch.nn.UninitializedParameter, "__new__", staticmethod(new))


def _called_by_deepspeed() -> bool:
    # DeepSpeed partitions with torch.empty(n, dtype=param.dtype) and relies on getting its own dtype back.
    return is_deepspeeds(sys._getframe(2).f_globals)
