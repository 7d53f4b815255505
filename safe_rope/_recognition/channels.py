"""Which channel of a stock table holds which frequency, and of which position axis."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from safe_rope._base.torch_private import WithoutTorchFunction, is_dispatched

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Channels:
    """For each channel of cos and sin the index of its frequency, and of its axis where axes are merged."""

    order: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    layout: tuple[str | None, int] = field(init=False, repr=False, compare=False)
    """The name of an order that needs no index, and of how many frequencies it is."""

    def __post_init__(self) -> None:
        count = max(self.order) + 1
        layout = next((name for name, order in _layouts(count).items() if order == self.order), None)
        object.__setattr__(self, "layout", (layout, count))

    def arrange(self, half: torch.Tensor, several_axes: bool) -> torch.Tensor:
        """Turn one value for each frequency into the channels of the stock table.

        Args:
            half: [..., rotary_dim // 2], with the position axes in front where there are several.
            several_axes: whether the first dimension counts position axes.

        """
        if several_axes and self.axes is not None:
            index, axis = _index(self.order, half), _index(self.axes, half)
            return half.movedim(-1, 1)[axis, index].movedim(0, -1)
        layout, count = self.layout
        if half.shape[-1] == count:
            if layout == "half":
                return torch.cat((half, half), dim=-1)
            if layout == "interleaved":
                return half.repeat_interleave(2, dim=-1)
            if layout == "plain":
                return half
        return half[..., _index(self.order, half)]


def _layouts(count: int) -> dict[str, tuple[int, ...]]:
    """The orders of ``count`` frequencies that have a name."""
    return {
        "plain": tuple(range(count)),
        "half": (*range(count), *range(count)),
        "interleaved": tuple(i // 2 for i in range(2 * count)),
    }


def _index(values: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """``values`` as a tensor on the device of ``like``, copied there once."""
    if torch.compiler.is_compiling() or is_dispatched():
        return torch.tensor(values, device=like.device)
    return _index_on(values, like.device)


@functools.lru_cache(maxsize=64)
def _index_on(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def match(stock: Tables, own: Tables, axes: bool) -> Channels | None:
    """Find every channel of ``stock`` in ``own``, to the bit; None if one is not there.

    Frequencies that are the same do not tell which channel is whose, and others may be adopted later. Where
    there are such, the one layout that fits is found, or nothing; of merged axes nothing.

    Args:
        stock: cos and sin of the stock module, [(axes,) batch, positions, channels].
        own: cos and sin of our table, [(axes,) batch, positions, rotary_dim // 2].
        axes: whether the positions had several axes.

    """
    if any(t.dtype != torch.float32 for t in stock) or stock[0].shape != stock[1].shape:
        return None
    merged = axes and stock[0].dim() == own[0].dim() - 1
    shape = own[0].shape[1:-1] if merged else own[0].shape[:-1]
    if stock[0].shape[:-1] != shape:
        return None
    theirs = torch.cat([table.reshape(-1, table.shape[-1]) for table in stock])
    ours = [_columns(table) if merged else table.reshape(-1, table.shape[-1]) for table in own]
    columns = torch.cat(ours)
    with WithoutTorchFunction():  # a torch.device context makes every call several times as dear
        equal = (theirs[:, :, None] == columns[:, None]).all(0)
        if not bool(equal.any(1).all()):
            return None
        places = equal.int().argmax(1).tolist()  # the first of each
        several = bool((equal.sum(1) > 1).any())
    frequencies = own[0].shape[-1]
    if several:
        orders = {order for order in _layouts(frequencies).values() if len(order) == len(places)}
        fitting = [order for order in orders if all(equal[range(len(order)), order].tolist())]
        return Channels(fitting[0]) if len(fitting) == 1 and not merged else None
    order = tuple(place % frequencies for place in places)
    return Channels(order, tuple(place // frequencies for place in places) if merged else None)


def _columns(table: torch.Tensor) -> torch.Tensor:
    """[axes, batch, positions, frequencies] to [batch * positions, axes * frequencies]."""
    return table.permute(1, 2, 0, 3).reshape(-1, table.shape[0] * table.shape[-1])
