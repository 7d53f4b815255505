"""Run a pinned module's own forward on its true tables, with the dtypes that the stock model has.

There are four ways. *As it is*: the tables have the dtype that they have in the stock model. *Rounded*:
tables that are ready for use (sin and cos, coordinates) enter in the dtype of the stock model, rounded once.
*In FP32*: a module that makes only positions computes in FP32. Each result is rounded once to the dtype that
the stock forward gives it (`safe_rope._protection.in_fp32`). *Followed*: a module with weights computes from
frequencies that stay exact until they meet the model (`safe_rope.rotation._cos_sin`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.positions import is_watched
from safe_rope._base.tensors import mapped
from safe_rope._base.torch_private import is_dispatched, is_transformed, set_compiler
from safe_rope._protection import in_fp32, in_graphs, products
from safe_rope._protection.as_stock import compare_remembered
from safe_rope._protection.calls import Call
from safe_rope._protection.handed_out import note_handed_out
from safe_rope._protection.low_counts import counts_low
from safe_rope._protection.shown import STATE, sees
from safe_rope._protection.shown import in_graphs as seen_in_graphs
from safe_rope._protection.stand_ins import as_it_is, marked, marked_anew, on_twin, rounded
from safe_rope._protection.traced import is_traced, run_traced
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import stock_class

_CONTAINERS = (list, dict)
_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def run(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any, beside: bool = False) -> Any:
    """Run the stock ``forward`` of a pinned module, or a method ``beside`` it that makes positions."""
    state = module._safe_rope
    if torch.compiler.is_dynamo_compiling():
        # No ``finally``: Dynamo leaves a function alone whose graph ends inside of one.
        runner, is_within = state.runner, state.runner.runs_in_graph
        runner.runs_in_graph = True
        result = _run_in_graph(Call(module, state, forward, args, kwargs, False, beside))
        runner.runs_in_graph = is_within
        return result
    if state.runner.runs_in_graph:
        state.runner.runs_in_graph, state.runner.shows_in_graph = False, ""  # a graph's forward has raised
        seen_in_graphs.in_fp32 = False
    call = Call(module, state, forward, args, kwargs, is_watched(), beside)
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, torch.Tensor) and is_traced((*args, *kwargs.values())):
        state.restore(module)
        return run_traced(module, lambda: _run(call), lambda: call.on(module))
    if call.watched and state.awaited and is_transformed() and not is_dispatched():
        _place_awaited(call)
    if not call.watched:
        state.restore(module)
        if not state.pins and state.applied is None:
            _restore_inside(module)
    threads, thread = state.runner.threads, threading.get_ident()
    threads.append(thread)
    compiler = set_compiler(None)  # where a graph has ended above, each of our functions would be one
    try:
        return _run(call)
    except KeyError as error:
        if not _is_sought(error, module):
            raise
        return _run_on_itself(call)
    finally:
        if compiler is not None:
            set_compiler(compiler)
        threads.remove(thread)


def run_beside(
    module: Any,
    called: Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    of_forward: bool,
) -> Any:
    """Run a stock method or property that makes positions besides ``forward``: as part of one, as it is.

    A graph cannot tell a part of ``forward`` from a call alone, which ``of_forward`` answers there. A method
    beside the forward of a module with weights runs as it is, on tables that say how they are seen.
    """
    if torch.compiler.is_dynamo_compiling():
        is_part = of_forward
    else:
        is_part = threading.get_ident() in module._safe_rope.runner.threads
    has_forward = stock_class(module).forward is not nn.Module.forward
    is_part |= has_forward and does_more(module)
    return called(module, *args, **kwargs) if is_part else run(module, called, args, dict(kwargs), True)


def _place_awaited(call: Call) -> None:
    """Put tables there before a first call under a transform: what is made there is not kept."""
    device = call.leaves[0].device if call.leaves else torch.device("cpu")
    for name in tuple(call.state.awaited):
        table = call.state.made(call.module, name, device)
        if get_table(call.module, name) is None:
            call.state.put(call.module, name, table)


def _restore_inside(module: Any) -> None:
    """Put back the tables of what is inside a module that computes from those: nobody calls a mere holder."""
    for inner in module.modules():
        state = vars(inner).get(STATE)
        if state is not None:
            state.restore(inner)


def _run(call: Call) -> Any:
    module, state = call.module, call.state
    if state.rotates("forward"):
        return _rotate(call)
    if state.code.compares_dtypes and state.may_be_mended(stock_class(module)):
        return mapped(in_fp32.as_returned, _run_as_it_is(call))
    if (seen := sees()) is not None and state.pins:
        return _run_as_it_is(call) if seen == "exact" else on_twin(call, rounded)
    if state.how == "tables":
        return on_twin(call, marked_anew if call.watched and call.is_faked else marked)
    if state.how == "results":
        return in_fp32.run_in_fp32(call, applied=True)
    low = any(state.differs(name) for name in state.pins) or bool(state.caches)
    if not low and not (_is_lowered_by_its_call(call) or counts_low(call)):
        with products.noticed(call):
            result = _run_as_it_is(call)
        if not (call.watched or does_more(module)):
            note_handed_out(result)
        return result
    if state.runner.as_stock or does_more(module):
        with products.noticed(call):
            result = in_fp32.run_once(call)
        if state.runner.as_stock:
            compare_remembered(call, result)
        return result
    if state.pins and _is_ready(state, state.pins) and (call.watched or _meets_its_dtype(call)):
        exact = state.code.asks_for_fp32 and not call.watched
        return in_fp32.run_once(call) if exact else on_twin(call, rounded)
    return in_fp32.run_in_fp32(call, applied=False)


def _is_sought(error: KeyError, module: Any) -> bool:
    """Whether a twin of the module was looked for in a dictionary that has the module itself."""
    sought = error.args[0] if error.args else None
    if isinstance(sought, weakref.ref):
        sought = sought()
    return type(sought) is stock_class(module)


def _run_on_itself(call: Call) -> Any:
    """Run a forward that no twin can run, as it is found by its identity; raise what it raises itself."""
    state = call.state
    try:
        result = in_graphs.on_shown(call, "stock")
    except Exception as own:
        raise own from None
    finally:
        if not call.watched:
            state.restore(call.module)
    if call.has_low or call.autocast or any(map(state.differs, state.pins)):
        in_fp32.tell_of_stock(call, "it finds itself in a dictionary, where no copy is")
    return result


def rotate(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a stock ``method`` that takes q and k and returns them rotated, in FP32."""
    state = module._safe_rope
    in_graph = torch.compiler.is_dynamo_compiling()
    call = Call(module, state, method, args, kwargs, not in_graph and is_watched())
    if in_graph:
        return in_fp32.rotate(call, module)
    if not call.watched:
        state.restore(module)
    return _rotate(call)


def _rotate(call: Call) -> Any:
    return on_twin(call, as_it_is, lambda module: in_fp32.rotate(call, module))


def _run_as_it_is(call: Call) -> Any:
    module, state = call.module, call.state
    if state.code.asks_its_class and not call.watched:
        return on_twin(call, as_it_is)  # whose class is the stock one
    if call.watched:
        return call.on(module)
    fills = state.code.stores
    tables = {name: get_table(module, name) for name in state.pins}
    # No reference: a cache that is made longer leaves its memory at once.
    before = {
        n: (weakref.ref(b), version) for n, (b, version) in (precise_buffers(module) if fills else {}).items()
    }
    result = call.on(module)
    for name, table in tables.items():
        current = get_table(module, name)
        if current is not table and type(current) is torch.Tensor and not current.is_meta:
            state.keep_made(module, name, current)
    for name, (buffer, version) in (precise_buffers(module) if fills else {}).items():
        was, written = before.get(name, (None, 0))
        is_here = was is not None and was() is buffer
        if is_here and version == written:
            continue
        if name in state.pins:
            if is_here:
                state.follow_write(module, name, buffer)
        elif (tables and not does_more(module)) or state.runner.has_phases(name, buffer):
            state.keep_new(module, name, buffer)
    state.keep_come(module)
    if state.pins:
        state.restore(module)
    return result


def precise_buffers(module: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """The buffers in FP32 or finer that are more than a number, and how often each has been written to."""
    return {
        name: (buffer, 0 if buffer.is_inference() else buffer._version)
        for name, buffer in module._buffers.items()
        if type(buffer) is torch.Tensor
        and buffer.dtype in _PRECISE
        and buffer.numel() > 1
        and not buffer.is_meta
    }


def _is_lowered_by_its_call(call: Call) -> bool:
    """Whether the arguments or autocast make something coarser of FP32 tables, in a maker of positions."""
    is_low = call.has_low or products.are_lowered(call) or (call.state.code.counts and bool(call.held_low))
    if not is_low or does_more(call.module):
        return False
    return call.state.code.computes or any(not pin.finished for pin in call.state.pins.values())


def does_more(module: Any) -> bool:
    """Whether a module does more than making positions: it has weights, or is an attention without any."""
    for _ in module.parameters():  # Dynamo before torch 2.8 takes no ``next`` of it
        return True
    return bool(module._safe_rope.code.attends)


def _has_low_weights(module: Any) -> bool:
    """Whether what is trained in a rotary module has a low dtype, which a graph cannot raise."""
    return any([p is not None and p.dtype in LOW for p in module._parameters.values()])


def _meets_its_dtype(call: Call) -> bool:
    """Whether the arguments have the dtype that the tables have in the stock model: nothing else is seen."""
    dtypes = {leaf.dtype for leaf in call.leaves if leaf.is_floating_point()}
    return len(dtypes) == 1 and dtypes == set(call.state.nominal.values())


def _is_ready(state: Any, names: Any) -> bool:
    """Whether nothing is computed from the tables that is still to be multiplied, or chooses rows."""
    are_ready = all(state.pins[name].finished and not state.counts_further(name) for name in names)
    return are_ready and not state.code.counts


# ---- in a graph ----------------------------------------------------------------------------------------


def rounded_in_graphs(module: Any) -> list[str]:
    """Names of the frequencies of a pinned module that a graph computes from as the stock model does."""
    state = module._safe_rope
    if state.how is not None or state.rotates("forward") or not does_more(module):
        return []
    return [name for name, pin in state.pins.items() if state.nominal[name] in LOW and not pin.finished]


def _run_in_graph(call: Call) -> Any:
    """Run a call while Dynamo traces it (`safe_rope._protection.in_graphs`)."""
    module, state = call.module, call.state
    if state.rotates("forward"):
        return in_fp32.rotate(call, module)
    if state.how == "results" and not _has_low_weights(module):
        return in_graphs.apply_results(call)
    if state.how == "tables":
        return in_graphs.on_shown(call, "marked")
    low = [name for name in state.pins if state.differs(name)]
    if not low and not _is_lowered_by_its_call(call):
        if state.only_counts and state.code.asks_dtypes and call.has_low:
            in_graphs.tell(state.owner, "counts", torch.bfloat16)
        return call.on(module)
    for name in call.held_low if state.code.counts and not state.code.widens else ():
        in_graphs.tell(state.owner, name, torch.bfloat16)  # Dynamo takes no change of a module everywhere
    once = not in_graphs.may_run_twice(call)
    is_ready = low and _is_ready(state, low) and (once or _meets_its_dtype(call))
    # Numbers in tensors may be there for their dtype, which nothing else tells then.
    are_numbers = all([state.pins[name].values.numel() == 1 for name in low])
    tells_dtype = once and are_numbers and not any([leaf.dtype in LOW for leaf in call.leaves])
    if does_more(module) or is_ready or tells_dtype:
        return in_graphs.run_as_stock(call, low)
    if state.code.writes and any(
        [isinstance(one, _CONTAINERS) for one in (*call.args, *call.kwargs.values())]
    ):
        in_graphs.tell(state.owner, "tables", torch.bfloat16)
        return in_graphs.on_shown(call, "stock")
    return in_graphs.run_once(call, low) if once else in_graphs.run_twice(call, low)
