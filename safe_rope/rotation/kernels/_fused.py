"""The rotation of a few tokens as loops of inductor's own, which it fuses with what stands around them.

Calling an operator costs more than such a rotation. Each product is rounded before it is added to another:
the loops have the bits of the other kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from safe_rope._base.inductor import Inductor
from safe_rope.rotation.kernels._compiled import SMALLEST
from safe_rope.rotation.kernels._form import parse

_aten = torch.ops.aten


def loops(call: Inductor, xs: list[Any], cos: Any, sin: Any, key: str, conjugate: bool) -> list[Any] | None:
    """Return what ``safe_rope::rotary`` gives, of inductor's tensors; None where a kernel is faster.

    Args:
        call: calls an operator of torch with inductor's tensors.
        xs: what is rotated.
        cos: FP32.
        sin: as cos.
        key: of the `Form`.
        conjugate: whether to rotate by the negative angle.
    """
    if any(call.numel(x) >= SMALLEST for x in xs):
        return None
    form = parse(key)
    before, after = (form.out, form.pairs) if conjugate else (form.pairs, form.out)
    width = form.rotary_dim(call.shape(cos)[-1])

    def halves(table: Any, order: str) -> tuple[Any, Any]:
        if order == "shared":
            return table, table
        if order == "interleaved":
            first, second = (call(_aten.slice.Tensor, table, -1, start, width, 2) for start in (0, 1))
            return first, second
        first = call(_aten.slice.Tensor, table, -1, 0, width // 2)
        return first, first if order == "first" else call(_aten.slice.Tensor, table, -1, width // 2, width)

    add, subtract = _aten.add.Tensor, _aten.sub.Tensor
    of_first, of_second = (add, subtract) if conjugate else (subtract, add)
    (cos_first, cos_second), (sin_first, sin_second) = halves(cos, form.table), halves(sin, form.table)
    if conjugate:
        sin_first, sin_second = sin_second, sin_first

    def rotated(x: Any) -> Any:
        first, second = (call.to(part, torch.float32) for part in halves(x, before))
        parts = (
            call(of_first, call.product(first, cos_first), call.product(second, sin_first)),
            call(of_second, call.product(second, cos_second), call.product(first, sin_second)),
        )
        low = [call.to(part, call.dtype(x)) for part in parts]
        if after == "interleaved":
            low = [call(_aten.unsqueeze.default, part, -1) for part in low]
        turned = call.joined(low)
        shape = call.shape(x)
        if after == "interleaved":
            turned = call(_aten.view.default, turned, [*shape[:-1], width])
        if width == shape[-1]:
            return turned
        rest = call(_aten.slice.Tensor, x, -1, width, shape[-1])
        return call.joined([turned, call.to(rest, call.dtype(x))])

    return [rotated(x) for x in xs]
