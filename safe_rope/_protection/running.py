"""Run a pinned module's own forward on its true tables, with the dtypes that the stock model has.

Nothing of a call is kept in the module: a call that needs other tables than the module shows runs on a
`twin`, an object of the stock class with the same attributes. There are four ways.

as it is    The tables have the dtype that they have in the stock model.
rounded     Tables that are ready for use (sin and cos, coordinates) enter in the dtype that they would have
            had, rounded once.
in FP32     A module that makes positions and nothing else computes in FP32; each result is rounded once to
            the dtype that the stock forward gives it, which is asked.
followed    A module with weights computes from frequencies that stay exact until they meet the model
            (`safe_rope.rotation._cos_sin`).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._base.positions import is_watched
from safe_rope._base.torch_private import pytree
from safe_rope._protection.in_fp32 import raise_arguments, run_in_fp32
from safe_rope._recognition.holdings import get_table, set_table, take_back, twin
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.untouched import Untouched
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation import without_autocast
from safe_rope.rotation._cos_sin import CosSin, marked, plain, rounded

logger = logging.getLogger(__name__)

_tree = pytree


class Result(NamedTuple):
    """What the stock forward makes of one tensor that it returns."""

    dtype: torch.dtype
    is_phase: bool


class Runner:
    """What is known of a module's forward from having run it; found out again where it is not there."""

    def __init__(self) -> None:
        self.results: dict[Hashable, tuple[Result | None, ...] | None] = {}
        self.as_stock = False  # its results are remembered outside of it, where other modules see them
        self._views: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def rounded(self, name: str, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``table`` in ``dtype``; the same tensor as long as the table is the same."""
        known = self._views.get(name)
        if known is not None and known[0] is table and known[1] == table._version and known[2].dtype == dtype:
            return known[2]
        view = table.to(dtype)
        self._views[name] = (table, table._version, view)
        return view

    def forget(self, name: str) -> None:
        """Make the rounded view of a table anew."""
        self._views.pop(name, None)


def run(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the stock ``forward`` of a pinned module."""
    state = module._safe_rope
    if torch.compiler.is_dynamo_compiling():
        return _run_in_graph(module, state, forward, args, kwargs)
    watched = is_watched()
    if not watched:
        state.restore(module)
    patch = state.patch
    if state.rotates("forward"):
        return _rotate(module, state, forward, args, kwargs, watched)
    if patch is not None and patch.source == "tables":
        return _on_twin(module, state, forward, args, kwargs, _marked, watched)
    low = any(state.differs(name) for name in state.pins)
    if patch is not None and patch.source == "results":
        return _run_in_fp32(module, state, forward, args, kwargs, watched, applied=True)
    if not low and not (_has_low(args, kwargs) and _makes_positions(module)):
        return _run_as_it_is(module, state, forward, args, kwargs, watched)
    if state.runner.as_stock or not _only_makes_positions(module):
        show = _rounded if state.runner.as_stock else _followed
        result = _on_twin(module, state, forward, args, kwargs, show, watched)
        return _tree.tree_map_only(CosSin, _as_returned, result)
    if all(pin.finished for pin in state.pins.values()) and not _makes_positions(module):
        return _on_twin(module, state, forward, args, kwargs, _rounded, watched)
    return _run_in_fp32(module, state, forward, args, kwargs, watched, applied=False)


def rotate(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a stock ``method`` that takes q and k and returns them rotated, in FP32."""
    state = module._safe_rope
    if torch.compiler.is_dynamo_compiling():
        return run_in_fp32(module, method, args, kwargs, rotates=True)
    watched = is_watched()
    if not watched:
        state.restore(module)
    return _rotate(module, state, method, args, kwargs, watched)


# ---- eager ---------------------------------------------------------------------------------------------


def _run_as_it_is(
    module: nn.Module, state: Any, forward: Callable[..., Any], args: Any, kwargs: Any, watched: bool
) -> Any:
    if not state.pins or watched:
        return forward(module, *args, **kwargs)
    tables = {name: get_table(module, name) for name in state.pins}
    result = forward(module, *args, **kwargs)
    for name, table in tables.items():
        current = get_table(module, name)
        if current is not table and type(current) is torch.Tensor and not current.is_meta:
            state.keep_made(module, name, current)
    state.restore(module)
    return result


def _rotate(
    module: nn.Module, state: Any, method: Callable[..., Any], args: Any, kwargs: Any, watched: bool
) -> Any:
    def in_fp32(stand_in: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_in_fp32(stand_in, method, args, kwargs, rotates=True)

    return _on_twin(module, state, in_fp32, args, kwargs, _as_it_is, watched)


Show = Callable[[Any, str, torch.Tensor, bool], torch.Tensor]


def _on_twin(
    module: nn.Module,
    state: Any,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    show: Show,
    watched: bool,
) -> Any:
    """Run ``forward`` on a twin of ``module`` that has its tables as ``show`` gives them."""
    stock = type(module)._safe_rope_stock  # type: ignore[attr-defined]
    before = None if watched else twin(module, stock)
    stand_in, shown = _stand_in(module, state, show, watched)
    versions = {name: table._version for name, table in shown.items()} if not watched else {}
    result = forward(stand_in, *args, **kwargs)
    if before is not None:
        _adopt(module, state, stand_in, before, shown, versions, (forward, args, kwargs))
    take_back(module, stand_in, state.pins)
    return result


def _stand_in(
    module: nn.Module, state: Any, show: Show, watched: bool
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    stand_in = twin(module, type(module)._safe_rope_stock, state.pins)  # type: ignore[attr-defined]
    shown = {}
    for name in state.pins:
        table = get_table(module, name)
        if isinstance(table, torch.Tensor):
            shown[name] = show(state, name, plain(table), watched)
            set_table(stand_in, name, shown[name])
    return stand_in, shown


def _as_it_is(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    return table


def _marked(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    if watched:
        return _rounded(state, name, table, watched)
    return CosSin(table, state.nominal[name]) if table.dtype == torch.float32 else table


def _rounded(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    nominal = state.nominal[name]
    if table.dtype == nominal or table.is_complex():
        return table
    return table.to(nominal) if watched else state.runner.rounded(name, table, nominal)


def _followed(state: Any, name: str, table: torch.Tensor, watched: bool) -> torch.Tensor:
    nominal = state.nominal[name]
    if state.pins[name].finished or nominal not in LOW or table.dtype in LOW or table.is_complex():
        return _rounded(state, name, table, watched)
    if watched:
        warn_rounded(state, name)
        return _rounded(state, name, table, watched)
    return CosSin(table, nominal, faced=True, phase=f"{state.owner}.{name}")


def warn_rounded(state: Any, name: str) -> None:
    """Warn that frequencies are rounded for once, as in the stock model."""
    warnings.warn(
        f"{state.owner} computes from {name} with weights of {state.nominal[name]}, in a graph or under a "
        "transformation, where nothing can follow its frequencies: they are rounded there, as in the stock "
        "model. Compute cos and sin in a module of their own",
        PrecisionWarning,
        stacklevel=2,
    )


def _as_returned(table: CosSin) -> torch.Tensor:
    # A phase is never rounded: what is computed from it is.
    return table if table.phase is not None else rounded(table)


def _adopt(
    module: nn.Module,
    state: Any,
    stand_in: nn.Module,
    before: nn.Module,
    shown: dict[str, torch.Tensor],
    versions: dict[str, int],
    call: tuple[Callable[..., Any], Any, Any],
) -> None:
    """Keep what a forward has made of its tables: a longer one, for example, in full precision."""
    made, written = {}, {}
    for name in state.pins:
        current = get_table(stand_in, name)
        if not isinstance(current, torch.Tensor) or current.is_meta:
            continue
        if current is not shown.get(name):
            made[name] = plain(current)
        elif current._version != versions[name] and current is not get_table(module, name):
            state.runner.forget(name)
            written[name] = plain(current).to(state.pins[name].values.dtype)
    if not (made or written):
        return
    if any(table.dtype in LOW for table in made.values()) or any(map(state.differs, made)):
        made = _made_in_fp32(module, state, before, made, call)
    for name, table in (made | written).items():
        state.keep_made(module, name, table)
    state.restore(module)


def _made_in_fp32(
    module: nn.Module,
    state: Any,
    before: nn.Module,
    made: dict[str, torch.Tensor],
    call: tuple[Callable[..., Any], Any, Any],
) -> dict[str, torch.Tensor]:
    if module._modules or module._parameters:
        # A forward that does more than make tables, such as writing to a cache, is not run twice. What
        # it made for the same positions is no better than what is there.
        return {n: t for n, t in made.items() if t.shape != state.pins[n].values.shape}
    forward, args, kwargs = call
    try:
        with torch.no_grad():
            _call_in_fp32(before, forward, args, kwargs)
        again = {name: get_table(before, name) for name in made}
    except Exception:
        logger.info("%s cannot be run in FP32", type(module).__name__, exc_info=True)
        return made
    return {name: table for name, table in again.items() if isinstance(table, torch.Tensor)}


# ---- in FP32 -------------------------------------------------------------------------------------------


def _run_in_fp32(
    module: nn.Module,
    state: Any,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    watched: bool,
    *,
    applied: bool,
) -> Any:
    """Run ``forward`` in FP32 and give each result the dtype that the stock forward gives it.

    Args:
        module: the module.
        state: its state.
        forward: the stock forward.
        args: its arguments.
        kwargs: its keyword arguments.
        watched: whether nothing may be kept.
        applied: whether cos and sin go to a function that takes them in FP32.

    """
    origins: dict[int, Origin] = {}

    def in_fp32(stand_in: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _follow_origins(stand_in, state, origins, learned, forward, args, kwargs)

    key = _key(state, module, args, kwargs)
    learned = None if watched else state.runner.results.get(key)
    given = None if learned is not None else _as_stock(module, state, forward, args, kwargs, watched)
    if state.runner.as_stock:
        _compare_remembered(module, state, forward, args, kwargs, given)
        return _on_twin(module, state, forward, args, kwargs, _rounded, watched)
    result = _on_twin(module, state, in_fp32, args, kwargs, _as_it_is, watched)
    leaves, structure = _tree.tree_flatten(result)
    if learned is None:
        learned = _compare(leaves, given, origins)
        if not watched:
            state.runner.results[key] = learned
    if learned is not None and len(learned) == len(leaves):
        leaves = [_as_in_stock(leaf, r, applied, watched) for leaf, r in zip(leaves, learned, strict=True)]
    return _tree.tree_unflatten(leaves, structure)


def _follow_origins(
    stand_in: nn.Module,
    state: Any,
    origins: dict[int, Origin],
    learned: Any,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    if learned is not None:
        return _call_in_fp32(stand_in, forward, args, kwargs)
    provenance = Provenance()
    for name, pin in state.pins.items():
        table = get_table(stand_in, name)
        if isinstance(table, torch.Tensor):
            provenance.note(table, Origin.FINISHED if pin.finished else Origin.COUNTED)
    with provenance:
        result = _call_in_fp32(stand_in, forward, args, kwargs)
    for leaf in _tree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            origins[id(leaf)] = provenance.origin(leaf)
    return result


def _call_in_fp32(stand_in: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = raise_arguments(args, kwargs)
    device = next((leaf.device.type for leaf in _tree.tree_leaves((args, kwargs)) if _is_tensor(leaf)), "cpu")
    with without_autocast(device):
        return forward(stand_in, *args, **kwargs)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _as_stock(
    module: nn.Module, state: Any, forward: Callable[..., Any], args: Any, kwargs: Any, watched: bool
) -> Any:
    """Return what the stock forward returns; None where it raises.

    A class that remembers results outside of its modules is run as stock from then on: what it remembers is
    everybody's.
    """
    stand_in, _ = _stand_in(module, state, _rounded, watched=True)
    remembered = Untouched(type(module)._safe_rope_stock)  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), remembered:
            return forward(twin(stand_in, type(stand_in)), *args, **kwargs)
    except Exception:
        logger.info("%s does not run as stock", type(module).__name__, exc_info=True)
        return None
    finally:
        if remembered.changed:
            state.runner.as_stock = True


def _compare_remembered(
    module: nn.Module, state: Any, forward: Callable[..., Any], args: Any, kwargs: Any, given: Any
) -> None:
    """Warn where a class whose results are remembered outside of its modules computes them too coarsely."""
    stock = type(module)._safe_rope_stock  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), Untouched(stock):
            true = _call_in_fp32(twin(module, stock), forward, args, kwargs)
    except Exception:
        logger.info("%s cannot be run in FP32", stock.__name__, exc_info=True)
        true = None
    pairs = list(zip(_tree.tree_leaves(given), _tree.tree_leaves(true), strict=False))
    if true is None or any(isinstance(b, torch.Tensor) and _is_off(a, b) for a, b in pairs):
        state.notes["forward"] = "computed in low precision"
        warnings.warn(
            f"{stock.__module__}.{stock.__name__} computes positions in low precision and remembers them on "
            "a class or in a module, for all that ask for them: they are as in the stock model. Compute them "
            "in torch.float32 and round what forward returns",
            PrecisionWarning,
            stacklevel=2,
        )


def _is_off(stock: Any, true: torch.Tensor) -> bool:
    if not isinstance(stock, torch.Tensor) or stock.shape != true.shape or not stock.is_floating_point():
        return False
    eps = torch.finfo(stock.dtype).eps
    scale = float(true.abs().max()) if true.numel() else 1.0
    return bool(((stock.double() - true.double()).abs() > 2 * eps * scale).any())


def _compare(leaves: list[Any], given: Any, origins: dict[int, Origin]) -> tuple[Result | None, ...] | None:
    stock = _tree.tree_leaves(given)
    if len(stock) != len(leaves):
        return None
    found: list[Result | None] = []
    for leaf, other in zip(leaves, stock, strict=True):
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            found.append(None)
            continue
        origin = origins.get(id(leaf), Origin.NONE)
        is_phase = bool(origin & Origin.COUNTED) and not origin & Origin.FINISHED
        found.append(Result(other.dtype, is_phase and leaf.is_floating_point()))
    return tuple(found)


def _as_in_stock(leaf: Any, result: Result | None, applied: bool, watched: bool) -> Any:
    if result is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    if applied and leaf.dtype == torch.float32:
        return marked(leaf, result.dtype)
    if result.is_phase and result.dtype in LOW and not watched:
        return CosSin(leaf, result.dtype, faced=True)
    return leaf.to(result.dtype)


def _key(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Hashable:
    leaves, structure = _tree.tree_flatten((args, kwargs))
    dtypes = tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return dtypes, str(structure), tuple(state.nominal.values()), module.training, autocast


def _has_low(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in LOW for leaf in _tree.tree_leaves((args, kwargs))
    )


def _only_makes_positions(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _makes_positions(module: nn.Module) -> bool:
    return _only_makes_positions(module) and bytecode.counts_in_forward(type(module)._safe_rope_stock)  # type: ignore[attr-defined]


# ---- in a graph ----------------------------------------------------------------------------------------


def _run_in_graph(module: Any, state: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``forward`` while Dynamo traces it: one thread, whose writes to the module are recorded."""
    if state.rotates("forward"):
        return run_in_fp32(module, forward, args, kwargs, rotates=True)
    if state.patch is not None and state.patch.source == "results":
        return run_in_fp32(module, forward, args, kwargs, rotates=False)
    if state.patch is not None and state.patch.source == "tables":
        with _shown_in_graph(module, state, marked=True):
            return forward(module, *args, **kwargs)
    low = [name for name in state.pins if state.differs(name)]
    if not low:
        return forward(module, *args, **kwargs)
    only_positions = _only_makes_positions(module)
    if not only_positions or all(state.pins[name].finished for name in low):
        with _shown_in_graph(module, state, marked=False):
            return forward(module, *args, **kwargs)
    if state.stores:
        # It cannot be asked what it returns as stock without being changed by that.
        lowest = [leaf.dtype for leaf in _tree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        dtype = next((dtype for dtype in lowest if dtype in LOW), None)
        result = forward(module, *args, **kwargs)
        if dtype is None:
            return result
        return _tree.tree_map_only(torch.Tensor, lambda leaf: _lowered(leaf, dtype), result)
    with _shown_in_graph(module, state, marked=False):
        stock = forward(module, *args, **kwargs)
    args, kwargs = raise_arguments(args, kwargs)
    leaves, structure = _tree.tree_flatten(forward(module, *args, **kwargs))
    others = _tree.tree_leaves(stock)
    leaves = [
        leaf.to(other.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, other in zip(leaves, others, strict=True)
    ]
    return _tree.tree_unflatten(leaves, structure)


def _lowered(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return leaf.to(dtype) if leaf.dtype == torch.float32 else leaf


@contextlib.contextmanager
def _shown_in_graph(module: nn.Module, state: Any, *, marked: bool) -> Iterator[None]:
    tables = {name: get_table(module, name) for name in state.pins}
    shown = {}
    for name, table in tables.items():
        shown[name] = state.marked.get(name, table) if marked else table.to(state.nominal[name])
        set_table(module, name, shown[name])
    try:
        yield
    finally:
        for name, table in tables.items():
            if get_table(module, name) is shown[name]:
                set_table(module, name, table)
