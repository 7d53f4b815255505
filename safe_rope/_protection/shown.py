"""How a table of a protected module looks to code outside of it."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.methods import INITIALISING
from safe_rope._base.positions import is_watched
from safe_rope._base.text import class_name
from safe_rope._base.torch_private import constant_in_graphs, graphs_find_properties_again, is_wrapped
from safe_rope._recognition.arguments import first_argument
from safe_rope._recognition.holdings import get_table, is_inside
from safe_rope._recognition.tables import is_frequency
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation._cos_sin import CosSin
from safe_rope.rotation._marks import is_dtype_the_mark

STATE = "_safe_rope"
"""The attribute in which a protected module keeps its state."""
_MACHINERY = ("torch.", "deepspeed.", "accelerate.", "safetensors.")
"""What carries tensors about and computes nothing with them."""
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
"""Names of code that Python runs in a frame of its own within a function."""


class _ThreadState(threading.local):
    sees: Literal["exact", "as stock"] | None = None


_this_thread = _ThreadState()


class InGraphs:
    """What a graph in the making is to know; Dynamo reads nothing of a thread."""

    in_fp32 = False  # whether a module runs whose results are rounded afterwards


in_graphs = InGraphs()


@contextlib.contextmanager
def seen(how: Literal["exact", "as stock"]) -> Iterator[None]:
    """Let what this thread runs see plain tables of other modules: exact, or rounded as stock has them."""
    before, _this_thread.sees = _this_thread.sees, how
    try:
        yield
    finally:
        _this_thread.sees = before


def sees() -> Literal["exact", "as stock"] | None:
    """How the code that this thread runs sees the tables of other modules; None: marked."""
    return _this_thread.sees


class Shown(property):
    """A table as an attribute of a protected class: exact, and of the stock model's dtype where they meet.

    A property, since Dynamo before torch 2.8 follows no other descriptor that may be written to.
    """

    def __init__(self, name: str, see: Callable[[Any, str, Any], Any] | None = None) -> None:
        def get(module: Any) -> Any:
            attributes = module.__dict__  # Dynamo before torch 2.8 takes no ``vars`` of a module
            if torch.compiler.is_dynamo_compiling() and graphs_find_properties_again():
                attributes = _kept_attributes(module)
            for place in (attributes, module._buffers, module._parameters):
                if name in place:
                    return (see or _seen)(module, name, place[name])
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")

        def put(module: Any, value: Any) -> None:
            vars(module)[name] = value
            if (state := vars(module).get(STATE)) is not None:
                state.attributes[name] = value

        def delete(module: Any) -> None:
            if name not in vars(module):
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            del vars(module)[name]
            if (state := vars(module).get(STATE)) is not None:
                state.attributes.pop(name, None)

        super().__init__(get, put, delete)


def _kept_attributes(module: Any) -> dict[str, Any]:
    """Return what a module's own attributes hold, where to read them leads back to the property."""
    state = module.__dict__.get(STATE)
    return {} if state is None else state.attributes


def show(module: Any, name: str, see: Callable[[Any, str, Any], Any] | None = None) -> None:
    """Make what a protected module has under ``name`` a property of its class, if the stock one has none."""
    cls = type(module)
    if not (is_inside(name) or name in vars(cls) or hasattr(cls._safe_rope_stock, name)):
        setattr(cls, name, Shown(name, see))


def is_shown(module: Any, name: str) -> bool:
    """Whether what a protected module has under ``name`` is a property of its class."""
    return isinstance(vars(type(module)).get(name), Shown)


def seen_cache(module: Any, name: str, cache: Any) -> Any:
    """Return what a forward has made in FP32 and keeps, in the stock model's dtype for other code."""
    state = module.__dict__.get(STATE)
    if state is None or name not in state.caches or getattr(cache, "dtype", None) != torch.float32:
        return cache
    if torch.compiler.is_dynamo_compiling():
        is_own = state.runner.runs_in_graph
    else:
        frame = sys._getframe(2)
        is_own = first_argument(frame) is module or _is_from(frame, (*_MACHINERY, "safe_rope."))
    return cache if is_own else cache.to(state.caches[name][0])


def _seen(module: Any, name: str, table: Any) -> Any:
    if table is None:
        return None  # it is awaited
    if torch.compiler.is_compiling():
        return _seen_in_graph(module, name, table)
    state = vars(module).get(STATE)
    if state is None or type(table) is not torch.Tensor or name not in state.nominal:
        return table
    if not (state.is_in_place(name, table) or is_watched()):
        table = _put_back(module, name, table, sys._getframe(2))
        if type(table) is not torch.Tensor or name not in state.nominal:
            return table
    nominal, pin = state.nominal[name], getattr(state, "pins", {}).get(name)
    if pin is not None and table.dtype not in (pin.values.dtype, torch.float32):
        return table  # which the module's own code has just made
    is_plain = nominal == table.dtype and not (table.is_meta or _is_lowered(state, name, table))
    if table.dtype in LOW or is_plain:
        return table
    if _this_thread.sees is not None and not table.is_meta:
        return table if _this_thread.sees == "exact" else table.to(nominal)
    frame = sys._getframe(2)
    if _is_from(frame, _MACHINERY):
        return table
    phase = f"{class_name(type(module))}.{name}" if _is_turned(state, name) else None
    if is_wrapped(table):
        if phase is not None and nominal in LOW:
            warn_rounded(class_name(type(module)), name, nominal)
        return table.to(nominal)
    if frame.f_code.co_name in INITIALISING:
        return table.clone() if table.is_meta else table  # nothing is known of what is written on meta
    if table.is_meta:
        return CosSin(table, nominal)
    if not _is_code_of_a_module(frame, module):
        return CosSin(table, nominal) if nominal in LOW else table
    if nominal not in LOW and (nominal != table.dtype or first_argument(frame) is module):
        return table.to(nominal)
    # A module computes with it, and decides by its dtype what else it makes.
    return CosSin(table, nominal, faced=True, phase=phase)


def _seen_in_graph(module: Any, name: str, table: Any) -> Any:
    """Return frequencies as they are, and to other code a finished table in the stock model's dtype."""
    state = module.__dict__.get(STATE)  # Dynamo before torch 2.8 takes no ``vars`` of a module
    pin = getattr(state, "pins", {}).get(name)
    if pin is None or table.dtype != torch.float32 or table.requires_grad:
        return table
    if state.runner.shows_in_graph:
        return show_in_graph(state, name, table, state.runner.shows_in_graph)
    if state.runner.runs_in_graph:
        return table
    # torch.export runs Python.
    how = None if torch.compiler.is_dynamo_compiling() else _this_thread.sees
    nominal = state.nominal[name]
    if pin.finished if how is None else how == "as stock":
        return as_stock_in_graph(state, name, table)
    if how is not None or in_graphs.in_fp32 or nominal not in LOW:
        return table
    return CosSin(table, nominal, faced=True, phase=f"{class_name(type(module))}.{name}")


def show_in_graph(state: Any, name: str, table: torch.Tensor, how: str) -> torch.Tensor:
    """Return a table as a graph is to see it: "stock", "marked" or "rounded"."""
    if how == "marked":
        return state.marked.get(name, table)  # type: ignore[no-any-return]
    return table.to(state.nominal[name]) if how == "rounded" else as_stock_in_graph(state, name, table)


def as_stock_in_graph(state: Any, name: str, table: torch.Tensor) -> torch.Tensor:
    """Return a table in the stock dtype; what it cannot hold stays exact until it meets that.

    So do integers that choose rows, and what code may ask for in FP32.
    """
    nominal = state.nominal[name]
    if table.dtype == torch.float32 and nominal in LOW:
        is_counted = state.counts_further(name)
        if (is_counted or state.code.asks_for_fp32) and not is_dtype_the_mark():
            return CosSin(table, nominal, faced=True)
        if is_counted:
            _tell_of_counts(state.owner, name, nominal)
    return table.to(nominal)


@constant_in_graphs
def _tell_of_counts(owner: str, name: str, dtype: torch.dtype) -> bool:
    warnings.warn(
        f"{owner} keeps integers in {name} that {dtype} cannot hold; in a graph of torch {torch.__version__} "
        "they are rounded, as in the stock model. Call the module outside of torch.compile, or install "
        "torch 2.8 or newer",
        PrecisionWarning,
        stacklevel=2,
    )
    return True


def tell_once(notes: dict[str, str], what: str, note: str, text: str) -> None:
    """Warn of ``what``, once for a module, in whose notes it stands from then on."""
    if what not in notes:
        notes[what] = note
        warnings.warn(text, PrecisionWarning, stacklevel=3)


def warn_rounded(owner: str, name: str, dtype: torch.dtype) -> None:
    """Warn that frequencies are rounded for once, as in the stock model."""
    warnings.warn(
        f"{owner} computes from {name} with weights of {dtype}, in a graph or under a transformation, where "
        "nothing can follow its frequencies: they are rounded there, as in the stock model. Compute cos and "
        "sin in a module of their own",
        PrecisionWarning,
        stacklevel=2,
    )


def _put_back(module: Any, name: str, table: torch.Tensor, frame: Any) -> Any:
    """Return the table, put back where no call has seen yet what was done to it past the module's methods."""
    state = vars(module)[STATE]
    # What its own code reads it may have just made; to data that somebody has assigned it has not.
    is_foreign = state.has_other_memory(name, table) or first_argument(frame) is not module
    if not is_foreign or _is_from(frame, (*_MACHINERY, "safe_rope.")):
        return table
    state.restore(module)
    return get_table(module, name)


def _is_turned(state: Any, name: str) -> bool:
    """Whether sines and cosines are still to be taken of what is computed from a table."""
    pin = getattr(state, "pins", {}).get(name)
    return is_frequency(name) if pin is None else not pin.finished


def _is_lowered(state: Any, name: str, table: torch.Tensor) -> bool:
    """Whether autocast would lower a matrix product that makes phases of a table."""
    return torch.is_autocast_enabled(table.device.type) and _is_turned(state, name)


def _is_from(frame: Any, packages: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(packages)


def _is_code_of_a_module(frame: Any, module: Any) -> bool:
    """Whether a method runs, or a function that somebody has put into ``module`` for its forward."""
    while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        frame = frame.f_back  # what goes through it
    code, first = frame.f_code, first_argument(frame)
    if "forward" in vars(module):
        held = (frame.f_locals.get(name) for name in code.co_freevars)
        if first is module or any(one is module for one in held):
            return True
    return code.co_argcount > 0 and isinstance(first, nn.Module) and hasattr(type(first), code.co_name)
