"""What stands for a table after ``tensor.data = table``: torch copies the mark without what it marks.

No operator and no function of Python's sees that assignment. The copy has a dispatch key that the marks have,
which nobody else uses: the first operator on it finds there where the values are, and fills it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from safe_rope._base.torch_private import KEY_OF_MARKS, pytree

_ATTRIBUTE = "_safe_rope_table"
KEYS: dict[str, Any] = {} if KEY_OF_MARKS is None else {"_extra_dispatch_keys": KEY_OF_MARKS}
"""What a mark is made with; nothing where torch has no such keys."""
_library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
"""What is registered is so as long as this lives."""


def remember(mark: torch.Tensor, table: torch.Tensor) -> None:
    """Note in a mark's storage, which copies of the mark share, where its values are."""
    if KEYS:
        setattr(torch.Tensor.untyped_storage(mark), _ATTRIBUTE, table)


def with_memory(table: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of ``table`` in new memory, in the dtype and with the strides of ``like``."""
    reach = 1 + sum((n - 1) * step for n, step in zip(table.size(), table.stride(), strict=True))
    flat = table.as_strided((reach if table.numel() else 0,), (1,)).to(like.dtype, copy=True)
    return flat.as_strided(table.size(), table.stride(), 0)


def _filled(operator: Any, *args: Any, **kwargs: Any) -> Any:
    for one in pytree.tree_leaves((args, kwargs)):
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            table = getattr(torch.Tensor.untyped_storage(one), _ATTRIBUTE, None)
            if table is not None:
                one.data = with_memory(table, one)
    return operator(*args, **kwargs)


if KEYS:
    with contextlib.suppress(AttributeError, RuntimeError):  # before torch 2.6, or registered by another copy
        _library.fallback(_filled, "CustomRNGKeyId")
