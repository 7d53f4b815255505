"""What the forward of a class reads besides its arguments, told from its bytecode."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from safe_rope._base import instructions, methods

_OF_ROPE_TYPES = ("_dynamic_frequency_update", "_longrope_frequency_update")
"""Methods of transformers from 4.43 on: they hand a config to the function of a rope type, or read it."""
_PLAIN = (bool, int, float, str, list, dict, set)
A_TENSOR = "a tensor"
"""What `setting` returns for what holds values that change without being replaced."""


class Reads(NamedTuple):
    """What ``forward``, that of each base and the methods that they name read."""

    attributes: frozenset[str]
    """Of the module itself, by name."""
    has_numbers: bool
    """Whether they read numbers, texts or containers of their Python modules, which anybody may change."""
    has_config: bool
    """Whether they read a config, but for what makes the frequencies of a rope type anew."""


def reads_of(cls: Any) -> Reads:
    """Return what the forward of a class reads."""
    return _reads_of(cls)


@functools.lru_cache(maxsize=4096)
def _reads_of(cls: type) -> Reads:
    attributes, has_numbers, has_config = set[str](), False, False
    for function in functions_of(cls):
        for code in instructions.codes(function.__code__):
            first, last = function.__code__.co_varnames[:1], None
            for one in instructions.steps(code):
                if one.attribute is not None and last in first:
                    attributes.add(one.attribute)
                    has_config |= one.attribute == "config" and function.__name__ not in _OF_ROPE_TYPES
                has_numbers |= one.name == "LOAD_GLOBAL" and isinstance(
                    function.__globals__.get(one.value), _PLAIN
                )
                last = one.loads
    return Reads(frozenset(attributes), has_numbers, has_config)


def setting(module: Any, name: str) -> Any:
    """Return what a module or its class has under a name if that is a number, a text, a switch or several.

    `A_TENSOR` stands for a tensor or a module, whatever it holds.
    """
    value = module.__dict__.get(name)  # Dynamo before torch 2.8 takes no ``vars`` of a module
    if value is None:
        for held in ("_buffers", "_parameters", "_modules"):
            if module.__dict__[held].get(name) is not None:
                return A_TENSOR
        value = getattr(type(module), name, None)
    if isinstance(value, torch.Tensor):
        return A_TENSOR
    if isinstance(value, (list, tuple)):
        value = tuple(value)
    return value if isinstance(value, (bool, int, float, str, tuple)) else None  # nor before 2.7 a union


def method(module: Any, name: str) -> Any:
    """Return the function of a method, or what somebody has put into the module in its place."""
    return module.__dict__.get(name) or getattr(type(module), name, None)


def may_differ(module: Any, other: Any, cls: Any) -> bool:
    """Whether the forward of ``cls`` may read something else of a module than of another one.

    What a config tells (``attention_scaling``) does not count.
    """
    reads = reads_of(cls)
    if reads.has_numbers or reads.has_config:
        return True
    names = reads.attributes - {"attention_scaling"}
    if any(name in module.__dict__ and callable(getattr(type(module), name, None)) for name in names):
        return True
    return any(setting(module, name) != setting(other, name) for name in names)


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield ``forward``, that of each base and the methods that they name."""
    by_name = methods.methods_by_name(cls)
    seen, waiting = set[types.CodeType](), list(by_name.get("forward", ()))
    while waiting:
        function = waiting.pop()
        if function.__code__ not in seen:
            seen.add(function.__code__)
            yield function
            for name in methods.names_in(function):
                waiting += by_name.get(name, ())
