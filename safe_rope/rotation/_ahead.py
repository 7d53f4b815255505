"""Cos and sin of consecutive positions, made together: decoding asks for one after the other.

What a step asks for is a row then, on which nothing is left to compute, neither for the tables nor for the
functions that apply them. A row is lent (`CosSin.lent`): whoever writes to it has a copy first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from safe_rope.rotation._cos_sin import CosSin
from safe_rope.rotation.kernels import Form, _few

ROWS = 64
_TOGETHER = 8
"""Rows that are marked at a time: one alone costs more, and all those that nobody asks for, too."""


class Ahead:
    """Cos and sin of `ROWS` positions, each for all sequences of a batch.

    Args:
        start: the first position.
        cos: FP32 ``[..., 1, ROWS, width]`` on CPU; nobody writes to it.
        sin: the same for sin.
        batch: how many sequences there are.
        nominal: the dtype that the stock model's tables have.
    """

    def __init__(self, start: int, cos: Tensor, sin: Tensor, batch: int, nominal: torch.dtype) -> None:
        self.start, self.nominal = start, nominal
        self._tables = cos, sin
        shape = (*cos.shape[:-3], batch, *cos.shape[-2:])
        split = (torch.split(table.expand(shape), 1, -2) for table in (cos, sin))
        self._rows = list(zip(*split, strict=True))
        self._strides = self._rows[0][0].clone(memory_format=torch.contiguous_format).stride()
        self._made: list[tuple[CosSin, CosSin] | None] = []
        self.last: dict[Any, Any] = {}
        """What each function that applies rows has been called with last, and what it rotated that by."""
        self._spread: dict[tuple[str, str, bool], list[tuple[Tensor, ...]]] = {}

    def row(self, position: int) -> tuple[CosSin, CosSin] | None:
        """Return cos and sin ``[..., batch, 1, width]`` of a position; None where it is not among these."""
        index = position - self.start
        if not 0 <= index < ROWS:
            return None
        while (first := len(self._made)) <= index:
            # Another thread may do the same.
            self._made[first : first + _TOGETHER] = [self._make(first + more) for more in range(_TOGETHER)]
        made, self._made[index] = self._made[index], None
        return made or self._make(index)  # each is handed out once: it is its holder's to write to

    def _make(self, index: int) -> tuple[CosSin, CosSin]:
        details: Any = {"faced": True, "strides": self._strides}
        cos, sin = (CosSin(table, self.nominal, **details) for table in self._rows[index])
        cos.lent = sin.lent = True
        cos.row = sin.row = Row(self, index, id(cos))
        return cos, sin

    def spread(self, form: Form, is_back: bool) -> list[tuple[Tensor, ...]]:
        """Return the columns of each row, each ``[rotary_dim]``, as `_few.turn` takes them."""
        key = form.table, form.out, is_back  # all that decides: a form as a key is hashed in Python
        spread = self._spread.get(key)
        if spread is None:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = (table.reshape(ROWS, -1) for table in self._tables)
                cos, sin = _few.columns(cos, sin.neg() if is_back else sin, form)
                spread = self._spread[key] = list(zip(cos.unbind(0), sin.unbind(0), strict=True))
        return spread


class Row(NamedTuple):
    """Which row of which rows a cos and a sin are; ``is_back``: it is that of the negated sin."""

    ahead: Ahead
    at: int
    cos: int
    is_back: bool = False

    def is_of(self, cos: Any, sin: Any) -> bool:
        """Whether nobody has written to one of them or swapped them; and all sequences are alike."""
        # Who writes to a row has a copy, which is none.
        other = getattr(sin, "row", None)
        is_both = other is self or (other is not None and other._replace(is_back=False) == self)
        return is_both and sin is not cos and id(cos) == self.cos and cos.dim() == 3
