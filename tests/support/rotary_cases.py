"""Inputs for which every implementation of the rotation has to give the eager one's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope.rotation.kernels import Form, _eager
from safe_rope.rotation.kernels._form import planes, table_planes

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
SHAPES = (
    # leading dimensions of x, and of cos and sin
    ((2, 3, 5), (2, 1, 5)),
    ((2, 5, 3), (1, 5, 1)),
    ((5, 3), (5, 1)),
    ((1, 40, 7), (1, 1, 7)),
    ((7,), (7,)),
    ((2, 3, 4, 5), (2, 3, 1, 5)),
    ((2, 2, 3, 2, 2), (1, 1, 1, 1, 2)),
    ((2, 2, 2, 2), (2, 2, 2, 1)),
)


class Case(NamedTuple):
    """One x, its tables, and how they make pairs."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    form: Form
    rotary_dim: int
    conjugate: bool

    def result(self, rotate: Rotate) -> Tensor:
        """What ``rotate`` makes of it; elements beyond rotary_dim keep x's values."""
        before, after = self.form.pairs, self.form.out
        if self.conjugate:
            before, after = after, before
        out = self.x.clone()
        tables = (table_planes(t, self.form.table, self.rotary_dim) for t in (self.cos, self.sin))
        rotate(
            planes(out, after, self.rotary_dim),
            planes(self.x, before, self.rotary_dim),
            *tables,
            self.conjugate,
        )
        return out

    def eager(self) -> Tensor:
        """What the eager implementation makes of it."""
        before, after = self.form.pairs, self.form.out
        if self.conjugate:
            before, after = after, before
        columns = _eager.columns(self.cos, self.sin, self.form, self.conjugate)
        return _eager.rotated(self.x, *columns, before, after)

    def differs(self, rotate: Rotate, device: str = "cpu") -> bool:
        """Whether ``rotate`` on ``device`` gives another bit than the eager implementation on the CPU."""
        there = self._replace(x=self.x.to(device), cos=self.cos.to(device), sin=self.sin.to(device))
        return not torch.equal(there.result(rotate).cpu(), self.eager())


def cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """Every dtype, pairing, table, shape and direction, with memory that is dense and that is not."""
    torch.manual_seed(0)
    forms = itertools.product(("half", "interleaved"), ("half", "interleaved"))
    tables = ("shared", "half", "interleaved", "first")
    for dtype, (pairs, out), table in itertools.product(dtypes, forms, tables):
        for (head_dim, rotary_dim), (leading, rows) in zip(
            itertools.cycle(((16, 16), (24, 16), (10, 6))), SHAPES, strict=False
        ):
            x = torch.randn(*leading, head_dim).to(dtype)
            if len(leading) == 3:
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            width = rotary_dim // 2 if table == "shared" else rotary_dim
            cos, sin = torch.randn(*rows, width), torch.randn(*rows, width)
            for conjugate in (False, True):
                yield Case(x, cos, sin, Form(pairs, out, table), rotary_dim, conjugate)
