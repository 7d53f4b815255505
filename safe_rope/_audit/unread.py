"""Tables whose numbers no answer depends on: forward gives the same where they hold none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import device_of, isolated
from safe_rope._base import methods, originals
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import is_shared, tensors_in
from safe_rope._recognition.ask import UnansweredError, ask
from safe_rope._recognition.holdings import get_table, nested, set_table
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import calling_convention
from safe_rope.rotation import plain

_FEW = 2


def is_unread(module: nn.Module, name: str, layer_type: str | None, longest: int) -> bool:
    """Whether forward answers the same without the numbers of a table.

    It is asked for few positions, for as many as the table has rows, and for the ``longest``.
    """
    table, device = _found(module, name), device_of(module)
    if not isinstance(table, Tensor) or table.is_meta or device is None:
        return False
    if not (table.is_floating_point() or table.is_complex()):
        return False
    dtypes = {torch.float32} | ({table.dtype} if table.is_floating_point() else set())
    rows = {table.shape[-2]} if table.dim() > 1 else set()
    if get_table(module, name) is None:
        dtypes |= set(LOW)  # a table for each dtype may stand in one container
    ways = [(length, dtype) for length in sorted({_FEW, longest, *rows} - {0, 1}) for dtype in dtypes]
    try:
        return all(_is_alike(module, name, layer_type, length, device, dtype) for length, dtype in ways)
    except UnansweredError:
        return False


def _found(module: nn.Module, name: str) -> Any:
    """Return a table of a module, from a container inside of a container, too."""
    table = get_table(module, name)
    return dict(nested(module)).get(name) if table is None else table


def _is_alike(
    module: nn.Module,
    name: str,
    layer_type: str | None,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    other = isolated(module)
    if get_table(other, name) is not None:
        set_table(other, name, torch.full_like(get_table(other, name), torch.nan))
    else:
        there = _found(other, name)
        if there is None or is_shared(there, _found(module, name)):
            return False  # no copy has its own of what is in a closure
        there.fill_(torch.nan)
    answers = []
    for one in (isolated(module), other):
        x = originals.empty((1, 1, _FEW, 8), dtype=dtype, device=device).zero_()
        by_length = calling_convention(stock_class(module)) == "length"
        ids = originals.tensor([[0, length - 1]], dtype=torch.int64, device=device)
        answers.append(list(map(plain, tensors_in(ask(one, length if by_length else ids, layer_type, x=x)))))
    return len(answers[0]) == len(answers[1]) > 0 and all(map(torch.equal, *answers))


def is_read_beside_forward(name: str, cls: type, others: Collection[type]) -> bool:
    """Whether methods that ``forward`` of a class does not reach, or other classes, read the table.

    Of one in a container, whether they read what is in that.
    """
    owner = name.partition(".")[0]
    beside = [one for other in others if other is not cls for one in methods.methods_of(other)]
    reached = set(methods.reached_by_forward(cls))
    beside += [one for one in methods.methods_of(cls) if one not in reached]
    return any(owner in methods.names_in(one) for one in beside if one.__name__ not in methods.INITIALISING)
