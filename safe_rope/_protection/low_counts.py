"""Positions that are counted, or arrive, in a dtype that counts no further than a few hundred."""

from __future__ import annotations

import logging
import warnings

import torch

from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import flattened, is_captured
from safe_rope._base.torch_private import unrecorded
from safe_rope._protection.as_stock import as_stock
from safe_rope._protection.calls import MANY, Call, call_key
from safe_rope._protection.shown import tell_once
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import COMPUTED_LOW
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.provenance import Activations, Origin
from safe_rope._recognition.waves import FEWEST
from safe_rope.errors import PrecisionWarning

logger = logging.getLogger(__name__)


def counts_low(call: Call) -> bool:
    """Whether a module that counts in its forward makes nothing else, and may count in a low dtype."""
    runner, state = call.state.runner, call.state
    if not state.only_counts or call.watched or state.code.writes or runner.is_opaque or runner.as_stock:
        return False
    held = call.held_low
    if not (call.has_low or held) or _is_captured(call) or not _may_count_beyond(call, held):
        return False
    key = call_key(call)
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
            given, _ = as_stock(call)
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
    text = (
        f"{call.state.owner} counts in {dtype}, which counts no further than "
        f"{2 / torch.finfo(dtype).eps:.0f}, beside activations: it does so as in the stock model. Count in "
        "torch.float32 or in integers"
    )
    tell_once(call.state.notes, "forward", COMPUTED_LOW, text)


def tell_of_rounded_counts(call: Call) -> None:
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


def _is_captured(call: Call) -> bool:
    """Whether a CUDA graph is captured, where nothing can be read."""
    return any(map(is_captured, call.leaves))
