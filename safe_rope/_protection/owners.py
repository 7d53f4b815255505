"""The modules above another one: how they were built, and what their constructors make of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.by_identity import ByIdentity
from safe_rope._protection.adopted import is_small
from safe_rope._protection.reruns import Reruns, key_of
from safe_rope._protection.wrapped_methods import is_torchs
from safe_rope._recognition.arguments import Arguments, infer_arguments
from safe_rope._recognition.conditions import Conditions
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.reference import Reference, corresponds, stock_class


class Building(NamedTuple):
    """How a module was built: with which arguments and under which conditions, where that is known."""

    arguments: Arguments | None = None
    conditions: Conditions | None = None
    is_filled: bool = False
    """Whether somebody has filled it since, from where nobody knows."""
    thread: int | None = None
    number: float = math.inf
    """How many modules had been begun before it."""
    is_used: bool = False
    """Whether it was empty when something complete was used: what fills it then is no constructor."""

    @property
    def on_real_device(self) -> bool:
        """Whether its tensors were made with values."""
        return self.conditions is not None and self.conditions.device != "meta"

    @property
    def counts_low(self) -> bool:
        """Whether its tensors were made in 16 bits that asked for no dtype."""
        return self.conditions is not None and not self.conditions._replace(device="cpu").plain


class Owners:
    """What stands above each module that a guard has seen.

    Args:
        parents: the parent of each module, and its name there.
        looked_at: how each module was built that was looked at.
        empty: how each was built that held nothing when it was looked at.
        building: how each was built that nobody has looked at yet.
        reruns: what the constructors make that run again.

    """

    def __init__(
        self,
        parents: ByIdentity[nn.Module, tuple[weakref.ref[nn.Module], str]],
        looked_at: ByIdentity[nn.Module, Building],
        empty: ByIdentity[nn.Module, Building],
        building: ByIdentity[nn.Module, Building],
        reruns: Reruns,
    ) -> None:
        self._parents, self._reruns = parents, reruns
        self._looked_at, self._empty, self._building = looked_at, empty, building

    def above(self, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules above that are not torch's, and the paths from them, the nearest first."""
        path, current = "", module
        while current in self._parents:
            parent, name = self._parents[current]
            if (above := parent()) is None:
                return
            path, current = f"{name}.{path}".removesuffix("."), above
            if not is_torchs(current):
                yield current, path

    def references(self, module: nn.Module) -> Iterator[Reference | None]:
        """Yield what the constructor of each of them makes of it; None, as the last, where one cannot run."""
        for owner, path in self.above(module):
            building = self._looked_at.get(owner) or self._empty.get(owner) or self._building.get(owner)
            reference = self.rerun(owner, building, path) if is_small(owner) else None
            rebuilt = None if reference is None else reference.rebuilt
            if rebuilt is None or not corresponds(rebuilt, path, module):
                yield None
                return
            yield reference

    def rerun(self, owner: nn.Module, building: Building | None, path: str = "") -> Reference | None:
        """What the constructor of ``owner`` makes at ``path``; None where it cannot be run again."""
        arguments = None if building is None else building.arguments
        if building is None or arguments is None:
            return None
        key = key_of(type(owner), arguments, building.conditions)
        again = self._reruns.of(owner, arguments, building.conditions, key)
        return Reference(again, path) if again.rebuilt is not None and again.made(owner) else None

    def nearest(self, module: nn.Module) -> tuple[nn.Module, str, Building, Arguments] | None:
        """The owner that may have put something into a module, the path from it, and how it was built.

        None where its constructor has not ended, cannot be run again, or counts no positions.
        """
        owner, path = next(self.above(module), (None, ""))
        if owner is None:
            return None
        building = self._looked_at.get(owner) or self._empty.get(owner)
        if building is None or not bytecode.counts_positions(type(owner)):
            return None
        arguments = building.arguments
        if arguments is None and building.thread is None:  # a copy
            arguments = infer_arguments(owner, stock_class(owner))
        return None if arguments is None else (owner, path, building, arguments)

    def reference(self, module: nn.Module) -> Reference | None:
        """What the constructor of the nearest of them puts into it."""
        found = self.nearest(module)
        if found is None:
            return None
        owner, path, building, arguments = found
        known = self.rerun(owner, building._replace(arguments=arguments), path)
        if known is None or known.rebuilt is None or not corresponds(known.rebuilt, path, module):
            return None
        plain = building.conditions is not None and building.conditions.plain and is_on_cpu(module)
        return known._replace(plain=plain and not building.is_used)


def is_on_cpu(module: nn.Module) -> bool:
    """Whether its tensors are there, or nowhere yet."""
    # Another device computes other bits: what the constructor gives on CPU is what counts.
    tensors = [value for _, value in entries(module) if isinstance(value, torch.Tensor)]
    return all(tensor.device.type in ("cpu", "meta") for tensor in tensors)
