"""Whether a forward that takes no sines counts in a dtype that cannot hold its counts, and it shows.

Rounded counts alone are no damage, as where a result is rounded once. Results that differ are none, as what a
forward makes of right ones in the model's dtype. A short call, whose counts every dtype holds, tells the two
apart: what differs there as well is not for the counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.computed import alone, asked, in_fp32, values
from safe_rope._base import bytecode
from safe_rope._base.tensors import in_real_numbers, tensors_in
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.provenance import Activations, Origin, Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import is_librarys
from safe_rope.rotation import plain

_SHORT, _WIDTH = 48, 64
_ROUNDINGS = 1.5
"""In units of a 16-bit dtype, relatively: what rounding once or twice does as well."""
_MOST = 2**28
"""Numbers that one tensor of a long call may have."""
_ENOUGH = 2**23
"""Numbers in a tensor of a shorter call that tell how many a long one makes."""
_SMALL = 1e-3
"""Of the largest result: what is smaller is measured as if it were that large."""


def may_be_asked(module: nn.Module) -> bool:
    """Whether a module counts in its forward and takes no sines; beside weights, in a dtype of something."""
    stock: Any = stock_class(module)
    facts, has_weights = bytecode.facts(stock), next(module.parameters(), None) is not None
    counts = bytecode.counts_as_given(stock) if has_weights else facts.counts_when_called
    does_more = facts.turns or bytecode.conduct(stock).attends or bytecode.talks_to_ranks(stock)
    return counts and not (does_more or is_librarys(stock))


def error_of(module: nn.Module, dtype: torch.dtype) -> tuple[float, bool]:
    """How far what a module returns is off as its counts are rounded, and whether that is certain.

    0 where no counts are rounded, or nothing shows it.

    Raises:
        UnansweredError: nobody knows how to ask it.
    """
    worst, certain, problem = 0.0, True, None
    answered = False
    for long, short in _arguments(module, int(2.35 / torch.finfo(dtype).eps), dtype):
        try:
            off, coarse = _off(module, long, dtype)
            answered = True
            if coarse and off > worst:
                worst, certain = off, not _off(module, short, dtype)[0]
        except UnansweredError as error:
            problem = error
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


def _results(module: nn.Module, arguments: dict[str, Any], seed: int) -> tuple[list[Tensor], bool]:
    watching, parameters = Activations(), list(module.parameters())
    for parameter in parameters:
        watching.note(parameter, Origin.GIVEN)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            watching.note(value, Origin.GIVEN)
    made = list(tensors_in(asked(module, arguments, seed, watching)))
    if parameters:  # what is made of weights is made in their dtype
        made = [one for one in made if not watching.origin(one) & Origin.GIVEN]
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


def _arguments(module: nn.Module, length: int, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    """Yield ways to call forward with many positions, each with the same way for few of them."""
    shapes: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda count: (1, count, _WIDTH),
        lambda count: (1, 2, count, count),
        lambda count: (1, 2, *2 * (math.isqrt(count - 1) + 1,)),
        lambda count: (1, count),
        lambda count: (count,),
    )
    for shape in shapes:
        if _is_too_large(module, shape, length, dtype):
            continue
        long, short = (functools.partial(values, module, shape(count), count) for count in (length, _SHORT))
        yield long, short
