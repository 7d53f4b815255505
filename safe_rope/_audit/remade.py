"""What a method makes of a module's attributes, where those are not what its constructor was given.

vLLM's YaRN of DeepSeek keeps another number under the name of an argument, and its Gemma 4 another width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import isolated
from safe_rope._audit.tables import Held, is_replayed
from safe_rope._base import changes, methods
from safe_rope._base.functions import signature_of
from safe_rope._recognition.ask import Bounded, UnansweredError, answering, undisturbed
from safe_rope._recognition.explained import is_cast, is_unfilled
from safe_rope._recognition.holdings import attributes, entries, get_table
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.untouched import Untouched

_MADE = 2**28
"""Numbers that one operation of a method may make."""
_PLAIN = (bool, int, float, str)


def is_of_others(
    module: nn.Module, reference: Reference, held: Held, actual: Tensor, expected: Tensor
) -> bool:
    """Whether a module's numbers show that ``reference`` had other arguments, and its table no damage."""
    built = reference.module
    if held.frozen or reference.again is None or reference.again.certain:
        return False
    if built is None or built is module:
        return False
    stock: Any = stock_class(module)
    moved = {"training", *changes.changed_by_forward(stock)}
    kept = ((one, vars(built).get(name)) for name, one in vars(module).items() if name not in moved)
    if not any(type(one) in _PLAIN and type(one) is type(other) and one != other for one, other in kept):
        return False
    is_explained = is_cast(actual, expected) or is_unfilled(actual, expected)
    return not (is_explained or is_replayed(actual, held.name, reference))


def remade(module: nn.Module, reference: Reference, name: str) -> Tensor | None:
    """Return what a method makes of a table that makes just the table of ``reference`` there; else None.

    It reads numbers alone: nothing in ``module`` holds another tensor.
    """
    built = reference.module
    made = None if built is None else get_table(built, name)
    if built is None or not isinstance(made, Tensor) or _holds_more(module, name):
        return None
    for method in _methods(stock_class(module)):
        try:
            again = _made(built, name, method)
            if again is not None and torch.equal(again.to(made.dtype), made):
                now = _made(module, name, method)
                return None if now is None else now.to(made.dtype)
        except UnansweredError:
            continue
    return None


def _holds_more(module: nn.Module, name: str) -> bool:
    held = ((part, other, value) for part in module.modules() for other, value in entries(part))
    more = any(isinstance(v, Tensor) and not (part is module and other == name) for part, other, v in held)
    return more or next(module.parameters(), None) is not None


def _methods(cls: Any) -> Iterator[str]:
    """Yield the methods of a class without arguments that its constructors name."""
    named = {
        name
        for base in methods.bases(cls)
        for one in methods.functions_behind(vars(base).get("__init__"))
        for name in methods.names_in(one)
    }
    for name, found in methods.methods_by_name(cls).items():
        if name in named and found and len(signature_of(found[0]).parameters) == 1:
            yield name


def _made(module: nn.Module, name: str, method: str) -> Tensor | None:
    """Return what a method of a copy, which has no such table, makes on the CPU."""
    duplicate = isolated(module)
    duplicate._buffers.pop(name, None)
    vars(duplicate).pop(name, None)
    try:
        with (
            undisturbed(),
            Untouched(stock_class(module), attributes(module)) as untouched,
            answering(f"{method} raised"),
            Bounded(_MADE),
            torch.device("cpu"),
        ):
            made = untouched.run(getattr(duplicate, method))
    except OutOfReachError as error:
        raise UnansweredError(str(error)) from error
    return made.detach().cpu() if isinstance(made, Tensor) and not made.is_meta else None
