"""Looks for weights that a loss reads in FP32, outside of the model's forward, as a penalty on them does.

The graph of the loss tells. Nothing else could: what is read is a plain tensor, which ZeRO 1 and 2 have
gathered in the autocast dtype since the last step (gather12.py).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from safe_rope._base.torch_private import gives_only, is_leaf_node, next_node, number_of_node
from safe_rope.autocast import _deepspeed
from safe_rope.autocast.gather12 import LowPrecisionGather
from safe_rope.errors import PrecisionWarning

_FORWARDS = 64
"""How many forwards, the last ones, are known to a backward."""


def look_at_losses(engine: Any, gather: LowPrecisionGather, dtype: torch.dtype) -> None:
    """Look for weights that the losses of ``engine`` read in FP32, outside of its forward.

    Before the first gather, ``gather`` is told, and stays in FP32. Later, a read of rounded weights gives one
    PrecisionWarning before the backward.
    """
    forwards: deque[tuple[int, int]] = deque(maxlen=_FORWARDS)
    warned: list[bool] = []

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = next_node()
        result = original(*args, **kwargs)
        forwards.append((start, next_node()))
        return result

    def look(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = args[0] if args else kwargs.get("loss")
        if gather.safe and not gather.read and not warned and isinstance(loss, torch.Tensor):
            readers = _readers(loss, gather.safe, dtype, forwards)
            if not gather.has_run:
                gather.read = any(True for _ in readers)
            # What is written in Python, and what is compiled, may read a weight after a cast within.
            elif gather.rounded and any(not isinstance(one, BackwardCFunction) for one in readers):
                text = (
                    "the loss reads weights outside of the model's forward, and they were gathered in the "
                    f"autocast dtype {dtype}: expected FP32 weights. Call safe_rope.initialize(..., "
                    "low_precision_gather=False), or let the loss read them from the first step on"
                )
                warnings.warn(text, PrecisionWarning, stacklevel=3)
                warned.append(True)
        return original(*args, **kwargs)

    _deepspeed.around(engine, "forward", forward)
    for name in ("backward", "scale"):  # who calls loss.backward() scales the loss before
        if hasattr(engine, name):
            _deepspeed.around(engine, name, look)


def _readers(
    loss: torch.Tensor, weights: set[int], low: torch.dtype, forwards: Iterable[tuple[int, int]]
) -> Iterator[Any]:
    """Yield the nodes of the graph of ``loss`` that take one of ``weights``, given by id, as it is.

    Those of ``forwards``, from one number to another, are left out with all behind them. So is what gives the
    dtype ``low``: it is a cast, or behind one.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        number = number_of_node(node)
        if gives_only(node, low) or any(start <= number < end for start, end in forwards):
            continue
        later = [one for one, _ in node.next_functions if one is not None]
        if any(is_leaf_node(one) and id(one.variable) in weights for one in later):
            yield node
        waiting += [one for one in later if not is_leaf_node(one)]
