"""Apply the rotary embedding to q and k in FP32, with one rounding at the end.

The tables that a protected module returns are `CosSin` tensors (`safe_rope.rotation._cos_sin`), which the
application function recognises. So an unprotected model, whose tables are plain tensors, gets the stock
function's result to the bit. A protected one is rotated in FP32 wherever its tables travel: ZeRO-3's module
hooks, activation checkpointing, accelerate's moves, FSDP's input casts, compiled regions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from safe_rope._base import instructions
from safe_rope._base.dtypes import LOW
from safe_rope._base.functions import signature_of
from safe_rope._base.positions import check_arguments
from safe_rope.rotation._bodies import Body
from safe_rope.rotation._checks import fault_of_states, fault_of_tables
from safe_rope.rotation._cos_sin import CosSin, plain
from safe_rope.rotation._marks import exact, is_dtype_the_mark, is_marked, marked
from safe_rope.rotation._plain_code import TRUSTED, Helper, helpers_of
from safe_rope.rotation._samples import can_sample, recognise, returns_low
from safe_rope.rotation.kernels import Form, rotate, rotate_

__all__ = ["CosSin", "apply_rotary", "fp32_application", "is_marked", "marked", "plain", "round_results"]

logger = logging.getLogger(__name__)


Layout = Literal["half", "interleaved"]
_RECOGNISED = "_safe_rope_recognised"


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: Layout = "half",
    unsqueeze_dim: int = 1,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in FP32 and round once to their own dtype.

    The same bits, forward and backward, from the eager, the compiled and the Triton implementation (see
    `safe_rope.rotation.kernels`). Differentiable in q and k any number of times, and under `torch.func`.

    Args:
        q: bfloat16, float16 or float32, [..., head_dim], e.g. [batch, heads, length, head_dim]. Elements
            from rotary_dim on pass through untouched.
        k: as q; it may have fewer heads.
        cos: FP32, as `RotaryTable.lookup` returns them: [..., rotary_dim // 2], e.g. [batch or 1,
            length, rotary_dim // 2]; or as a protected module returns them, rotary_dim wide. No gradient.
        sin: as cos.
        layout: ``"half"`` pairs element i with i + rotary_dim / 2, ``"interleaved"`` 2i with 2i + 1.
        unsqueeze_dim: where the heads' dimension goes into cos and sin: 1 for [batch, heads, length, ...],
            2 for [batch, length, heads, ...].
        inplace: write into q and k and return them: no memory is taken, and forward there is less to move.

    Returns:
        q and k rotated.

    Raises:
        TypeError: a dtype is not one of those above, or layout is unknown.
        ValueError: shapes or devices do not fit, or cos or sin requires a gradient.
        RuntimeError: inplace, and autograd does not allow it (a leaf that requires grad).
    """
    if layout not in ("half", "interleaved"):
        raise TypeError(f'layout must be "half" or "interleaved", got {layout!r}')
    # A protected module's tables have a column for each element, all others one for each pair.
    form = Form(layout, layout, layout if is_marked(cos) and is_marked(sin) else "shared")
    cos, sin = plain(exact(cos)), plain(exact(sin))
    fault = fault_of_tables(cos, sin, unsqueeze_dim)
    if fault is None:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        fault = fault_of_states("q", q, cos, form) or fault_of_states("k", k, cos, form)
    if fault is not None:
        raise fault
    if inplace:
        return rotate_(q, cos, sin, form), rotate_(k, cos, sin, form)
    rotated_q, rotated_k = rotate((q, k), cos, sin, form)
    return rotated_q, rotated_k


def fp32_application(
    stock: Callable[..., Any], *, trusted: bool = False, of_class: bool = False
) -> Callable[..., Any]:
    """Wrap an architecture's application function so that it rotates protected tables in FP32.

    Called with plain tensors only, it returns the stock function's result. Called with `CosSin` tables, it
    raises every floating argument of lower precision to FP32 (exact) and runs the stock function with
    autocast off. Each result is rounded once to the dtype of the argument that it was made from. A function
    that `safe_rope.rotation._samples` has recognised is not run at all then: a kernel gives the same bits.
    One whose code does more than compute runs as in stock, on tables rounded once, unless it is ``trusted``.
    The first argument of a method ``of_class`` is the class.

    Raises:
        TypeError: the function chooses rows by position_ids (before transformers 4.48), and those are no
            integers.
    """
    chooses_rows = _chooses_rows(stock)
    recognised = _Recognised(stock, trusted, of_class)
    recognised.try_now()

    @functools.wraps(stock)
    def application(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for place, name, value in recognised.helpers:
                if place.get(name) is not value:
                    recognised.try_again()
                    break
            if recognised.body is not None and not kwargs:
                again = recognised.body.again(args)
                if again is not None:
                    return again
        values = (*args, *kwargs.values())
        by_dtype = is_dtype_the_mark() and _has_lower_than_fp32(values)
        if not by_dtype and not any(is_marked(value) for value in values):
            return stock(*args, **kwargs)
        if chooses_rows is not None:
            ids: Any = kwargs.get("position_ids") if chooses_rows >= len(args) else args[chooses_rows]
            check_arguments(ids, torch.float32)
        if not recognised.tried and not torch.compiler.is_compiling():
            recognised.try_now()
        if recognised.body is not None:
            fast = recognised.body.rotate(args, kwargs)
            if fast is not None:
                return fast
        dtypes = [v.dtype for v in values if _is_rotated(v) and not (by_dtype and v.dtype not in LOW)]
        may_be_raised = bool(dtypes) and (
            recognised.is_known or (recognised.computes and not any(map(callable, values[of_class:])))
        )
        if not may_be_raised and any(map(is_marked, values)):
            return stock(*map(_as_stock, args), **{name: _as_stock(v) for name, v in kwargs.items()})
        args = tuple(_raise(value) for value in args)
        kwargs = {name: _raise(value) for name, value in kwargs.items()}
        device = next(v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        with without_autocast(device):
            return round_results(stock(*args, **kwargs), dtypes)

    vars(application)[_RECOGNISED] = recognised
    return application


def runs_as_stock(application: Callable[..., Any]) -> bool:
    """Whether what `fp32_application` returned is known to run as in stock, on tables rounded once."""
    recognised: _Recognised = vars(application)[_RECOGNISED]
    is_raised = recognised.body is not None or recognised.is_known or recognised.computes
    return recognised.tried and not is_raised


class _Found(NamedTuple):
    """What plain code was found to compute, with these helpers and defaults."""

    told_from: tuple[Any, ...]
    body: Body | None
    computes: bool


_found: weakref.WeakKeyDictionary[types.CodeType, _Found] = weakref.WeakKeyDictionary()
"""By code: a guard makes another function of the same code for each model."""


class _Recognised:
    """What is known of a function; it is tried when first there is an occasion to, and once."""

    def __init__(self, stock: Callable[..., Any], trusted: bool, of_class: bool) -> None:
        self.stock, self.trusted, self.of_class = stock, trusted, of_class
        self.tried = False
        self.body: Body | None = None
        self.helpers: list[Helper] = []
        self.is_known = trusted or str(getattr(stock, "__module__", None)).startswith(TRUSTED)
        self.computes = True
        """Whether it does no more, so that it can be run on what is raised to FP32."""

    def try_now(self) -> None:
        if not can_sample():
            return
        self.tried = True
        helpers = helpers_of(self.stock)
        self.helpers = helpers or []
        told_from = None if helpers is None else _told_from(self.stock, helpers)
        found = None if told_from is None else _found.get(self.stock.__code__)
        if found is None or found.told_from != told_from:
            found = _Found(told_from or (), *self._try(computes=helpers is not None))
            if told_from is not None:
                _found[self.stock.__code__] = found
        self.body = found.body
        self.computes = found.computes and not (self.of_class and _reads_its_class(self.stock))
        logger.debug("%s: %s", getattr(self.stock, "__qualname__", self.stock), self.body)

    def _try(self, *, computes: bool) -> tuple[Body | None, bool]:
        body = recognise(self.stock, trusted=self.trusted or computes)
        if body is not None and not returns_low(self.stock, body):
            return None, False
        return body, computes

    def try_again(self) -> None:
        """Look at the function anew: somebody has replaced what it calls."""
        self.body = None
        self.try_now()


def _reads_its_class(method: Any) -> bool:
    """Whether the code of a class method asks the class for anything."""
    code: types.CodeType = method.__code__
    steps = (step for one in instructions.codes(code) for step in instructions.steps(one))
    return any(step.loads in (code.co_varnames[0], "__class__") for step in steps)


def _told_from(function: Any, helpers: list[Helper]) -> tuple[Any, ...] | None:
    """Return what, with its code, decides what a plain function computes; None where that is not known."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if function.__closure__ or not all(type(one) in (int, bool, type(None)) for one in defaults):
        return None
    return defaults, tuple((weakref.ref(helper), helper.__code__) for _, _, helper in helpers)


def _as_stock(value: Any) -> Any:
    """Return a table in the dtype that it has in the stock model."""
    return plain(value).to(value.nominal or value.dtype) if isinstance(value, CosSin) else value


def _chooses_rows(stock: Callable[..., Any]) -> int | None:
    """Return where among the arguments of ``stock`` the position_ids are, if it needs any that are known."""
    try:
        parameters = list(signature_of(stock).parameters.values())
    except (TypeError, ValueError):  # of a compiled extension: nothing says what it takes
        return None
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return [p.name for p in parameters].index("position_ids") if "position_ids" in needed else None


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off for a type of device, where it is on."""
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _is_rotated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_marked(value) and value.is_floating_point()


def _has_lower_than_fp32(values: tuple[Any, ...]) -> bool:
    dtypes = [value.dtype for value in values if _is_rotated(value)]
    return torch.float32 in dtypes and any(dtype in LOW for dtype in dtypes)


def _raise(value: Any) -> Any:
    return value.to(torch.float32) if _is_rotated(value) and value.dtype in LOW else plain(exact(value))


def round_results(result: Any, dtypes: list[torch.dtype]) -> Any:
    """Round each of an application's results to the dtype of the argument that it was made from."""
    if not dtypes:
        return result
    if isinstance(result, torch.Tensor):
        return _rounded(result, dtypes[0])
    if isinstance(result, dict):
        return {name: _rounded(item, dtypes[0]) for name, item in result.items()}
    if not isinstance(result, (tuple, list)):
        return result
    # The functions return their rotated arguments in order; where they return more, the first dtype fits the
    # rest.
    padded = [*dtypes, *[dtypes[0]] * len(result)][: len(result)]  # Dynamo before torch 2.5 wants as many
    items = [_rounded(item, dtype) for item, dtype in zip(result, padded, strict=True)]
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


def _rounded(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item
