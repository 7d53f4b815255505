"""ZeRO 1 and 2: gather updated weights in the autocast dtype where that changes no result.

After a step every rank holds its own partition of the FP32 weights and needs the others'. Of a safe parameter
the forward uses nothing but a cast to the autocast dtype, so the cast may come before the gather: what the
forward computes is the same to the bit. A rank's own partition, the optimizer's master weights and everything
that is not safe stay FP32. reads.py keeps FP32 readers away from rounded weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from safe_rope.autocast import _deepspeed

Piece = tuple[int, int, bool]  # start and end in the flat group, and whether it may be low


@dataclass(frozen=True)
class _Group:
    """One parameter group: every rank's pieces of the flat buffer."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def has_low(self) -> bool:
        return any(low for pieces in self.pieces for _, _, low in pieces)


class LowPrecisionGather:
    """The gather after the step of one ZeRO 1 or 2 optimizer.

    ``rounded`` says whether parameters hold values of the autocast dtype now.
    """

    def __init__(self, optimizer: Any, safe: set[int], dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._safe = safe
        self._dtype = dtype
        self._groups: list[_Group] | None = None
        self.rounded = False

    def install(self) -> None:
        """Let the optimizer's step gather through this."""
        step = self._optimizer.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            with _deepspeed.replaced_gather(self._gather):
                return step(*args, **kwargs)

        self._optimizer.step = stepped

    def restore(self) -> None:
        """Gather the FP32 weights. Every rank has to call it; it does nothing where nothing is rounded."""
        if self.rounded:
            _deepspeed.gather_groups(self._optimizer)
            self.rounded = False

    def _gather(self, original: Callable[..., Any], **arguments: Any) -> Any:
        flats, groups = arguments["groups_flat"], arguments["dp_process_group"]
        if self._groups is None:
            self._groups = [self._layout(i, flat) for i, flat in enumerate(flats)]
        if not any(group.has_low for group in self._groups):
            return original(**arguments)
        limit = int(arguments["allgather_bucket_size"])
        for flat, process_group, group in zip(flats, groups, self._groups, strict=True):
            if len(group.pieces) > 1:
                self._exchange(flat, process_group, group, limit)
        self.rounded = True
        return None

    def _exchange(self, flat: torch.Tensor, process_group: Any, group: _Group, limit: int) -> None:
        """Send every rank's pieces to all. Ranks hold unequal shares of safe parameters, hence broadcasts."""
        rank = torch.distributed.get_rank(process_group)
        for source, pieces in enumerate(group.pieces):
            for low in (True, False):
                for message in _messages([piece for piece in pieces if piece[2] is low], limit):
                    self._send(flat, process_group, source, source == rank, message, low)

    def _send(
        self, flat: torch.Tensor, process_group: Any, source: int, own: bool, message: list[Piece], low: bool
    ) -> None:
        views = [flat.narrow(0, start, end - start) for start, end, _ in message]
        if not low and len(views) == 1:
            _deepspeed.broadcast(views[0], source, process_group)
            return
        numel = sum(view.numel() for view in views)
        buffer = torch.empty(numel, dtype=self._dtype if low else flat.dtype, device=flat.device)
        parts = buffer.split([view.numel() for view in views])  # type: ignore[no-untyped-call]
        if own:
            for part, view in zip(parts, views, strict=True):
                part.copy_(view)
        _deepspeed.broadcast(buffer, source, process_group)
        if not own:  # a rank's own weights stay exact
            for part, view in zip(parts, views, strict=True):
                view.copy_(part)

    def _layout(self, index: int, flat: torch.Tensor) -> _Group:
        """Find the parameters in the flat buffer by where their storage lies, padding by what is left."""
        bounds = []
        for parameter in self._optimizer.bit16_groups[index]:
            start = parameter.data.storage_offset() - flat.storage_offset()
            if parameter.numel():
                bounds.append((start, start + parameter.numel(), id(parameter) in self._safe))
        partitions = []
        for partition in self._optimizer.parallel_partitioned_bit16_groups[index]:
            start = partition.storage_offset() - flat.storage_offset()
            partitions.append(tuple(_cut(sorted(bounds), start, start + partition.numel())))
        return _Group(tuple(partitions))


def _cut(bounds: list[Piece], start: int, end: int) -> Iterator[Piece]:
    """The part of every parameter between ``start`` and ``end``, neighbours of one kind joined."""
    open_piece: Piece | None = None
    for first, last, low in bounds:
        first, last = max(first, start), min(last, end)
        if first >= last:
            continue
        if open_piece is not None and open_piece[2] is low and open_piece[1] == first:
            open_piece = (open_piece[0], last, low)
            continue
        if open_piece is not None:
            yield open_piece
        open_piece = (first, last, low)
    if open_piece is not None:
        yield open_piece


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


def install(engine: Any, safe: set[int], dtype: torch.dtype) -> LowPrecisionGather:
    """Give ``engine``, at ZeRO 1 or 2, the gather in ``dtype`` for the parameters whose ids are ``safe``."""
    gather = LowPrecisionGather(engine.optimizer, safe, dtype)
    gather.install()
    return gather
