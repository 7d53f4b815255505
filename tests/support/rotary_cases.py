"""Inputs for which every implementation of the rotation has to give the eager one's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope.rotation.kernels import Form, _eager, _triton
from safe_rope.rotation.kernels._form import planes, table_planes

RotatePlanes = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
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

    @property
    def orders(self) -> tuple[str, str]:
        """How the elements make pairs before and after."""
        before, after = self.form.pairs, self.form.out
        return (after, before) if self.conjugate else (before, after)

    def by_planes(self, rotate: RotatePlanes) -> Tensor:
        """What ``rotate`` makes of its planes; elements beyond rotary_dim keep x's values."""
        before, after = self.orders
        out = self.x.clone()
        tables = (table_planes(t, self.form.table, self.rotary_dim) for t in (self.cos, self.sin))
        rotate(
            planes(out, after, self.rotary_dim),
            planes(self.x, before, self.rotary_dim),
            *tables,
            self.conjugate,
        )
        return out

    def by_triton(self) -> Tensor:
        """What the Triton kernel makes of it, beside another tensor with fewer heads."""
        alike = [d for d in range(self.x.dim() - 1) if max(self.cos.shape[d], self.sin.shape[d]) == 1]
        fewer = self.x.narrow(alike[-1], 0, 1 + self.x.shape[alike[-1]] // 2) if alike else self.x
        outs = [torch.full_like(x, torch.nan) for x in (fewer, self.x, fewer)]
        xs = (fewer, self.x, fewer)
        _triton.rotate(outs, xs, self.cos, self.sin, *self.orders, self.form.table, self.conjugate)
        for out in (outs[0], outs[2]):
            expected = outs[1].narrow(alike[-1], 0, out.shape[alike[-1]]) if alike else outs[1]
            assert torch.equal(out, expected), self
        return outs[1]

    def eager(self) -> Tensor:
        """What the eager implementation makes of it."""
        columns = _eager.columns(self.cos, self.sin, self.form, self.conjugate)
        return _eager.rotated(self.x, *columns, *self.orders)

    def differs(self, rotate: Callable[[Case], Tensor], device: str = "cpu") -> bool:
        """Whether ``rotate`` on ``device`` gives another bit than the eager implementation on the CPU."""
        there = self._replace(x=self.x.to(device), cos=self.cos.to(device), sin=self.sin.to(device))
        return not torch.equal(rotate(there).cpu(), self.eager())


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
