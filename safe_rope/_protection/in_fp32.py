"""Run a module's forward in FP32 and round what it returns once.

Where cos and sin go to an application function that is FP32-aware (`safe_rope.rotation`), rounding is left to
that function. Elsewhere each result gets the dtype that the stock forward gives it, which is asked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import flattened, is_shared, mapped
from safe_rope._protection.as_stock import ask, compare_remembered, refusal_of_fp32
from safe_rope._protection.calls import Call, call_key
from safe_rope._protection.low_counts import tell_of_rounded_counts
from safe_rope._protection.shown import STATE, seen_cache, show, tell_once, warn_rounded
from safe_rope._protection.stand_ins import Result, Results, as_it_is, followed, on_twin, rounded
from safe_rope._recognition.explained import LOW_PHASES, NOT_COMPARED
from safe_rope._recognition.holdings import entries, get_table, set_table
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope.rotation import CosSin, marked, round_results
from safe_rope.rotation._cos_sin import low_phases
from safe_rope.rotation._cos_sin import rounded as rounded_once

logger = logging.getLogger(__name__)


def rotate(call: Call, module: nn.Module) -> Any:
    """Run a method that takes q and k on ``module`` in FP32; round q and k to the dtypes they came in."""
    dtypes = [leaf.dtype for leaf in call.leaves if leaf.is_floating_point()]
    return round_results(call.in_fp32(module), dtypes)


def run_in_fp32(call: Call, *, applied: bool) -> Any:
    """Run the call in FP32 and give each result the dtype that the stock forward gives it.

    Args:
        call: of a module that makes positions and nothing else.
        applied: whether cos and sin go to a function that takes them in FP32.

    """
    runner = call.state.runner
    key = call_key(call)
    if runner.is_opaque or key in runner.refused:
        return _run_unasked(call)
    origins: dict[int, Origin] = {}
    learned = None if call.watched else runner.results.get(key)
    answer = ask(call) if learned is None else (None, None)
    if answer is None:
        result = _run_unasked(call)
        if not call.watched:
            runner.refuse(key)  # a call that raises says nothing of the next
        return result
    given, stock = answer
    if any(map(_is_opaque, flattened(given)[0])):
        runner.is_opaque = not call.watched
        return _run_unasked(call)
    if runner.as_stock:
        if not call.watched:
            compare_remembered(call, given)
        elif call.has_low or call.autocast or any(map(call.state.differs, call.state.pins)):
            tell_of_stock(call, "what it remembers is everybody's, and a transformation hides it")
        return on_twin(call, rounded)
    run = call.in_fp32
    if learned is None:
        run = functools.partial(_follow_origins, call, origins)
    if given is not None and (refusal := refusal_of_fp32(call)) is not None:
        tell_of_stock(call, "it raises where it is given FP32")
        if not (call.watched or isinstance(refusal, torch.OutOfMemoryError)):
            runner.refuse(key)
        return run_once(call)
    returned: Any = None
    is_refused, is_try = False, learned is None and given is None
    try:
        returned = on_twin(call, as_it_is, run, is_try=is_try)
    except Exception:
        if not is_try:
            raise
        logger.info("%s raises in FP32 and as stock", type(call.module).__name__, exc_info=True)
        is_refused = True
    if is_refused:
        return run_once(call)  # which raises what the stock forward does
    leaves, put_back = flattened(returned)
    if learned is None:
        learned = _compare(call, leaves, given, origins)
        _note_caches(call, stock, origins)
        if not call.watched:
            tell_of_rounded_counts(call)
            runner.learn(key, learned)
    if learned is not None and len(learned) == len(leaves):
        leaves = [
            _as_in_stock(call, leaf, result, applied) for leaf, result in zip(leaves, learned, strict=True)
        ]
    return put_back(leaves)


def _is_opaque(leaf: Any) -> bool:
    """Whether what a forward returns may hold tensors that nobody sees."""
    if isinstance(leaf, torch.Tensor):
        return False
    return callable(leaf) or isinstance(leaf, Iterator | Awaitable) or hasattr(leaf, "__dict__")


def run_once(call: Call) -> Any:
    """Run the call as stock, once, on frequencies that stay exact until they meet the model."""
    told = low_phases()
    result = on_twin(call, rounded if call.state.runner.as_stock else followed)
    if low_phases() != told:
        call.state.notes.setdefault("phases", LOW_PHASES)
    return mapped(as_returned, result)


def _run_unasked(call: Call) -> Any:
    """Run as stock what cannot be asked for its results; tell of what computes more than its frequencies."""
    if call.state.code.computes and (call.has_low or call.autocast):
        tell_of_stock(call, "it cannot be copied, or what it returns or fills cannot be looked into")
    return run_once(call)


def tell_of_stock(call: Call, reason: str) -> None:
    """Warn, once for a module, that its positions are as in the stock model, and why."""
    stock = stock_class(call.module)
    text = (
        f"{stock.__module__}.{stock.__name__} computes positions and cannot be compared with FP32 "
        f"({reason}): they are as in the stock model, which may compute them in low precision. Compute them "
        "in torch.float32 and round what forward returns"
    )
    tell_once(call.state.notes, "forward", NOT_COMPARED, text)


def as_returned(table: torch.Tensor) -> torch.Tensor:
    """Round what a forward returns once."""
    # A phase is never rounded: what is computed from it is.
    return rounded_once(table) if isinstance(table, CosSin) and table.phase is None else table


def _follow_origins(call: Call, origins: dict[int, Origin], stand_in: nn.Module) -> Any:
    provenance = Provenance(foreign=Origin.STEPS)
    for leaf in call.leaves:
        if leaf.dtype in LOW:
            provenance.note(leaf, Origin.GIVEN)
        elif leaf.dtype in (torch.int64, torch.int32):
            provenance.note(leaf, Origin.STEPS)
    for module in stand_in.modules():
        for _, value in entries(module):
            if isinstance(value, torch.Tensor):
                provenance.note(value, Origin.LITERAL)
        state: Any = vars(module).get(STATE)
        for name, pin in getattr(state, "pins", {}).items():
            table = get_table(module, name)
            if isinstance(table, torch.Tensor):
                finished = pin.finished and not state.is_scale(name)
                provenance.note(table, Origin.FINISHED if finished else Origin.COUNTED)
    for name, (_, origin) in call.state.caches.items():
        cache = get_table(stand_in, name)
        if isinstance(cache, torch.Tensor):
            provenance.note(cache, origin)
    with provenance:
        result = call.in_fp32(stand_in)
    for leaf in (*flattened(result)[0], *(value for _, value in entries(stand_in))):
        if isinstance(leaf, torch.Tensor):
            origins[id(leaf)] = provenance.origin(leaf)
    return result


def _note_caches(call: Call, stock: nn.Module | None, origins: dict[int, Origin]) -> None:
    """Remember of what the forward has made in FP32, and keeps, what dtype the stock forward gives it."""
    caches = call.state.caches
    for name, value in entries(call.module):
        other = None if stock is None or name in call.state.pins else get_table(stock, name)
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if value.dtype == torch.float32 and other.dtype in LOW:
            caches[name] = other.dtype, origins.get(id(value), Origin.NONE)
            if value.is_inference():  # stock widens its own before it is used in FP32
                with torch.inference_mode(False):
                    set_table(call.module, name, value.clone())
            show(call.module, name, seen_cache)
        else:
            caches.pop(name, None)


def _compare(call: Call, leaves: list[Any], given: Any, origins: dict[int, Origin]) -> Results:
    stock = flattened(given)[0]
    unfinished = [name for name, pin in call.state.pins.items() if not pin.finished]
    if len(stock) != len(leaves):
        return None
    found: list[Result | torch.dtype | None] = []
    for leaf, other in zip(leaves, stock, strict=True):
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            found.append(other if isinstance(other, torch.dtype) else None)
            continue
        origin = origins.get(id(leaf), Origin.NONE)
        # Low values that meet counts are activations; where they only meet frequencies, they are positions.
        is_given = bool(origin & Origin.GIVEN) and bool(origin & Origin.STEPS)
        is_phase = bool(origin & Origin.COUNTED) and not (origin & Origin.FINISHED or is_given)
        is_phase &= leaf.is_floating_point()
        is_count = call.state.only_counts and not unfinished  # what meets frequencies is a phase
        is_phase = is_phase and not (is_count and _holds(other.dtype, leaf))
        is_asked = is_phase and not call.watched  # a tensor of a transform has no memory to be asked for
        same = (name for name in unfinished if is_asked and is_shared(get_table(call.module, name), leaf))
        found.append(Result(other.dtype, is_phase, next(same, None)))
    return tuple(found)


def _holds(dtype: torch.dtype, result: torch.Tensor) -> bool:
    """Whether a result is no whole numbers beyond those of a dtype: no positions, not used yet."""
    values = result.detach()
    return bool((values != values.round()).any()) or bool((values.to(dtype) == values).all())


def _as_in_stock(call: Call, leaf: Any, result: Result | torch.dtype | None, applied: bool) -> Any:
    if isinstance(result, torch.dtype):
        return result  # of arguments that were not raised
    if result is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    if applied and leaf.dtype == torch.float32:
        return marked(leaf, result.dtype)
    if not result.is_phase or result.dtype not in LOW:
        return leaf.to(result.dtype)
    owner = call.state.owner
    if call.watched:
        warn_rounded(owner, "phases", result.dtype)
        return leaf.to(result.dtype)
    if leaf.requires_grad:
        _tell_of_gradients(call, result.dtype)
        return leaf.to(result.dtype)
    phase = None if result.frequencies is None else f"{owner}.{result.frequencies}"
    return CosSin(leaf, result.dtype, faced=True, phase=phase)


def _tell_of_gradients(call: Call, dtype: torch.dtype) -> None:
    """Warn, once for a module, that phases are rounded, since no exact ones lead a gradient back."""
    text = (
        f"{call.state.owner} returns phases in {dtype} that have a gradient, which an exact table would cut "
        "off: they are rounded there, as in stock. Compute cos and sin in that forward"
    )
    tell_once(call.state.notes, "phases", LOW_PHASES, text)
