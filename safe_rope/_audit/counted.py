"""Whether a forward that takes no sines counts in a dtype that cannot hold its counts, and it shows.

Rounded counts alone are no damage, as where a result is rounded once. Results that differ are none, as what a
forward makes of right ones in the model's dtype. Two calls tell the two apart. What differs in a short one as
well, whose counts every dtype holds, is not for the counts. Where weights take part, a call whose counts stay
exact until they meet those has the same arithmetic: what is better there is for the counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.computed import alone, asked, by_names, in_fp32, values, widths
from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import in_real_numbers, tensors_in
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.provenance import Activations, Origin, Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import is_librarys
from safe_rope._recognition.waves import FEWEST
from safe_rope.rotation import plain
from safe_rope.rotation._cos_sin import CosSin

_SHORT, _WIDTH = 48, 64
_ROUNDINGS = 1.5
"""In units of a 16-bit dtype, relatively: what rounding once or twice does as well."""
_MOST = 2**28
"""Numbers that one tensor of a long call may have."""
_ENOUGH = 2**23
"""Numbers in a tensor of a shorter call that tell how many a long one makes."""
_ALIKE = 3
"""Calls that fail alike, so that it is no shape that makes them fail."""
_MORE = 2.0
"""How many times the error of exact counts in the same arithmetic is more than noise."""
_SMALL = 1e-3
"""Of the largest result: what is smaller is measured as if it were that large."""


def may_be_asked(module: nn.Module) -> bool:
    """Whether a module counts in its forward, and takes no sines."""
    stock: Any = stock_class(module)
    facts = bytecode.facts(stock)
    does_more = facts.turns or bytecode.talks_to_ranks(stock) or is_librarys(stock)
    if next(module.parameters(), None) is None:
        does_more |= bytecode.conduct(stock).attends
    return facts.counts_when_called and not does_more


def error_of(module: nn.Module, dtype: torch.dtype) -> tuple[float, bool]:
    """How far what a module returns is off as its counts are rounded, and whether that is certain.

    0 where no counts are rounded, or nothing shows it.

    Raises:
        UnansweredError: nobody knows how to ask it.
    """
    return by_names(module, functools.partial(_error_of, module, dtype))


def _error_of(module: nn.Module, dtype: torch.dtype, by_name: bool) -> tuple[float, bool]:
    worst, certain, problem, alike = 0.0, True, None, 0
    answered, has_weights = False, next(module.parameters(), None) is not None
    measured = _off_beside_weights if has_weights else _off_alone
    length = int(2.35 / torch.finfo(dtype).eps)
    for shape, are_positions in _shapes(module):
        long, short = (
            functools.partial(
                values, module, shape(count), count, are_positions=are_positions, by_name=by_name
            )
            for count in (length, _SHORT)
        )
        try:
            is_idle = has_weights and not _counts_low(module, short(dtype))
            if is_idle or _is_too_large(module, shape, length, dtype):
                answered |= is_idle
                continue
            off, is_certain = measured(module, long, dtype)
            answered = True
            if off > worst:
                worst, certain = off, is_certain and (has_weights or not _off(module, short, dtype)[0])
            if has_weights and worst:
                break
        except UnansweredError as error:
            alike = alike + 1 if str(error) == str(problem) else 1
            problem = error
            if has_weights and alike == _ALIKE:
                break
    if not answered and problem is not None:
        raise problem
    return worst, certain


def _off(module: nn.Module, arguments: Any, dtype: torch.dtype) -> tuple[float, bool]:
    """How far the results of a call are off beyond their roundings, and whether it has rounded counts."""
    copies = alone(module), alone(module)
    (low, coarse), (again, _) = (_results(one, arguments(dtype), seed) for seed, one in enumerate(copies))
    true, _ = _results(in_fp32(alone(module), copies[0]), arguments(torch.float32), 0)
    if [one.shape for one in low] != [one.shape for one in true] or not all(map(torch.equal, low, again)):
        return 0.0, False
    return max((_distance(*pair, dtype) for pair in zip(low, true, strict=True)), default=0.0), coarse


def _off_alone(module: nn.Module, arguments: Any, dtype: torch.dtype) -> tuple[float, bool]:
    """As `_off_beside_weights`, of a module without weights, where a short call says what is certain."""
    off, coarse = _off(module, arguments, dtype)
    return off if coarse else 0.0, True


def _counts_low(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a call makes counts in 16 bits, of no activations and of no weights."""
    watching = _LowCounts()
    _results(alone(module), arguments, 0, watching)
    return watching.are_low


class _LowCounts(Activations):
    """Notes whether counts in 16 bits are made; what has few values, as a mask, is none."""

    are_low = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for made in tensors_in(result) if not self.are_low else ():
            if _is_low_count(made, self.origin(made)):
                self.are_low = len(set(made.detach().reshape(-1).tolist())) > FEWEST
        return result


def _off_beside_weights(module: nn.Module, arguments: Any, dtype: torch.dtype) -> tuple[float, bool]:
    """How far the results of a call that rounds its counts are off for that, and whether that is certain."""
    copied = alone(module)
    low, coarse = _results(copied, arguments(dtype), 0)
    if not coarse:
        return 0.0, True
    again, _ = _results(alone(module), arguments(dtype), 0)
    true, _ = _results(in_fp32(alone(module), copied), arguments(torch.float32), 0)
    try:
        exact, _ = _results(alone(module), arguments(dtype), 0, _ExactCounts())
    except UnansweredError:
        exact = []
    is_told = [one.shape for one in exact] == [one.shape for one in low]
    if [one.shape for one in low] != [one.shape for one in true] or not all(map(torch.equal, low, again)):
        return 0.0, True
    worst = 0.0
    for one, wide, other in zip(low, true, exact if is_told else true, strict=True):
        error, left = _distance(one, wide, dtype), _distance(other, wide, dtype)
        if not torch.equal(one, other) and error > _MORE * left:
            worst = max(worst, error)
    return worst, is_told


_CASTS = {Tensor.bfloat16, Tensor.half}


class _ExactCounts(Activations):
    """Counts in FP32 what is counted in a lower dtype; it is rounded once where it meets anything else."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(made, Tensor) or isinstance(made, CosSin):
            return made
        origin = self.origin(made)
        if not _is_low_count(made, origin):
            return made
        if func in _CASTS:
            func, args = Tensor.float, args[:1]
        wide = func(*map(_widened, args), **{name: _widened(one) for name, one in (kwargs or {}).items()})
        exact = CosSin(_widened(wide), made.dtype, faced=True)
        self.note(exact, origin)
        return exact


def _is_low_count(made: Tensor, origin: Origin) -> bool:
    return made.dtype in LOW and bool(origin & Origin.COUNTED) and not origin & Origin.GIVEN


def _widened(value: Any) -> Any:
    """Return a low tensor or dtype in FP32, anything else as it is."""
    if isinstance(value, torch.dtype):
        return torch.float32 if value in LOW else value
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


class _Largest(Provenance):
    """Notes how many numbers the largest tensor has that is made."""

    size = 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.size = max((self.size, *(made.numel() for made in tensors_in(result))))
        return result


def _is_too_large(module: nn.Module, shape: Any, length: int, dtype: torch.dtype) -> bool:
    """Whether shorter calls say that a long one makes too much, as pairs of all places of a map are."""
    count, before, size = _SHORT // 8, 1, 1
    while 2 * count < length and size < _ENOUGH:
        count, before, largest = 2 * count, size, _Largest()
        try:
            copied = alone(module)
            asked(copied, values(copied, shape(count), count, dtype), 0, largest)
        except UnansweredError:
            return False  # the long call says why
        size = largest.size
    growth = max(0.0, math.log2(size / before))
    return size * math.pow(length / count, growth) > _MOST


def _results(
    module: nn.Module, arguments: dict[str, Any], seed: int, watching: Activations | None = None
) -> tuple[list[Tensor], bool]:
    watching = watching or Activations()
    for parameter in module.parameters():
        watching.note(parameter, Origin.GIVEN)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.dtype != torch.bool:
            watching.note(value, Origin.GIVEN if value.is_floating_point() else Origin.COUNTED)
    made = list(tensors_in(asked(module, arguments, seed, watching)))
    return [plain(one).detach() for one in made], watching.coarse is not None


def _distance(low: Tensor, true: Tensor, dtype: torch.dtype) -> float:
    if not true.is_floating_point() and not true.is_complex():
        return float((low.double() - true.double()).abs().max()) if true.numel() else 0.0
    one, other = (in_real_numbers(x).double() for x in (low, true))
    off = (one - other).abs().masked_fill(one == other, 0.0).nan_to_num(nan=torch.inf)
    size = other.abs().nan_to_num(nan=0.0, posinf=0.0)
    scale = float(size.max()) if size.numel() else 0.0
    allowed = _ROUNDINGS * torch.finfo(dtype).eps * size.clamp(min=_SMALL * scale)
    off = off.masked_fill((off <= allowed) | (one.isnan() & other.isnan()), 0.0)
    return float(off.max()) if off.numel() else 0.0


def _shapes(module: nn.Module) -> Iterator[tuple[Callable[[int], tuple[int, ...]], bool]]:
    """Yield shapes of activations for a count, and whether what nothing is known of is positions instead."""
    shapes: list[Callable[[int], tuple[int, ...]]] = []
    for width in dict.fromkeys((*widths(module), _WIDTH)):
        shapes += (functools.partial(_rows, width, 1), functools.partial(_rows, width))
    flat: list[Callable[[int], tuple[int, ...]]] = [lambda count: (1, count), lambda count: (count,)]
    shapes += (
        lambda count: (1, 2, count, count),
        lambda count: (1, 2, *2 * (math.isqrt(count - 1) + 1,)),
        *flat,
    )
    yield from ((shape, False) for shape in shapes)
    if next(module.parameters(), None) is not None:
        yield from ((shape, True) for shape in flat)


def _rows(width: int, *sizes_and_count: int) -> tuple[int, ...]:
    return (*sizes_and_count, width)
