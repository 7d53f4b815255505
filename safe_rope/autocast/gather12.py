"""ZeRO 1 and 2: gather updated weights in the autocast dtype if that changes no result.

After a step every rank holds its partition of the FP32 weights and needs the others'. The forward uses a safe
parameter only after a cast to the autocast dtype, so the cast can come before the gather. The forward's
results are the same to the bit. A rank's own partition, the optimizer's master weights and everything
that is not safe stay FP32. Other readers of FP32 are kept away from rounded weights (reads.py), and a loss
that is one is told (losses.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope.autocast import _deepspeed

logger = logging.getLogger(__name__)

Piece = tuple[int, int, bool]  # start and end in the flat group, and whether it may be low


class LowPrecisionGather:
    """The gather after each step of one ZeRO 1 or 2 optimizer, in ``dtype`` for the parameters of ``safe``.

    ``rounded`` says whether parameters hold values of the autocast dtype now, ``safe`` holds the ids of those
    that may. ``read`` is set where a loss reads one in FP32 before the first gather: none may then.
    """

    def __init__(self, optimizer: Any, safe: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self.safe = {id(parameter) for parameter in safe}
        self._dtype = dtype
        self._groups: list[list[list[Piece]]] | None = None  # of each group, of each rank
        self.rounded = self.read = False
        _deepspeed.around(optimizer, "step", self._step)

    @property
    def has_run(self) -> bool:
        """Whether it is known what each rank sends."""
        return self._groups is not None

    def restore(self) -> None:
        """Gather the FP32 weights. Every rank has to call it; it does nothing where nothing is rounded."""
        if self.rounded:
            _deepspeed.gather_groups(self._optimizer)
            self.rounded = False

    @property
    def process_groups(self) -> list[Any]:
        """The groups of ranks that share the weights."""
        return list(self._optimizer.real_dp_process_group)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _deepspeed.replaced_gather(self._gather):
            return original(*args, **kwargs)

    def _gather(self, original: Callable[..., Any], **arguments: Any) -> Any:
        flats, process_groups = arguments["groups_flat"], arguments["dp_process_group"]
        if self._groups is None:
            if _deepspeed.any_rank(self.read, flats[0].device, process_groups[0]):
                self.safe.clear()
                if torch.distributed.get_rank() == 0:
                    logger.info("the loss reads weights outside of the forward: all are gathered in FP32")
            self._groups = [self._layout(i, flat) for i, flat in enumerate(flats)]
        shared = [ranks for ranks in self._groups if len(ranks) > 1]
        if not any(low for ranks in shared for pieces in ranks for _, _, low in pieces):
            return original(**arguments)
        limit = int(arguments["allgather_bucket_size"])
        self.rounded = True  # an interrupt among the broadcasts leaves some
        for flat, process_group, ranks in zip(flats, process_groups, self._groups, strict=True):
            if len(ranks) > 1:
                self._exchange(flat, process_group, ranks, limit)
        return None

    def _exchange(self, flat: Tensor, process_group: Any, ranks: list[list[Piece]], limit: int) -> None:
        """Send every rank's pieces to all. Ranks hold unequal shares of safe parameters, hence broadcasts."""
        rank = torch.distributed.get_rank(process_group)
        for sender, pieces in enumerate(ranks):
            for low in (True, False):
                for message in _messages([piece for piece in pieces if piece[2] is low], limit):
                    self._send(flat, process_group, sender, sender == rank, message, low)

    def _send(
        self, flat: Tensor, process_group: Any, source: int, own: bool, message: list[Piece], low: bool
    ) -> None:
        views = [flat.narrow(0, start, end - start) for start, end, _ in message]
        if not low and len(views) == 1:
            _deepspeed.broadcast(views[0], source, process_group)
            return
        numel = sum(view.numel() for view in views)
        buffer = torch.empty(numel, dtype=self._dtype if low else flat.dtype, device=flat.device)
        parts = torch.split(buffer, [view.numel() for view in views])
        if own:
            for part, view in zip(parts, views, strict=True):
                part.copy_(view)
        _deepspeed.broadcast(buffer, source, process_group)
        if not own:  # a rank's own weights stay exact
            for part, view in zip(parts, views, strict=True):
                view.copy_(part)

    def _layout(self, index: int, flat: Tensor) -> list[list[Piece]]:
        """Find the parameters in the flat buffer by where their storage lies, padding by what is left."""

        def span(tensor: Tensor) -> tuple[int, int]:
            start = int(tensor.storage_offset() - flat.storage_offset())
            return start, start + tensor.numel()

        parameters = [parameter for parameter in self._optimizer.bit16_groups[index] if parameter.numel()]
        bounds = sorted((*span(p.data), id(p) in self.safe) for p in parameters)
        return [
            _cut(bounds, *span(part)) for part in self._optimizer.parallel_partitioned_bit16_groups[index]
        ]


def _cut(bounds: list[Piece], start: int, end: int) -> list[Piece]:
    """The part of every parameter between ``start`` and ``end``, neighbours of one kind joined."""
    pieces: list[Piece] = []
    for first, last, low in bounds:
        first, last = max(first, start), min(last, end)
        if first < last:
            if pieces and pieces[-1][1:] == (first, low):
                first = pieces.pop()[0]
            pieces.append((first, last, low))
    return pieces


def _messages(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pack pieces into messages of at most ``limit`` elements."""
    message: list[Piece] = []
    room = limit
    for start, end, low in pieces:
        while start < end:
            stop = min(end, start + room)
            message.append((start, stop, low))
            room -= stop - start
            start = stop
            if not room:
                yield message
                message, room = [], limit
    if message:
        yield message
