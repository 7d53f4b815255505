"""How the cos and sin of a module reach q and k: which functions rotate by them, and what they are given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import nn

from safe_rope._base.functions import parameters_of
from safe_rope._recognition.ask import returns_cos_sin
from safe_rope.registry import RopePatch

How = Literal["results", "tables", "methods"]


class Applications(NamedTuple):
    """What applies the positions of a module.

    ``how``: "results": functions at ``places`` take what the module's forward returns; "tables": they take
    rows of tables that the module holds; "methods": methods of the module take q and k and return them
    rotated. ``family`` is the patch's that tells so, or names the Python modules that were searched.
    """

    family: str
    places: tuple[tuple[str, str], ...]
    how: How = "results"
    methods: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, each once."""
        return tuple(dict.fromkeys(name for _, name in self.places))


def around(stock: type, namespaces: tuple[str, ...], patch: RopePatch | None) -> Applications:
    """Return the functions in the surroundings of a class that rotate by what its modules return.

    Args:
        stock: the class.
        namespaces: names of the Python modules whose functions may apply it, besides its own.
        patch: names more, where one covers the class.

    """
    modules = tuple(dict.fromkeys((stock.__module__, *namespaces, *(patch.modules if patch else ()))))
    names = [*(patch.applications if patch else ()), *(n for m in modules for n in _rotating(m))]
    places = tuple((module, name) for module in modules for name in dict.fromkeys(names))
    return Applications(patch.family if patch else f"generic ({', '.join(modules)})", places)


def of_pinned(
    module: nn.Module, reference: nn.Module | None, found: Applications, patch: RopePatch | None
) -> Applications | None:
    """Return how the positions of a module that keeps its own computation are applied; None for as stock.

    Args:
        module: the module.
        reference: the same as its constructor makes it, where that is known.
        found: the functions `around` it.
        patch: a patch that covers it.

    """
    if patch is not None and patch.methods:
        return found._replace(how="methods", methods=patch.methods)
    if patch is not None:
        holds_weights = next(module.parameters(), None) is not None
        return found._replace(how="tables" if holds_weights else "results")
    if reference is not None and found.places and returns_cos_sin(reference):
        return found
    return None


def _rotating(module_name: str) -> Iterator[str]:
    """Names of the functions of a Python module that rotate by cos and sin."""
    for name, value in list(vars(sys.modules.get(module_name, sys)).items()):
        if not ("rot" in name or "rope" in name) or isinstance(value, type) or not callable(value):
            continue
        if name.startswith("__"):
            continue  # where `safe_rope.rotation._installed` keeps what a function runs
        try:
            parameters = parameters_of(value)
        except Exception:  # noqa: BLE001 - what stands for an optional import raises what it likes
            continue
        if "cos" in parameters and "sin" in parameters:
            yield name
