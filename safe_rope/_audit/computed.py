"""Whether a forward takes sines of low phases: what a copy takes them of, beside the same copy in FP32.

Tables say nothing of that: a module may hold none, or some that 16 bits hold without a loss. Nor does what a
forward returns, which differences, logarithms and thresholds make of plain roundings.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
import warnings
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import isolated
from safe_rope._base import bytecode, originals
from safe_rope._base.dtypes import LOW
from safe_rope._base.functions import filled_cells, signature_of
from safe_rope._recognition.ask import Bounded, UnansweredError, answering, undisturbed
from safe_rope._recognition.holdings import OF_TORCH, attributes, entries, get_table, set_table
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import is_list
from safe_rope._recognition.untouched import Untouched

T = TypeVar("T")
_LONG, _SHORT, _SIDE, _WIDTH = 600, 48, 41, 64
_LENGTHS = {
    *("seq_len", "seqlen", "seq_length", "length", "n", "max_len", "max_seq_len", "q_len", "k_len", "kv_len"),
    *("qlen", "klen", "query_length", "key_length", "src_len", "tgt_len"),
}
_SIDES = ("h", "w"), ("height", "width")
_BATCHES = ("b", "bs", "bsz", "batch_size")
_STARTS = ("start_pos", "pos_offset", "start", "offset")
_ENDS = re.compile(
    r"(cu_)?([kqxy]|kv|seq(uence)?|input|output|source|src|target|tgt|text|mel|audio|token|key|query|context)?_?"
    r"(lengths|lens|seqlens)|[a-z]lens"
)
"""How long each sequence is, and no lengths of waves or bonds."""
_COUNTS = ("pos", "ids", "time", "index")
_ROUNDINGS = 1.5
"""In units of a 16-bit dtype at 1: what rounding the sines would do as well."""
_OF_WEIGHTS = 32.0
"""In the same units: what rounding phases of some turns does as well, as any of a layer's numbers."""
_MOST = 2**22
"""Weights that may stand beside what counts."""
_CALLS = 8
"""Calls that answer with few places."""
_FEW = 3
"""Widths of weights that are tried."""
_WIDEST = 1024
"""Channels that a number may say which a module keeps."""
_MADE = 2**28
"""Numbers that one operation of a forward may make when it is asked."""
_COUNTED = Origin.COUNTED | Origin.STEPS


def dtype_of(module: nn.Module, model_dtype: torch.dtype) -> torch.dtype | None:
    """The low dtype that a forward may compute in: the model's, or that of what its module holds; or None."""
    held = (value.dtype for _, value in entries(module) if isinstance(value, Tensor))
    return next((dtype for dtype in (model_dtype, *held) if dtype in LOW), None)


def may_be_asked(module: nn.Module) -> bool:
    """Whether a module only makes, or only applies, what it takes sines of; or counts that beside weights."""
    stock: Any = stock_class(module)
    facts, has_weights = bytecode.facts(stock), next(module.parameters(), None) is not None
    turns = facts.turns_counts if has_weights else facts.turns
    return turns and not (bytecode.conduct(stock).attends or bytecode.talks_to_ranks(stock))


class _Phases(Provenance):
    """Notes what sines and cosines are taken of that is made of counts; apart, if of trained weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []
        self.learned: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        phase = _phase(getattr(func, "__name__", ""), args, kwargs or {})
        origin = Origin.NONE if phase is None else self.origin(phase)
        if phase is not None and origin & _COUNTED:
            values, noted = phase.detach(), self.learned if origin & Origin.GIVEN else self.taken
            noted.append((values.imag if values.is_complex() else values).to("cpu", copy=True))
        return super().__torch_function__(func, types, args, kwargs)


def _phase(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return what an operation takes sines and cosines of, if it does."""
    given = None
    if name == "polar":
        given = args[1] if len(args) > 1 else kwargs.get("angle")
    elif name.rstrip("_") in ("sin", "cos", "exp"):
        given = args[0] if args else kwargs.get("input")
    if not isinstance(given, Tensor) or given.is_meta:
        return None
    return given if given.is_complex() or (given.is_floating_point() and "exp" not in name) else None


def error_of(module: nn.Module, dtype: torch.dtype) -> tuple[float | None, bool]:
    """How far the phases of a module are off, on the circle of radius 1, and whether that is certain.

    0 where one rounding explains it. It is not certain of phases of trained weights, which are looked at
    where others are right. None where no counts reach sines, or not the same ones in each call.

    Raises:
        UnansweredError: nobody knows how to ask it.
    """
    return by_names(module, functools.partial(_error_of, module, dtype))


def by_names(module: nn.Module, measure: Callable[[bool], T]) -> T:
    """Return what is measured by the names of arguments; or without, where nothing answers to them.

    Raises:
        UnansweredError: nobody knows how to ask it.
    """
    try:
        return measure(True)
    except UnansweredError:
        if not _told_by_name(_required(module)):
            raise
    return measure(False)


def ways(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Yield the ways to call the forward of a module; none where nobody knows its arguments.

    Each is a function of the dtype to compute in, beside how many places it has.
    """
    with contextlib.suppress(UnansweredError):
        yield from _arguments(module, by_name=True)


def _error_of(module: nn.Module, dtype: torch.dtype, by_name: bool) -> tuple[float | None, bool]:
    problem, told, learned = UnansweredError("its forward takes arguments that nobody knows"), None, 0.0
    # A shape that fits by chance may leave few places, or the first alone: it shows no harm, and others may.
    answered = 0
    for arguments, count in _arguments(module, by_name):
        try:
            copies = alone(module), alone(module)
            low, again = (_phases(one, arguments(dtype), seed) for seed, one in enumerate(copies))
            true = _phases(in_fp32(alone(module), copies[0]), arguments(torch.float32), 0)
        except UnansweredError as error:
            problem = error
            if isinstance(error.__cause__, RecursionError):
                break  # which takes long, and other arguments end no recursion
            continue
        of_weights = _worst(low.learned, again.learned, true.learned) or 0.0
        if of_weights > _OF_WEIGHTS * torch.finfo(dtype).eps:
            learned = max(learned, of_weights)
        worst, answered = _worst(low.taken, again.taken, true.taken), answered + 1
        if worst is not None:
            told = worst if worst > _ROUNDINGS * torch.finfo(dtype).eps else 0.0
        most = max((int(one.count_nonzero()) for one in (*true.taken, *true.learned)), default=count)
        if worst is None or told or learned or most > count // 2 or answered == _CALLS:
            break
    if not answered:
        raise problem
    return (learned, False) if learned and not told else (told, True)


def _worst(low: list[Tensor], again: list[Tensor], true: list[Tensor]) -> float | None:
    """How far phases are off at most; None where there are none, or not the same in each call."""
    shapes = [[one.shape for one in taken] for taken in (true, low, again)]
    if not true or shapes[0] != shapes[1] or shapes[1] != shapes[2] or not all(map(torch.equal, low, again)):
        return None
    return max(map(_distance, low, true))


def _distance(low: Tensor, true: Tensor) -> float:
    is_known = true.isfinite()
    if not is_known.any():
        return 0.0
    between = 2 * ((low[is_known].double() - true[is_known].double()) / 2).sin().abs()
    return float(between.nan_to_num(nan=2.0).max())


def alone(module: nn.Module) -> nn.Module:
    """Return a copy of a module to ask, which is not in training.

    Raises:
        UnansweredError: it cannot be copied.
    """
    held = (value for part in module.modules() for name, value in vars(part).items() if name != "forward")
    parts = {*module.modules()}
    if any(_holds_a_module(value, parts) for value in held):
        raise UnansweredError("a function that it holds refers to a module, which it may change")
    alone = isolated(module, most=_MOST)
    for part in alone.modules():
        vars(part)["training"] = False  # in training some jitter their positions
    return alone


def _holds_a_module(value: Any, parts: Set[nn.Module]) -> bool:
    """Whether a function has a module, or a method is of one that is no part of what is copied."""
    cells = filled_cells(value) if isinstance(value, types.FunctionType) else ()
    is_held = any(isinstance(cell.cell_contents, nn.Module) for cell in cells)
    bound = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
    return is_held or (isinstance(bound, nn.Module) and bound not in parts)


def _phases(module: nn.Module, arguments: dict[str, Any], seed: int) -> _Phases:
    phases = _Phases()
    for parameter in module.parameters():
        phases.note(parameter, Origin.GIVEN)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.dtype == torch.int64:
            phases.note(value, Origin.STEPS)
    asked(module, arguments, seed, phases)
    return phases


def asked(module: nn.Module, arguments: dict[str, Any], seed: int, watching: Provenance) -> Any:
    """Return what the forward of a copy of a module answers while somebody is ``watching``.

    Raises:
        UnansweredError: it raises, or changes what is outside of it.
    """
    try:
        with undisturbed(), (untouched := Untouched(stock_class(module), attributes(module), anew=True)):
            torch.manual_seed(seed)
            with answering("forward raised"), Bounded(_MADE), warnings.catch_warnings(), watching:
                warnings.simplefilter("ignore")  # nobody has called it so
                return untouched.run(functools.partial(module.forward, **arguments))
    except OutOfReachError as error:
        raise UnansweredError(str(error)) from error


def in_fp32(module: nn.Module, called: nn.Module) -> nn.Module:
    """Widen what a copy of a module holds, dtypes too; what its forward repairs is as it has repaired it.

    ``called``: a copy that has run in low precision.
    """
    for parameter in module.parameters():
        if parameter.dtype in LOW:
            parameter.data = parameter.data.float()
    for part, other in zip(module.modules(), called.modules(), strict=False):
        for name, value in list(entries(part)):
            if isinstance(value, Tensor) and value.dtype in LOW:
                now = get_table(other, name)
                is_repaired = isinstance(now, Tensor) and now.dtype == torch.float32
                is_repaired = is_repaired and now.shape == value.shape
                set_table(part, name, now if is_repaired else value.float())
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.dtype) and value in LOW:
                vars(part)[name] = torch.float32
    return module


def _arguments(module: nn.Module, by_name: bool) -> Iterator[tuple[Any, int]]:
    """Yield the ways to call forward, each a function of the dtype to compute in; how many places it has.

    The likeliest come first. There is one for a forward that has to be given nothing.
    """
    if not _required(module):
        yield functools.partial(values, module, (1, _LONG), _LONG), _LONG
        return
    tables = [value for _, value in entries(module) if isinstance(value, Tensor)]
    last = [table.shape[-1] for table in tables if table.dim()]
    of_tables = (*(2 * n for n in last if n > 1), *(n for n in last if n > 1))
    for width in dict.fromkeys((_WIDTH, *widths(module), *of_tables, *_told_widths(module))):
        for count in (_LONG, _SHORT):
            shapes = (
                *((1, count, width), (1, width, _SIDE, _SIDE), (1, 2, count, width), (1, count), (count,)),
                *((count, width), (count, 2, width), (count, width, 2, 2)),  # one position for each
            )
            for shape in shapes:
                yield functools.partial(values, module, shape, count, by_name=by_name), count


def _told_widths(module: nn.Module) -> list[int]:
    """Widths that whole numbers and lists of numbers say which a module keeps, such as ``dim``."""
    kept = [value for name, value in vars(module).items() if name not in OF_TORCH]
    told = [value for value in kept if type(value) is int]
    told += [2 * len(value) for value in kept if is_list(value)]
    return [width for width in told if 1 < width <= _WIDEST][:_FEW]


def widths(module: nn.Module) -> list[int]:
    """How many channels the weights of a module may take, the first of them first."""
    sizes = (one.shape[1] if one.dim() > 1 else one.numel() for one in module.parameters())
    return list(dict.fromkeys(size for size in sizes if size > 1))[:_FEW]


def values(
    module: nn.Module,
    shape: tuple[int, ...],
    count: int,
    dtype: torch.dtype,
    *,
    are_positions: bool = False,
    by_name: bool = True,
) -> dict[str, Any]:
    """Return by name what to call the forward of a module with: activations of a ``shape``, positions.

    ``are_positions``: what nothing is known of is positions, too. ``by_name``: sides, starts and ends are
    told by their names; or they are activations and positions.
    """
    names = _required(module)
    held = [value for _, value in entries(module) if isinstance(value, Tensor)]
    devices = (value.device for value in (*held, *module.parameters()) if not value.is_meta)
    device = next(devices, torch.device("cpu"))
    signs = originals.arange(int(torch.Size(shape).numel()), device=device) * 7 % 3 - 1
    made = {name: told(count, device) for name, told in _told_by_name(names).items()} if by_name else {}
    for name in names:
        if name in made:
            continue
        if "dtype" in name:
            made[name] = dtype
        elif "device" in name:
            made[name] = device
        elif name in ("shape", "size"):
            made[name] = torch.Size(shape)
        elif name in _LENGTHS:
            made[name] = count
        elif name == "attention_mask" and len(shape) < 4:
            made[name] = originals.arange(count, device=device).view(1, count) >= 0
        elif "mask" in name:
            made[name] = originals.arange(_SIDE * _SIDE, device=device).view(1, _SIDE, _SIDE) >= 0
        elif are_positions or name == "t" or any(part in name for part in _COUNTS):
            each = (count,) if shape[0] == count else (1, count)
            made[name] = originals.arange(count, device=device).view(shape if len(shape) < 2 else each)
        else:
            made[name] = signs.view(shape).to(dtype)
    return made


def _required(module: nn.Module) -> list[str]:
    """Names of what ``forward`` has to be given.

    Raises:
        UnansweredError: it has no signature.
    """
    try:
        parameters = [*signature_of(module.forward).parameters.values()]
    except (TypeError, ValueError) as error:
        raise UnansweredError("its forward has no signature") from error
    return [one.name for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]


def _told_by_name(names: list[str]) -> dict[str, Callable[[int, torch.device], Any]]:
    """Sides, a batch of one, starts and ends, each a function of how many places there are."""
    lowered = {name.lower() for name in names}
    told: dict[str, Callable[[int, torch.device], Any]] = {}
    for name in names:
        if any(name.lower() in sides and lowered >= {*sides} for sides in _SIDES):
            told[name] = lambda count, device: _SIDE
        elif name in _BATCHES and lowered & _LENGTHS:
            told[name] = lambda count, device: 1
        elif name in _STARTS:
            told[name] = lambda count, device: 0
        elif _ENDS.fullmatch(name):
            begins = [0] if name.startswith("cu_") else []
            told[name] = functools.partial(_ends, begins)
    return told


def _ends(begins: list[int], count: int, device: torch.device) -> Tensor:
    return originals.tensor([*begins, count], dtype=torch.int64, device=device)
