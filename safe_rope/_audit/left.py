"""Frozen parameters that no constructor explains: judged by their dtype, and by their values alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.report import Severity
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import local_part
from safe_rope._base.turned import turned_when_called
from safe_rope._protection.frozen import Frozen, is_a_wave
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import may_be_turned
from safe_rope._recognition.truths import parametrized
from safe_rope.rotation import plain


def judged(found: Frozen, built: nn.Module | None) -> tuple[Severity, str, torch.dtype | None]:
    """Return the verdict on a frozen parameter, why, and its dtype where its values are what is told.

    ``built`` is what the constructor of its module makes, as far as it is known.
    """
    computed = dict(parametrized(found.module, found.name.__eq__)).get(found.name)
    value: Any = operator.attrgetter(found.name)(found.module) if computed is None else computed
    here = plain(local_part(getattr(value, "ds_tensor", value))).detach()
    said = _wrong(found, here, built)
    if said is None:
        return ("damaged" if found.is_damaged else "note"), found.reason, None
    # A checkpoint may have rounded it, and it may be meant so.
    return ("damaged" if bool(here.isnan().any()) else "unknown"), said, here.dtype


def _wrong(found: Frozen, here: Tensor, built: nn.Module | None) -> str | None:
    """Say what is wrong with the values ``here``, this rank's; None where nothing tells it."""
    name, low, is_low = found.name, dtype_name(here.dtype), here.dtype in LOW
    if not (found.is_damaged or here.is_meta):
        is_turned = may_be_turned(found.module, here)
        said = damaged_in_itself(name, here.cpu().squeeze(), is_turned=is_turned)
        if said is not None:
            return said
    if here.dtype == torch.float32 and is_a_wave(here):
        rounded = low_dtype_of(here.cpu())
        if rounded is not None:
            return f"{dtype_name(rounded)}-rounded sines"
    part = name.rpartition(".")[0]
    if is_low and not found.is_damaged and part in turned_when_called(stock_class(found.module)):
        return f"{low}-rounded values, which sines are taken of products with"
    if is_low and here.numel() == 1 and not _is_made(name, here, built):
        return f"a {low} number beside positions, and its constructor gives another"
    return None


def _is_made(name: str, number: Tensor, built: nn.Module | None) -> bool:
    """Whether the constructor makes that very number, as far as it tells."""
    try:
        made = operator.attrgetter(name)(built)
    except AttributeError:
        return True
    is_told = isinstance(made, Tensor) and made.numel() == 1 and not made.is_meta
    return not is_told or float(made.detach()) == float(number)
