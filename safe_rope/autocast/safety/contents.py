"""Put back what containers and objects hold, and the random generators among them."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base.random_states import random_states_kept

_MOST = 100_000
"""Objects, up to which what they hold in turn is looked into."""
_OTHERS = (
    *(type(None), bool, int, float, str, bytes, type, Tensor, nn.Module),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


@contextlib.contextmanager
def contents_kept(values: Iterable[Any]) -> Iterator[None]:
    """On exit, put back what can be reached from ``values``, however deep."""
    found = list(reached(values))
    containers = [(held, _entries(held)) for held in map(_contents, found) if not isinstance(held, tuple)]
    generators = [back for back in map(_generator, found) if back is not None]
    try:
        yield
    finally:
        for container, before in containers:
            if list(map(id, _entries(container))) != list(map(id, before)):
                _refill(container, before)
        for put_back in generators:
            put_back()


@contextlib.contextmanager
def random_state_kept(cuda: bool) -> Iterator[None]:
    """On exit, put back the states that Python, numpy and torch draw from, on every CUDA device if asked."""
    with random_states_kept(), torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []):
        yield


def reached(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values`` and what they hold that can change: containers and objects."""
    left = deque(values)
    seen: dict[int, Any] = {}
    while left and len(seen) < _MOST:
        value = left.popleft()
        if id(value) in seen or isinstance(value, _OTHERS):
            continue
        seen[id(value)] = value
        left.extend(_entries(_contents(value)))
        yield value


def _contents(value: Any) -> Any:
    """A container, or the dict of an object; not of one with a lock, which other threads may use."""
    if isinstance(value, dict | list | set | deque | tuple):
        return value
    try:
        held = vars(value)
    except TypeError:
        return ()
    return () if any(isinstance(one, _LOCKS) for one in held.values()) else held


def _entries(container: Any) -> list[Any]:
    """What a dict (its keys, then their values) or another container holds."""
    values = (value for _, value in container.items()) if isinstance(container, dict) else ()
    return [*container, *values]


def _refill(container: Any, entries: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(entries) // 2
        for key, value in zip(entries[:half], entries[half:], strict=True):
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(entries)


def _generator(value: Any) -> Callable[[], Any] | None:
    """What puts a random generator back to its state now; None for anything else."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        return functools.partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None
