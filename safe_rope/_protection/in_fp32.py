"""Run a module's forward in FP32 and round what it returns once.

Where cos and sin go to an application function that is FP32-aware (`safe_rope.rotation`), rounding is left to
that function. Elsewhere each result gets the dtype that the stock forward gives it, which is asked.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Awaitable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.random_states import random_states_kept
from safe_rope._base.tensors import are_leaves, flattened, in_real_numbers, is_shared, mapped
from safe_rope._base.torch_private import pytree, unrecorded
from safe_rope._protection.shown import STATE, seen, seen_cache, show, warn_rounded
from safe_rope._protection.stand_ins import (
    Call,
    Result,
    Results,
    as_it_is,
    followed,
    on_twin,
    rounded,
    stand_in_for,
)
from safe_rope._recognition.alone import copied_arguments, twin_alone
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import COMPUTED_LOW, LOW_PHASES, NOT_COMPARED
from safe_rope._recognition.holdings import attributes, entries, get_table, set_table
from safe_rope._recognition.leads_back import Back
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.provenance import Activations, Origin, Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.untouched import Untouched
from safe_rope._recognition.waves import FEWEST
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation import CosSin, marked, round_results
from safe_rope.rotation._cos_sin import low_phases
from safe_rope.rotation._cos_sin import rounded as rounded_once

logger = logging.getLogger(__name__)

MANY = 256
"""Positions that BF16 counts without rounding; a longer call is looked at anew."""


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
    key = _key(call)
    if runner.is_opaque or key in runner.refused:
        return _run_unasked(call)
    origins: dict[int, Origin] = {}
    learned = None if call.watched else runner.results.get(key)
    answer = _asked(call) if learned is None else (None, None)
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
    if given is not None and (refusal := _refusal_of_fp32(call)) is not None:
        tell_of_stock(call, "it raises where it is given FP32")
        if not (call.watched or isinstance(refusal, torch.OutOfMemoryError)):
            runner.refuse(key)
        return run_once(call)
    returned: Any = None
    is_refused = False
    try:
        returned = on_twin(call, as_it_is, run)
    except Exception:
        if learned is not None or given is not None:
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
            _tell_of_rounded_counts(call)
            runner.learn(key, learned)
    if learned is not None and len(learned) == len(leaves):
        leaves = [
            _as_in_stock(call, leaf, result, applied) for leaf, result in zip(leaves, learned, strict=True)
        ]
    return put_back(leaves)


def counts_low(call: Call) -> bool:
    """Whether a module that counts in its forward makes nothing else, and may count in a low dtype."""
    runner, state = call.state.runner, call.state
    if not state.only_counts or call.watched or state.code.writes or runner.is_opaque or runner.as_stock:
        return False
    held = call.held_low
    if not (call.has_low or held) or _is_captured(call) or not _may_count_beyond(call, held):
        return False
    key = _key(call)
    known: bool | None = runner.makes_counts.get(key)
    if known is None:
        known = _makes_counts(call, held)
        runner.learn_of_counts(key, known)
    return known


def _may_count_beyond(call: Call, held: list[str]) -> bool:
    """Whether a call is so long that a low dtype of its arguments, or of what is held, counts no further."""
    tensors = [*call.leaves, *(get_table(call.module, name) for name in held)]
    dtypes = {one.dtype for one in tensors if isinstance(one, torch.Tensor)} & set(LOW)
    numbers = [one for one in (*call.args, *call.kwargs.values()) if type(one) is int]
    longest = max((*numbers, *(size for leaf in call.leaves for size in leaf.shape)), default=0)
    return longest > min((2 / torch.finfo(dtype).eps for dtype in dtypes), default=MANY)


def _makes_counts(call: Call, held: list[str]) -> bool:
    """Whether what the stock forward returns is made of rounded counts, and of no activations."""
    provenance = Activations()
    for leaf in call.leaves:
        if leaf.is_floating_point():
            provenance.note(leaf, Origin.GIVEN)
    for name in held:
        table = get_table(call.module, name)
        if isinstance(table, torch.Tensor) and table.numel() > 1:
            provenance.note(table, Origin.GIVEN)
    try:
        with unrecorded(), provenance:
            given, _ = _as_stock(call)
    except UnansweredError:
        logger.info("%s cannot be asked", type(call.module).__name__, exc_info=True)
        call.state.runner.is_opaque = True
        return False
    made = [provenance.origin(leaf) for leaf in flattened(given)[0] if isinstance(leaf, torch.Tensor)]
    is_more = any(one & Origin.GIVEN for one in made)
    if is_more and provenance.coarse is not None:
        _tell_of_counts(call, provenance.coarse)
    return any(one & Origin.COUNTED for one in made) and not is_more and provenance.coarse is not None


def _tell_of_counts(call: Call, dtype: torch.dtype) -> None:
    """Warn, once for a module, that what it makes of activations is made of rounded counts, too."""
    if "forward" not in call.state.notes:
        call.state.notes["forward"] = COMPUTED_LOW
        warnings.warn(
            f"{call.state.owner} counts in {dtype}, which counts no further than "
            f"{2 / torch.finfo(dtype).eps:.0f}, beside activations: it does so as in the stock model. Count "
            "in torch.float32 or in integers",
            PrecisionWarning,
            stacklevel=2,
        )


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
    notes, stock = call.state.notes, stock_class(call.module)
    if "forward" not in notes:
        notes["forward"] = NOT_COMPARED
        warnings.warn(
            f"{stock.__module__}.{stock.__name__} computes positions and cannot be compared with FP32 "
            f"({reason}): they are as in the stock model, which may compute them in low precision. Compute "
            "them in torch.float32 and round what forward returns",
            PrecisionWarning,
            stacklevel=2,
        )


def as_returned(table: torch.Tensor) -> torch.Tensor:
    """Round what a forward returns once."""
    # A phase is never rounded: what is computed from it is.
    return rounded_once(table) if isinstance(table, CosSin) and table.phase is None else table


def _is_captured(call: Call) -> bool:
    """Whether a CUDA graph is captured, where nothing can be read."""
    return any(leaf.is_cuda for leaf in call.leaves) and torch.cuda.is_current_stream_capturing()


def _tell_of_rounded_counts(call: Call) -> None:
    """Warn where positions have arrived in a dtype that cannot count so far."""
    if _is_captured(call):
        return
    for leaf in call.leaves:
        if leaf.dtype not in LOW or leaf.numel() <= FEWEST:
            continue
        values, last = leaf.detach().reshape(-1), 2 / torch.finfo(leaf.dtype).eps
        is_whole = bool((values.isfinite() & (values == values.round())).all())
        steps = values.float().sort().values.diff().count_nonzero() if is_whole else 0
        if steps >= FEWEST and bool((values.abs() > last).any()):
            warnings.warn(
                f"{call.state.owner} is given positions in {leaf.dtype}, which counts no further than "
                f"{last:.0f}: they were rounded before, as in the stock model. Count them in torch.float32 "
                "or as integers",
                PrecisionWarning,
                stacklevel=2,
            )


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


def _show_caches(state: Any, stand_in: nn.Module) -> None:
    """Let a copy of the module see what its forward has kept in the dtypes of the stock model."""
    for name, (dtype, _) in state.caches.items():
        cache = get_table(stand_in, name)
        if isinstance(cache, torch.Tensor) and cache.dtype == torch.float32:
            set_table(stand_in, name, cache.to(dtype))


def _asked(call: Call) -> tuple[Any, nn.Module] | None:
    """Return what `_as_stock` does; None where the call cannot be asked."""
    try:
        with unrecorded():
            return _as_stock(call)
    except UnansweredError:
        logger.info("%s cannot be asked", type(call.module).__name__, exc_info=True)
        return None


def _as_stock(call: Call) -> tuple[Any, nn.Module]:
    """Return what the stock forward returns, None where it raises, and the copy of the module that it ran on.

    A class that remembers results outside of its modules is run as stock from then on: what it remembers is
    everybody's.

    Raises:
        UnansweredError: what it may change cannot be copied, or it changes a container that it is given.

    """
    if call.state.runner.leads_back(call.module) is Back.SHARED:
        raise UnansweredError("what it holds leads back to it, from a copy, too")
    stand_in, _ = stand_in_for(call, rounded, watched=True)
    try:
        remembered = Untouched(stock_class(call.module), attributes(call.module))
    except OutOfReachError as error:
        raise UnansweredError(str(error)) from error
    asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
    before = pytree.tree_leaves((asked.args, asked.kwargs))
    stand_in = twin_alone(stand_in, type(stand_in), call.module)
    _show_caches(call.state, stand_in)
    given, has_run = None, False
    try:
        with torch.no_grad(), random_states_kept(call.device), remembered, seen("as stock"):
            try:
                given, has_run = remembered.run(asked.on, stand_in), True
            except Exception:
                logger.info("%s does not run as stock", type(call.module).__name__, exc_info=True)
    except Exception as error:  # a graph that is captured lets nobody read a random state
        raise UnansweredError("what it may change cannot be kept") from error
    finally:
        if remembered.changed:
            call.state.runner.as_stock = True
    if not has_run:
        if call.state.runner.leads_back(call.module) is not Back.NOT:
            raise UnansweredError("what it holds leads back to it, and a copy does not run")
        return None, stand_in
    known = set(map(id, before))
    made = [leaf for leaf in pytree.tree_leaves((asked.args, asked.kwargs)) if id(leaf) not in known]
    if any(isinstance(leaf, torch.Tensor) and not _is_exact(leaf) for leaf in made):
        call.state.runner.is_opaque = not call.watched
        raise UnansweredError("it puts what it makes into what it is given")
    return given, stand_in


def _refusal_of_fp32(call: Call) -> Exception | None:
    """Return what the forward raises in FP32, if anything; it runs on copies, and nothing of it stays."""
    stand_in, _ = stand_in_for(call, as_it_is, watched=True)
    try:
        untouched = Untouched(stock_class(call.module), attributes(call.module))
        asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
        stand_in = twin_alone(stand_in, type(stand_in), call.module)
        with unrecorded(), torch.no_grad(), random_states_kept(call.device), untouched:
            untouched.run(asked.in_fp32, stand_in)
    except Exception as error:
        logger.info("%s raises in FP32", type(call.module).__name__, exc_info=True)
        return error
    return None


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def compare_remembered(call: Call, given: Any) -> None:
    """Warn where a class whose results are remembered outside of its modules computes them too coarsely.

    A call that has twice as much to count as any before is looked at anew.
    """
    stock, runner = stock_class(call.module), call.state.runner
    size = max((leaf.numel() for leaf in call.leaves), default=1)
    if call.watched or "forward" in call.state.notes or size < 2 * runner.compared:
        return
    runner.compared = max(size, 1)
    try:
        asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
        untouched = Untouched(stock, attributes(call.module))
        with torch.no_grad(), random_states_kept(call.device), untouched:
            true = untouched.run(asked.in_fp32, twin_alone(call.module, stock))
    except Exception:
        logger.info("%s cannot be run in FP32", stock.__name__, exc_info=True)
        true = None
    pairs = list(zip(flattened(given)[0], flattened(true)[0], strict=False))
    if true is None or any(isinstance(b, torch.Tensor) and _is_off(a, b) for a, b in pairs):
        call.state.notes["forward"] = COMPUTED_LOW
        warnings.warn(
            f"{stock.__module__}.{stock.__name__} computes positions in low precision and remembers them on "
            "a class or in a module, for all that ask for them: they are as in the stock model. Compute them "
            "in torch.float32 and round what forward returns",
            PrecisionWarning,
            stacklevel=2,
        )


def _is_off(stock: Any, true: torch.Tensor) -> bool:
    if not isinstance(stock, torch.Tensor) or stock.shape != true.shape:
        return False
    if stock.is_complex() and true.is_complex():
        stock, true = in_real_numbers(stock), in_real_numbers(true)
    if not stock.is_floating_point():
        return False
    eps = torch.finfo(stock.dtype).eps
    scale = float(true.abs().max()) if true.numel() else 1.0
    return bool(((stock.double() - true.double()).abs() > 2 * eps * scale).any())


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
    if "phases" not in call.state.notes:
        call.state.notes["phases"] = LOW_PHASES
        warnings.warn(
            f"{call.state.owner} returns phases in {dtype} that have a gradient, which an exact table "
            "would cut off: they are rounded there, as in stock. Compute cos and sin in that forward",
            PrecisionWarning,
            stacklevel=2,
        )


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return (argument,) if isinstance(argument, torch.dtype) else type(argument)


def _key(call: Call) -> tuple[Any, ...]:
    given: Any = (*call.args, *call.kwargs.values())
    structure: Any = len(call.args), *call.kwargs
    if not are_leaves(given):
        given, _ = flattened((call.args, call.kwargs))
        structure = str(pytree.tree_structure((call.args, call.kwargs)))
    dtypes = tuple(map(_kind, given))
    are_many = any([leaf.dtype in LOW and leaf.numel() > MANY for leaf in call.leaves])
    nominal, pins = tuple(call.state.nominal.values()), call.state.pins
    # A buffer that is no table may be there for its dtype.
    beside = tuple([b.dtype for n, b in call.module._buffers.items() if n not in pins and b is not None])
    return call.forward, dtypes, structure, nominal, beside, call.module.training, call.autocast, are_many
