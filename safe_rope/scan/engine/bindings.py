"""Bindings: what a name, or an attribute of ``self``, can be bound to where it is read."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from functools import cached_property

from safe_rope.scan.engine.scopes import LOOP, Binding, Path, Place, Scope
from safe_rope.scan.engine.walk import Walk

_DEPTH = 8  # bases that are gone through
_HOOKS = ("__getattribute__", "__setattr__")  # that see every attribute of their class
_MAX_REACHING = 64  # bindings of a name that are told apart at one use
# By the loop: where in a name's bindings those stand that are in it.
Loops = dict[tuple[int, int], list[int]]


class Bindings:
    """Looks bindings up in one file."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._loops: dict[int, Loops] = {}
        self._computed_of: dict[str, list[Scope | None]] = {}
        self._derived_from: dict[int, list[Scope]] = {}

    def bindings(self, name: str, place: Place) -> list[Binding]:
        """Return the bindings that can reach a use, the last first; [] for an import or a builtin."""
        # Those of a comprehension in the same statement; the use may as well stand outside of it.
        inner = place.scope.inner.get((name, place.order), [])
        for scope in place.scope.upward():
            if scope is not place.scope and scope.kind == "class":
                continue
            if found := scope.bindings.get(name):
                found = self._reaching(found, place) if scope is place.scope else found[::-1]
                return _at_most(inner) + _at_most(found)
            if name in scope.imports:  # which hides what the scopes around it bind
                break
        return _at_most(inner)

    def _reaching(self, bindings: list[Binding], place: Place) -> list[Binding]:
        if len(bindings) > 1 and id(bindings) not in self._loops:
            self._loops[id(bindings)] = _in_loops(bindings)
        return _reaching(bindings, self._loops.get(id(bindings), {}), place)

    def reaching(self, bindings: list[Binding], place: Place) -> list[Binding]:
        """Return which of some bindings, in the order of the text, can reach a place; the last first."""
        return _reaching(bindings, _in_loops(bindings), place)

    def values(self, name: str, place: Place) -> list[tuple[ast.expr, Place]]:
        """Return the expressions that a name can stand for at a use, and where they are written."""
        bindings = self.bindings(name, place)
        return [(one.value, one.place) for one in bindings if one.how == "value" and one.value is not None]

    def attributes(self, name: str, place: Place) -> list[Binding]:
        """Return what ``self.name`` is bound to in the class around, or its bases, and in derived ones."""
        owner, seen = place.scope.owner, 0
        derived = [] if owner is None else self._derived(owner, name)
        while owner is not None and seen < _DEPTH:
            if name in owner.attributes:
                return owner.attributes[name] + derived
            owner = next((self.walk.classes[base] for base in owner.bases if base in self.walk.classes), None)
            seen += 1
        return derived

    def inherited(self, name: str, place: Place) -> list[Binding]:
        """Return what ``self.name`` is bound to in all bases of the class around."""
        owner = place.scope.owner
        above = [] if owner is None else [*owner.bases]
        found: list[Binding] = []
        for base in above:
            if base in self.walk.classes and len(above) < _MAX_REACHING:
                found += self.walk.classes[base].attributes.get(name, ())
                above += [one for one in self.walk.classes[base].bases if one not in above]
        return found

    def writes(self, attribute: str, owner: Scope | None = None) -> bool:
        """Say whether another object than self, a computed name or a method may give a class an attribute."""
        hidden = owner is not None and attribute.startswith("__")
        full = f"_{owner.name.lstrip('_')}{attribute}" if owner is not None and hidden else attribute
        named = {attribute, full}
        return (
            not named.isdisjoint(self.walk.written)
            or (owner is not None and hidden and bool(self._derived(owner, full)))
            or any(self._has(owner, name) for name in (attribute, *(_HOOKS if owner is not None else ())))
            or any(self._is_related(owner, of) for name in named for of in self._computed(name))
        )

    def _has(self, owner: Scope | None, method: str) -> bool:
        methods = (one.parent for one in self.walk.functions.get(method, ()))
        return any(
            one is not None and one.kind == "class" and self._is_related(owner, one) for one in methods
        )

    def _computed(self, attribute: str) -> list[Scope | None]:
        """Return the classes of which something gives an attribute by a name that is computed."""
        found = self._computed_of.get(attribute)
        if found is None:
            found = [of for names, of in self._patterns if names.fullmatch(attribute)]
            self._computed_of[attribute] = found
        return found

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Scope | None]]:
        return [(re.compile(names), of) for names, of in dict.fromkeys(self.walk.computed)]

    def _is_related(self, one: Scope | None, other: Scope | None) -> bool:
        if one is None or other is None or one is other:
            return True
        return one in self._below(other) or other in self._below(one)

    def may_be_other(self, name: str, place: Place) -> bool:
        """Say whether a name that a scope binds is also what it imports or defines, or what a star brings.

        Or what something assigns to the module as its attribute.
        """
        for scope in place.scope.upward():
            if found := scope.bindings.get(name):
                late = scope is self.walk.module and (
                    found[-1].place.order < self.walk.starred
                    or name in self.walk.written
                    or None in self._computed(name)
                )
                defined = any(one.parent is scope for one in self.walk.functions.get(name, ()))
                return late or defined or name in scope.imports
        return False

    def is_overridden(self, method: Scope) -> bool:
        """Say whether a class that derives from a method's has another of its name."""
        derived = self._below(method.parent) if method.parent is not None else []
        return any(one.parent in derived for one in self.walk.functions.get(method.name, ()))

    def _derived(self, owner: Scope, name: str) -> list[Binding]:
        return [binding for one in self._below(owner) for binding in one.attributes.get(name, ())]

    def _below(self, owner: Scope) -> list[Scope]:
        """Return the classes of the file that derive from one."""
        if id(owner) in self._derived_from:
            return self._derived_from[id(owner)]
        found = self._derived_from[id(owner)] = []
        waiting, seen = [owner.name], {owner.name}
        while waiting:
            below = self.children.get(waiting.pop(), ())
            waiting += [one.name for one in below if one.name not in seen]
            seen.update(one.name for one in below)
            found += below
        return found

    @cached_property
    def children(self) -> dict[str, list[Scope]]:
        """The classes that name a base, by it."""
        children: dict[str, list[Scope]] = {}
        for one in self.walk.classes.values():
            for base in one.bases:
                children.setdefault(base, []).append(one)
        return children


def _reaching(bindings: list[Binding], loops: Loops, place: Place) -> list[Binding]:
    """Return the bindings that can reach a place, the last first, up to one that is on every path.

    Args:
        bindings: of the name, in the order of the text.
        loops: which of them stand in each loop.
        place: where the name is read.
    """
    if len(bindings) == 1 and not bindings[0].place.path and bindings[0].place.order < place.order:
        return bindings  # as most are
    reaching: list[Binding] = []
    arms = dict(place.path)
    rest = place.path
    first = max(place.order, 1)  # parameters have order 0
    before = bisect_left(bindings, first, key=lambda one: one.place.order)
    for binding in map(bindings.__getitem__, range(before - 1, -1, -1)):
        if any(arms.get(branch, arm) != arm for branch, arm in binding.place.path):
            continue
        reaching.append(binding)
        if binding.place.path == place.path[: len(binding.place.path)]:
            rest = place.path[len(binding.place.path) :]
            break
        if len(reaching) > _MAX_REACHING:
            return reaching
    later = _from_before(loops, before, rest)
    if reaching or later:
        return reaching + [bindings[at] for at in later]
    return [binding for binding in bindings if binding.place.order != place.order]


def _in_loops(bindings: list[Binding]) -> Loops:
    """Return which of the bindings stand in each loop, ascending."""
    loops: Loops = {}
    for at, binding in enumerate(bindings):
        for step in binding.place.path:
            if step[1] == LOOP:
                loops.setdefault(step, []).append(at)
    return loops


def _from_before(loops: Loops, start: int, path: Path) -> list[int]:
    """Return which bindings stand later in a loop, and so reach its next round; the last first."""
    outermost = next((step for step in path if step[1] == LOOP), None)
    inside = [] if outermost is None else loops.get(outermost, [])  # all of the inner loops are among them
    first = max(bisect_left(inside, start), len(inside) - _MAX_REACHING - 1)
    return inside[first:][::-1]


def _at_most(bindings: list[Binding]) -> list[Binding]:
    """Cut a list of very many bindings; what is left out is a binding of which nothing is known."""
    if len(bindings) <= _MAX_REACHING:
        return bindings
    return [*bindings[:_MAX_REACHING], Binding("value", None, bindings[_MAX_REACHING].place)]
