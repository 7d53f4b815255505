"""Names: what an expression is called once imports, aliases, partial and ``**kwargs`` are seen through."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from safe_rope.scan.engine.scopes import LOOP, Binding, Path, Place, Walk

_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument and where it is written; ``direct``: in the call itself, so that an edit can reach it."""

    value: ast.expr
    place: Place
    direct: bool = True


@dataclass(slots=True)
class Call:
    """A call with its function's full name, partial and ``**kwargs`` folded in."""

    node: ast.Call
    function: str
    positional: list[Argument] = field(default_factory=list)
    keywords: dict[str, Argument] = field(default_factory=dict)
    complete: bool = True  # nothing unknown was unpacked into it

    @property
    def bounds(self) -> list[Argument]:
        """An arange's start, end and step."""
        named = [self.keywords[name] for name in ("start", "end", "step") if name in self.keywords]
        return [*self.positional[:3], *named]

    def argument(self, position: int, name: str) -> Argument | None:
        """Return an argument, given by position or by name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.positional[position] if 0 <= position < len(self.positional) else None


class Names:
    """Looks names up in one file."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.stars = [name[:-2] for name in walk.imports.values() if name.endswith(".*")]

    def bindings(self, name: str, place: Place) -> list[Binding]:
        """Return the bindings that can reach a use, the last first; [] for an import or a builtin."""
        for scope in place.scope.upward():
            found = scope.bindings.get(name)
            if found and (scope is place.scope or scope.kind != "class"):
                return _reaching(found, place) if scope is place.scope else list(reversed(found))
        return []

    def values(self, name: str, place: Place) -> list[tuple[ast.expr, Place]]:
        """Return the expressions that a name can stand for at a use, and where they are written."""
        bindings = self.bindings(name, place)
        return [(one.value, one.place) for one in bindings if one.how == "value" and one.value is not None]

    def attributes(self, name: str, place: Place) -> list[Binding]:
        """Return what ``self.name`` is bound to in the class around, and in its bases in this file."""
        owner, seen = place.scope.owner, 0
        while owner is not None and seen < _DEPTH:
            if name in owner.attributes:
                return owner.attributes[name]
            owner = next((self.walk.classes[base] for base in owner.bases if base in self.walk.classes), None)
            seen += 1
        return []

    def qualify(self, node: ast.expr, place: Place, depth: int = 0) -> str:
        """Return the full dotted name, "" for what is no module's attribute."""
        if depth > _DEPTH:
            return ""
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                bindings = self.attributes(node.attr, place)
                return self._alias(bindings, depth) if bindings else ""
            base = self.qualify(node.value, place, depth + 1)
            return f"{base}.{node.attr}".replace("torch.torch.", "torch.") if base else ""
        if isinstance(node, ast.Call):
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
                    return self.qualify(ast.Attribute(of, attribute), place, depth + 1)
        if not isinstance(node, ast.Name):
            return ""
        if bindings := self.bindings(node.id, place):
            return self._alias(bindings, depth)
        if node.id in self.walk.imports:
            return self.walk.imports[node.id]
        if node.id in self.walk.functions or node.id in self.walk.classes:
            return f".{node.id}"
        if "torch" in self.stars and node.id in ("arange", "linspace", "logspace", "cumsum", "range"):
            return f"torch.{node.id}"
        return node.id

    def _alias(self, bindings: list[Binding], depth: int) -> str:
        value = bindings[0].value
        if bindings[0].how == "value" and isinstance(value, ast.Name | ast.Attribute | ast.Call):
            return self.qualify(value, bindings[0].place, depth + 1)
        return ""

    def call(self, node: ast.Call, place: Place, depth: int = 0) -> Call:
        """Return a call with what partial and ``**kwargs`` put into it."""
        call = Call(node, self.qualify(node.func, place))
        inner = None if call.function or depth > _DEPTH else self._partial(node.func, place, depth)
        if inner is not None:
            call.function, call.complete = inner.function, inner.complete
            call.positional = [Argument(item.value, item.place, False) for item in inner.positional]
            call.keywords = {
                name: Argument(item.value, item.place, False) for name, item in inner.keywords.items()
            }
        for value in node.args:
            if isinstance(value, ast.Starred):
                call.complete = False
                break
            call.positional.append(Argument(value, place))
        for keyword in node.keywords:
            if keyword.arg is not None:
                call.keywords[keyword.arg] = Argument(keyword.value, place)
            elif (unpacked := self._mapping(keyword.value, place)) is not None:
                call.keywords.update(unpacked)
            else:
                call.complete = False
        return call

    def _partial(self, function: ast.expr, place: Place, depth: int) -> Call | None:
        """Return the call that ``functools.partial`` prepared."""
        if isinstance(function, ast.Name):
            bindings = self.bindings(function.id, place)
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            bindings = self.attributes(function.attr, place) if function.value.id == "self" else []
        else:
            bindings = [Binding("value", function, place)]
        if not bindings or bindings[0].how != "value" or not isinstance(bindings[0].value, ast.Call):
            return None
        partial, where = bindings[0].value, bindings[0].place
        if self.qualify(partial.func, where) not in ("functools.partial", "partial") or not partial.args:
            return None
        prepared = ast.Call(partial.args[0], partial.args[1:], partial.keywords)
        return self.call(ast.copy_location(prepared, partial), where, depth + 1)

    def _mapping(self, node: ast.expr, place: Place) -> dict[str, Argument] | None:
        """Return the entries of a dict literal or ``dict(...)`` call, also through a variable."""
        if isinstance(node, ast.Name):
            if len(self.bindings(node.id, place)) != 1 or not (values := self.values(node.id, place)):
                return None
            node, place = values[0]
        entries: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            entries = list(zip(keys, node.values, strict=True))
        elif isinstance(node, ast.Call) and self.qualify(node.func, place) == "dict" and not node.args:
            entries = [(word.arg, word.value) for word in node.keywords if word.arg]
        else:
            return None
        if not all(isinstance(key, str) for key, _ in entries):
            return None
        return {str(key): Argument(value, place, False) for key, value in entries}


def _reaching(bindings: list[Binding], place: Place) -> list[Binding]:
    """Return the bindings that can reach a place, the last first, up to one that is on every path."""
    reaching: list[Binding] = []
    arms = dict(place.path)
    later = []
    for binding in reversed(bindings):
        if binding.how != "parameter" and binding.place.order >= place.order:
            comprehension = binding.how == "item" and binding.place.order == place.order
            if not comprehension:
                later.append(binding)
                continue
        if any(arms.get(branch, arm) != arm for branch, arm in binding.place.path):
            continue
        reaching.append(binding)
        if binding.place.path == place.path[: len(binding.place.path)]:
            return reaching + _from_before(later, place.path[len(binding.place.path) :])
    return reaching + _from_before(later, place.path) or [
        binding for binding in bindings if binding.place.order != place.order
    ]


def _from_before(later: list[Binding], path: Path) -> list[Binding]:
    """Return the bindings that stand later in a loop, and so reach its next round."""
    loops = {step for step in path if step[1] == LOOP}
    return [binding for binding in later if not loops.isdisjoint(binding.place.path)] if loops else []
