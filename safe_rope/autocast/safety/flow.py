"""Follow the values of parameters through every operator below autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base.functions import filled_cells
from safe_rope._base.tensors import tensors
from safe_rope._base.torch_private import is_composite, pytree
from safe_rope.autocast._operators import Operator, Watch, is_operator, packet
from safe_rope.autocast.safety import moves
from safe_rope.autocast.safety.parameters import Shared, WeakStorage, memory_range
from safe_rope.autocast.safety.undo import Undo

_CASTING = frozenset({"_to_copy", "copy_", "copy"})


@dataclass
class Uses:
    """How the traced step used one parameter."""

    casts: int = 0  # how often its values were rounded to the low dtype
    reads: list[str] = field(default_factory=list)  # where its values were read as they are, in words
    read_operators: set[str] = field(default_factory=set)

    @property
    def any(self) -> bool:
        """Whether the step used it at all."""
        return bool(self.casts or self.reads)


class Modules:
    """Where in the model an operator runs, told by hooks on all modules while `watched` is open."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []
        self.called: set[str] = set()
        self.in_backward = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice each call of a module."""
        hooks = nn.modules.module
        with (
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self.called.add(name)
        self._inside.append(name or (self._inside[-1] if self._inside else ""))

    def _leave(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()

    def describe(self) -> str:
        """Return the path of the innermost module that runs, as " in PATH", or nothing."""
        if self.in_backward:
            return " in the backward"
        return f" in {self._inside[-1]}" if self._inside and self._inside[-1] else ""


class Flow:
    """Record, for every parameter, the casts to ``low`` and the reads of uncast values.

    A storage *carries* a parameter while elements of it are elements of the parameter, bit for bit. Views
    share the storage; operators that only move values hand it on; a cast to ``low`` ends it, and that use
    is harmless. Every other operator on a storage that carries a parameter reads it.
    """

    def __init__(self, low: torch.dtype, modules: Modules, undo: Undo) -> None:
        self.low = low
        self.uses: dict[Shared, Uses] = {}
        self._modules = modules
        self._undo = undo
        self._ranges: dict[int, list[tuple[int, int, Shared]]] = {}
        self._carried: dict[int, dict[Shared, str]] = {}
        self._held: list[Any] = []  # keeps the keys of both from being used again

    def follow(self, tensor: Tensor, group: Shared) -> None:
        """Treat the memory of ``tensor`` as that of the parameter ``group``."""
        self.uses.setdefault(group, Uses())
        place = memory_range(tensor)
        if place is not None:
            key, start, end = place
            self._ranges.setdefault(key, []).append((start, end, group))
            self._held.append(tensor.untyped_storage())

    def read(self, values: Any, what: str) -> None:
        """Record that something which is no operator reads ``values``: the caller of the model."""
        for group, how in self._carries(tensors(values)).items():
            self._record(group, how, what, what)

    def run(self, func: Operator, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator, with what it does to parameters recorded."""
        if not is_operator(func):
            for group, how in self._carries(_within((args, keywords))).items():
                self._record(group, how, f"{func.name()}{self._modules.describe()}", func.name())
            return func(*args, **keywords)
        if _is_composite(func):
            with Watch(self.run):
                result = func.decompose(*args, **keywords)
            if result is not NotImplemented:
                return result
        self._undo.before(func, args, keywords)
        carried = self._carries(tensors((args, keywords)))
        result = func(*args, **keywords)
        self._undo.after(func, result)
        if carried:
            self._use(func, args, keywords, carried, result)
        return result

    def _use(self, func: Operator, args: Any, keywords: Any, carried: dict[Shared, str], result: Any) -> None:
        if moves.is_view(func):
            self._carry(tensors(result), carried, "")
            return
        if moves.reads_shapes_only(func):
            return
        name, where = func._schema.name.replace("::", "."), self._modules.describe()
        for group in self._parameters_in(moves.written(func, args, keywords)):
            self._record(group, "", f"{name} (which writes to it){where}", name)
        sources = list(tensors((args[1:], keywords) if moves.overwrites(func) else (args, keywords)))
        carried = self._carries(sources)
        if not carried:
            return
        if moves.moves_only(func, args, keywords):
            results = [*tensors(result), *moves.written(func, args, keywords)]
            dtypes = {source.dtype for source in sources if self._carries([source])}
            if packet(func) in _CASTING and all(t.dtype == self.low for t in results):
                if all(dtype.is_floating_point for dtype in dtypes):
                    for group in carried:
                        self.uses[group].casts += 1
                    return
            elif all(moves.holds_exactly(t.dtype, dtype) for t in results for dtype in dtypes):
                self._carry(results, carried, f"{name}{where}")
                return
        for group, how in carried.items():
            self._record(group, how, f"{name}{where}", name)

    def _record(self, group: Shared, how: str, what: str, operator: str) -> None:
        uses = self.uses[group]
        text = f"{how}, then {what}" if how else what
        uses.read_operators.add(operator)
        if text not in uses.reads:
            uses.reads.append(text)

    def _parameters_in(self, values: Iterable[Tensor]) -> set[Shared]:
        return {
            group
            for key, start, end in filter(None, map(memory_range, values))
            for low, high, group in self._ranges.get(key, ())
            if start < high and low < end
        }

    def _carries(self, values: Iterable[Tensor]) -> dict[Shared, str]:
        """Return the parameters that ``values`` carry, each with how it got there."""
        found: dict[Shared, str] = {}
        for value in values:
            place = memory_range(value)
            if place is not None:
                found |= dict.fromkeys(self._parameters_in([value]), "")
                found |= self._carried.get(place[0], {})
        return found

    def _carry(self, values: Iterable[Tensor], carried: dict[Shared, str], step: str) -> None:
        for value in values:
            place = memory_range(value)
            if place is None or (place[0] in self._ranges and not step):
                continue
            if place[0] not in self._carried:
                self._held.append(WeakStorage(value.untyped_storage()))
            known = self._carried.setdefault(place[0], {})
            for group, how in carried.items():
                known.setdefault(group, how or step)


def _within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, and those that functions and modules in it hold."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        yield from tensors(value)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, nn.Module):
                yield from (*leaf.parameters(), *leaf.buffers())
            elif id(leaf) not in seen:
                left += [
                    *(cell.cell_contents for cell in filled_cells(leaf)),
                    getattr(leaf, "__self__", None),
                ]
            seen.add(id(leaf))


def _is_composite(func: Any) -> bool:
    # Seen whole only where a tensor has no autograd key (inference mode); then the parts are what counts.
    return func.namespace == "aten" and not moves.is_view(func) and is_composite(func)
