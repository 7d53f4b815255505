"""Run a forward on a stand-in for a pinned module, which has its tables as the call needs them.

Nothing of a call is kept in the module. A call that needs other tables than the module shows runs on a
`twin`. That is an object of the stock class with the same attributes.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.random_states import random_states_kept
from safe_rope._base.tensors import is_captured
from safe_rope._base.torch_private import (
    has_tangent,
    is_learned,
)
from safe_rope._protection.calls import Call
from safe_rope._protection.shown import warn_rounded
from safe_rope._recognition.alone import copied_arguments, twin_alone
from safe_rope._recognition.explained import is_cast
from safe_rope._recognition.holdings import get_table, held_by, set_table, take_back, twin
from safe_rope._recognition.leads_back import Back, leads_back
from safe_rope._recognition.point_back import point_back
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.waves import are_counted_out
from safe_rope.rotation._cos_sin import CosSin, plain

logger = logging.getLogger(__name__)


_CALLS = 64
"""How many kinds of calls a module's results are remembered for."""


def _references_of_a_local() -> int:
    local = object()
    return sys.getrefcount(local)


_OWN = _references_of_a_local()
"""References to a stand-in that are those of `on_twin`: two, or one on a Python that lends locals."""


class Result(NamedTuple):
    """What the stock forward makes of one tensor that it returns."""

    dtype: torch.dtype
    is_phase: bool
    frequencies: str | None = None
    """The name of the frequencies that it returns as they are."""


Results = tuple[Result | torch.dtype | None, ...] | None
"""What the stock forward makes of each thing that it returns; None for all but tensors and dtypes."""


class Runner:
    """What is known of a module's forward from having run it; found out again where it is not there."""

    def __init__(self) -> None:
        self.results: dict[Hashable, Results] = {}
        self.refused: dict[Hashable, None] = {}  # calls that nobody can ask
        self.makes_counts: dict[Hashable, bool] = {}  # of a module that counts, and takes no sines
        self.knows_its_products = False  # whether its matrix products have been looked at under autocast
        self.counted = 0  # the largest argument of a call whose counts have been looked at; -1: told
        self.compared = 0  # the largest argument of a call whose remembered results have been compared
        self.as_stock = False  # its results are remembered outside of it, where other modules see them
        self.is_opaque = False  # its results hold what nobody can look into: a closure, an iterator
        self.back: Back | None = None
        self.runs_in_graph = False  # whether Dynamo traces its forward now
        self.shows_in_graph = ""  # how it sees its tables there: "stock", "marked", or as they are
        self.looked_at: dict[str, int] = {}  # size of what its forward has kept, when it held no phases
        self.threads: list[int] = []  # those in which the module runs, one as often as it has begun
        self._views: dict[str, tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]] = {}

    def leads_back(self, module: nn.Module) -> Back:
        """Return how what the module holds leads back to it; found out once."""
        if self.back is None:
            self.back = leads_back(module)
        return self.back

    def learn(self, key: Hashable, results: Results) -> None:
        """Remember what the stock forward makes of a call."""
        _remember(self.results, key, results)

    def refuse(self, key: Hashable) -> None:
        """Remember that nobody can ask what the stock forward makes of a call."""
        _remember(self.refused, key, None)

    def learn_of_counts(self, key: Hashable, makes: bool) -> None:
        """Remember whether a call makes counts and nothing else."""
        _remember(self.makes_counts, key, makes)

    def has_phases(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether its forward has counted out what it keeps; looked at again once there is twice as much."""
        if buffer.numel() < 2 * self.looked_at.get(name, 0):
            return False
        if is_captured(buffer):
            return False
        are_phases = are_counted_out(buffer)
        if not are_phases:
            self.looked_at[name] = buffer.numel()
        return are_phases

    def view(
        self, name: str, table: torch.Tensor, make: Callable[..., torch.Tensor], *details: Any
    ) -> torch.Tensor:
        """Return ``make(table, *details)``; the same tensor as long as nothing of it has changed."""
        return make(table, *details) if is_learned(table) else self.kept_view(name, table, make, *details)

    def kept_view(
        self, name: str, table: torch.Tensor, make: Callable[..., torch.Tensor], *details: Any
    ) -> torch.Tensor:
        """Return `view` of a table by which no derivative may be taken."""
        known, key = self._views.get(name), (table._version, make, *details)
        if known is not None and known[0] is table and known[1] == key:
            return known[2]
        with torch.inference_mode(False):
            made = make(table, *details)
        self._views[name] = (table, key, made)
        return made

    def forget(self, name: str) -> None:
        """Make the rounded view of a table anew."""
        self._views.pop(name, None)


def _remember(known: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(known) >= _CALLS:
        known.clear()  # such as a list that is one longer with each call
    known[key] = value


Show = Callable[[Any, str, torch.Tensor, bool], torch.Tensor]


def on_twin(
    call: Call, show: Show, run: Callable[[nn.Module], Any] | None = None, *, is_try: bool = False
) -> Any:
    """Run the call, or ``run``, on a twin of the module that has its tables as ``show`` gives them.

    What it has assigned when it raises stays, but for a try, after which the call is run again.
    """
    module, state, watched = call.module, call.state, call.watched
    runner = state.runner
    if (runner.back or runner.leads_back(module)) is not Back.NOT:
        return _on_itself(call, show, run)
    can_run_again = not (watched or module._modules or module._parameters)
    before = _as_before(module, state) if can_run_again else None
    stand_in, shown = stand_in_for(call, show, watched)
    held = held_by(stand_in, state.pins)
    versions = {} if watched else {name: table._version for name, table in shown.items()}
    try:
        result = call.forward(stand_in, *call.args, **call.kwargs) if run is None else run(stand_in)
    except BaseException as error:
        # After a KeyError the module may be run itself.
        if not (is_try or isinstance(error, KeyError) or _has_other_tables(stand_in, shown, state)):
            take_back(module, stand_in, state.pins, held)
            _point_back(module, stand_in, runner)
        raise
    if not watched:
        _adopt(call, stand_in, before, shown, versions)
    elif _has_other_tables(stand_in, shown, state):
        return result  # tables that are made under a transformation are not kept, nor what says that they are
    take_back(module, stand_in, state.pins, held)
    if sys.getrefcount(stand_in) > _OWN or weakref.getweakrefcount(stand_in):
        _point_back(module, stand_in, runner)
    return result


def _has_other_tables(stand_in: nn.Module, shown: dict[str, torch.Tensor], state: Any) -> bool:
    return any(get_table(stand_in, name) is not shown.get(name) for name in state.pins)


def _point_back(module: nn.Module, stand_in: nn.Module, runner: Runner) -> None:
    if point_back(module, stand_in):
        runner.back = None  # such as a method that the forward has chosen: it leads to the module now


def _as_before(module: nn.Module, state: Any) -> nn.Module:
    """Return a twin of the module that keeps its tables when a call changes them in place."""
    before = twin(module, stock_class(module))
    for name in state.pins if state.code.stores else ():
        table = get_table(module, name)
        if isinstance(table, torch.Tensor):
            set_table(before, name, table.clone())
    return before


def _on_itself(call: Call, show: Show, run: Callable[[nn.Module], Any] | None) -> Any:
    """Run the call on the module, whose parts assign to it past any twin, with the shown tables in it."""
    module, state = call.module, call.state
    tables = {name: get_table(module, name) for name in state.pins}
    shown = {
        name: show(state, name, plain(table), call.watched) if isinstance(table, torch.Tensor) else table
        for name, table in tables.items()
    }
    for name, table in shown.items():
        state.set(module, name, table)
    protected = type(module)
    if state.code.asks_its_class:
        object.__setattr__(module, "__class__", stock_class(module))
    try:
        return (run or call.on)(module)
    finally:
        object.__setattr__(module, "__class__", protected)
        made = {name: get_table(module, name) for name in tables}
        for name, table in tables.items():
            state.set(module, name, table)
        for name, table in made.items():
            if table is not shown[name] and isinstance(table, torch.Tensor) and not table.is_meta:
                state.keep_made(module, name, plain(table))
        if not call.watched:
            state.restore(module)


def stand_in_for(call: Call, show: Show, watched: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a twin of the module, and the tables that it has, by name; nothing is kept if ``watched``."""
    module, state = call.module, call.state
    stand_in = twin(module, stock_class(module), state.pins)
    buffers, shown = stand_in._buffers, {}
    for name in state.pins:
        table = buffers[name] if name in buffers else get_table(module, name)
        if isinstance(table, torch.Tensor):
            own = table if type(table) is torch.Tensor else plain(table)
            shown[name] = one = show(state, name, own, watched)
            if name in buffers:
                buffers[name] = one
            else:
                set_table(stand_in, name, one)
    return stand_in, shown


# ---- how a stand-in shows a table ----------------------------------------------------------------------


def as_it_is(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    return table


def marked(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    if watched or has_tangent(table):
        return rounded(state, name, table, watched)
    nominal: torch.dtype = state.nominal[name]
    if table.dtype != torch.float32:
        return table
    if table.requires_grad:
        return CosSin(table, nominal)
    return state.runner.kept_view(name, table, CosSin, nominal)  # type: ignore[no-any-return]


def marked_anew(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    return table if table.dtype != torch.float32 else CosSin(table, state.nominal[name])


def rounded(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    nominal = state.nominal[name]
    if table.dtype == nominal or table.is_complex() or is_learned(table):
        return table
    return table.to(nominal) if watched else state.runner.view(name, table, torch.Tensor.to, nominal)


def followed(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    nominal, is_counted = state.nominal[name], state.counts_further(name)
    is_ready = state.pins[name].finished and not is_counted
    is_ready &= watched or not state.code.asks_for_fp32
    if is_ready or nominal not in LOW or table.dtype in LOW or table.is_complex():
        return rounded(state, name, table, watched)
    if watched:
        warn_rounded(state.owner, name, state.nominal[name])
        return rounded(state, name, table, watched)
    phase = None if state.pins[name].finished else f"{state.owner}.{name}"
    return state.runner.view(name, table, CosSin, nominal, True, phase)  # type: ignore[no-any-return]


# ---- what a forward makes of its tables ----------------------------------------------------------------


def _adopt(
    call: Call,
    stand_in: nn.Module,
    before: nn.Module | None,
    shown: dict[str, torch.Tensor],
    versions: dict[str, int],
) -> None:
    """Keep what a forward has made of its tables: a longer one, for example, in full precision."""
    module, state = call.module, call.state
    made, written = {}, {}
    buffers = stand_in._buffers
    for name in state.pins:
        current: Any = buffers[name] if name in buffers else get_table(stand_in, name)
        is_shown = name in shown and current is shown[name]
        if is_shown and current._version == versions[name]:
            continue
        if not isinstance(current, torch.Tensor) or current.is_meta:
            continue
        if not is_shown:
            made[name] = plain(current)
        elif current is not get_table(module, name):
            state.runner.forget(name)
            written[name] = plain(current).to(state.pins[name].values.dtype)
    if not (made or written):
        return
    if any(table.dtype in LOW for table in made.values()) or any(map(state.differs, made)):
        made = _made_in_fp32(call, before, made)
    for name, table in (made | written).items():
        state.keep_made(module, name, table)
    state.restore(module)


def _made_in_fp32(
    call: Call, before: nn.Module | None, made: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    module = call.module
    if before is None:
        # A forward that does more than make tables, such as writing to a cache, is not run twice. A mere
        # cast of what is there is no better; whatever else it made is meant, as a running mean is.
        return {n: t for n, t in made.items() if not _is_rounded(t, call.state.pins[n].values)}
    try:
        asked = call.with_arguments(*copied_arguments(call.args, call.kwargs))
        before = twin_alone(before, type(before), call.module)
        with torch.no_grad(), random_states_kept(call.device):
            asked.in_fp32(before)
        again = {name: get_table(before, name) for name in made}
    except Exception:
        logger.info("%s cannot be run in FP32", type(module).__name__, exc_info=True)
        return made
    return {name: table for name, table in again.items() if isinstance(table, torch.Tensor)}


def _is_rounded(made: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether what a forward has made is a cast of what is there to 16 bits."""
    return made.dtype in LOW and values.dtype not in LOW and is_cast(made, values.to(made.device))
