"""Run a pinned module's forward while Dynamo traces it: one thread, whose writes to the module are recorded.

A graph cannot ask a copy of the module what the stock forward returns. It runs the forward a second time for
that, which only code may be asked for that does nothing besides. Other code runs once, and what it makes in
FP32 gets the dtype that came in.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from safe_rope._base.dtypes import LOW
from safe_rope._base.torch_private import constant_in_graphs, pytree
from safe_rope._protection.calls import Call
from safe_rope._protection.in_fp32 import as_returned
from safe_rope._protection.shown import in_graphs, show_in_graph, warn_rounded
from safe_rope._recognition.holdings import get_table, set_table
from safe_rope.rotation import CosSin, marked
from safe_rope.rotation._marks import is_dtype_the_mark

_SEEN_THROUGH = (torch.Tensor, torch.dtype, torch.device, torch.Size, bool, int, float, str, type(None))
"""What hides no tensor from whoever raises arguments and rounds results."""


def may_run_twice(call: Call) -> bool:
    """Whether running the forward twice is running it once: it keeps, draws and counts nothing."""
    state = call.state
    acts = state.code.keeps or state.acts or call.module._modules
    return not (acts or hides_tensors(call.args, call.kwargs))


def hides_tensors(*values: Any) -> bool:
    """Whether any of the values, or what is in them, is an object that may hold tensors."""
    # Lists: Dynamo before torch 2.7 knows neither next() with a default nor all() of a generator.
    return any([not isinstance(one, _SEEN_THROUGH) for one in pytree.tree_leaves(values)])


def apply_results(call: Call) -> Any:
    """Run a forward whose cos and sin stay in FP32, marked for the application function."""
    result = _in_fp32(call)
    if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
        return CosSin(result)  # phases have to go through cos and sin first
    leaves, structure = pytree.tree_flatten(result)
    stock = pytree.tree_leaves(on_shown(call, "rounded")) if may_run_twice(call) else leaves
    leaves = [_marked(leaf, other) for leaf, other in zip(leaves, stock, strict=True)]
    return pytree.tree_unflatten(leaves, structure)


def _in_fp32(call: Call, *, raised: bool = True) -> Any:
    """Run a call whose results are rounded afterwards: it sees other modules' frequencies as they are."""
    # No ``finally``, as in `safe_rope._protection.running.run`.
    before, in_graphs.in_fp32 = in_graphs.in_fp32, True
    result = call.in_fp32(call.module) if raised else call.on(call.module)
    in_graphs.in_fp32 = before
    return result


def _marked(leaf: Any, stock: Any) -> Any:
    """Return a result marked for the application function, with the dtype that it has as stock."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32:
        return leaf
    return marked(leaf, None if stock is leaf else stock.dtype)


def run_once(call: Call, low: list[str]) -> Any:
    """Run a forward on exact tables; round what it returns to the dtype that came in, or to the tables'.

    Args:
        call: of what makes positions and may not run twice.
        low: names of the tables that have another dtype in the stock model.

    """
    state = call.state
    if hides_tensors(call.args, call.kwargs):
        tell(state.owner, "tables", _given(call, torch.bfloat16))
    # What it keeps of its arguments, or in their dtype, is not to be in FP32.
    keeps = state.code.keeps or call.module._modules
    result = _in_fp32(call, raised=not keeps)
    nominal = [state.nominal[name] for name in low if state.nominal[name] in LOW]
    dtype = _given(call, nominal[0] if nominal else None)
    if state.code.widens or dtype is None:
        return result
    phase = _phase(call, low)
    leaves, structure = pytree.tree_flatten(result)
    leaves = [
        _lowered(call, leaf, dtype, phase) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    return pytree.tree_unflatten(leaves, structure)


def run_twice(call: Call, low: list[str]) -> Any:
    """Run a forward in FP32; round what it returns to the dtypes that it gives as stock, which is asked.

    Args:
        call: of what makes positions, and `may_run_twice`.
        low: as for `run_once`.

    """
    state = call.state
    asked = call
    if state.code.writes:
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
        asked = call.with_arguments(*copies)
    stock = pytree.tree_leaves(on_shown(asked, "stock"))
    leaves, structure = pytree.tree_flatten(_in_fp32(call))
    if hides_tensors(stock):
        tell(state.owner, "tables", _given(call, torch.bfloat16))
    phase = _phase(call, low)
    leaves = [
        _as_stock(call, leaf, other.dtype, phase) if isinstance(leaf, torch.Tensor) else other
        for leaf, other in zip(leaves, stock, strict=True)
    ]
    return pytree.tree_unflatten(leaves, structure)


def run_as_stock(call: Call, low: list[str]) -> Any:
    """Run a forward on tables of the stock model's dtypes; tell of frequencies that are rounded by that."""
    state = call.state
    counted = False
    for name in low:
        counted = counted or state.counts_further(name) or state.code.asks_for_fp32
        if state.nominal[name] in LOW and not state.pins[name].finished:
            tell(state.owner, name, state.nominal[name])
    result = on_shown(call, "stock")
    return pytree.tree_map_only(torch.Tensor, as_returned, result) if counted else result


def on_shown(call: Call, how: Literal["stock", "marked", "rounded"]) -> Any:
    """Run a call on tables of the stock model's dtypes, or on marked ones; put the true ones back.

    ``how``: "rounded" where only the dtypes of what it returns are wanted.
    """
    # No context manager: Dynamo before torch 2.5 takes none that is made of a generator.
    module, state = call.module, call.state
    if torch.compiler.is_dynamo_compiling() and state.is_shown and not state.code.keeps:
        # Dynamo takes no change of a module inside of `torch.utils.checkpoint`.
        state.runner.shows_in_graph = how
        result = call.on(module)
        state.runner.shows_in_graph = ""
        return result
    tables = {name: get_table(module, name) for name in state.pins}
    shown = {}
    for name, table in tables.items():
        if not isinstance(table, torch.Tensor) or table.requires_grad:
            shown[name] = table
            continue
        shown[name] = show_in_graph(state, name, table, how)
        set_table(module, name, shown[name])
    try:
        return call.on(module)
    finally:
        for name, table in tables.items():
            if get_table(module, name) is shown[name]:
                set_table(module, name, table)


@constant_in_graphs
def tell(owner: str, name: str, dtype: torch.dtype) -> bool:
    """Warn while Dynamo traces, which runs this once and leaves no trace of it in the graph."""
    warn_rounded(owner, name, dtype)
    return True


def _given(call: Call, other: Any) -> Any:
    """The first low dtype among the arguments, or another."""
    dtypes = [leaf.dtype for leaf in call.leaves if leaf.dtype in LOW]
    return dtypes[0] if dtypes else other


def _phase(call: Call, low: list[str]) -> str | None:
    """The module's name if its forward returns angles: it multiplies frequencies, and takes no sine."""
    state = call.state
    finished = [name for name in low if state.pins[name].finished and not state.is_scale(name)]
    turned = any([not state.pins[name].finished for name in low])
    return state.owner if turned and not (call.beside or state.code.finishes or finished) else None


def _as_stock(call: Call, leaf: torch.Tensor, dtype: torch.dtype, phase: str | None) -> torch.Tensor:
    """Return a result in the stock model's dtype; a phase, that of the module ``phase``, is exact.

    Not so where it has a gradient, which a table would cut off.
    """
    if phase is None or dtype not in LOW or leaf.dtype != torch.float32:
        return leaf.to(dtype)
    if is_dtype_the_mark() or leaf.requires_grad:
        # What is no larger than what its gradient goes to is activations that something was done to.
        sources = [one.numel() for one in call.leaves if one.requires_grad and leaf.requires_grad]
        if max([0, *sources]) < leaf.numel():
            tell(phase, "phases", dtype)
        return leaf.to(dtype)
    return CosSin(leaf, dtype, faced=True, phase=phase)


def _lowered(call: Call, leaf: torch.Tensor, dtype: torch.dtype, phase: str | None) -> torch.Tensor:
    return _as_stock(call, leaf, dtype, phase) if leaf.dtype == torch.float32 else as_returned(leaf)
