"""Names: what an expression is called once imports, aliases, partial and ``**kwargs`` are seen through."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from functools import cached_property

from safe_rope.scan.engine.bindings import Bindings
from safe_rope.scan.engine.scopes import Binding, Place, Scope
from safe_rope.scan.engine.tree import Tree
from safe_rope.scan.engine.vocabulary import STARRED
from safe_rope.scan.engine.walk import Walk

_DEPTH = 8  # aliases that are gone through


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
    floats: bool = False  # a list of a range's numbers as Python floats
    unpacked: list[Argument] = field(default_factory=list)  # sequences, after the positional arguments
    mapped: bool = False  # a mapping was unpacked of which not all is known

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


@dataclass(frozen=True, slots=True)
class _Range:
    """A call of ``range``, where it is written; ``mutable``: a variable lists it, which others may change.

    ``floats``: as Python floats.
    """

    node: ast.Call
    place: Place
    mutable: bool = False
    floats: bool = False


class Names(Bindings):
    """Names what stands in one file."""

    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        self._mappings: dict[tuple[ast.expr, Place], dict[str, Argument] | None] = {}

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
        if isinstance(node, ast.NamedExpr):
            return self.qualify(node.value, place, depth + 1)
        if not isinstance(node, ast.Name):
            return ""
        bindings = self.bindings(node.id, place)
        if node.id in self.walk.imports:
            # None stands for a module that is not there.
            bindings = [one for one in bindings if not isinstance(one.value, ast.Constant)]
            if not bindings:
                importer = self._importer(node.id, place)
                return (self.walk if importer is None else importer).imports[node.id]
        if bindings:
            return self._alias(bindings, depth)
        if node.id in self.walk.functions or node.id in self.walk.classes:
            return f".{node.id}"
        if self.walk.stars and node.id in STARRED:
            return f"torch.{node.id}"
        return node.id

    def _importer(self, name: str, place: Place) -> Scope | None:
        """Return the scope whose import a name stands for at a use, if none of these binds it."""
        around = (one for one in place.scope.upward() if one is place.scope or one.kind != "class")
        return next((one for one in around if name in one.imports), None)

    def is_early(self, node: ast.expr, place: Place) -> bool:
        """Say whether a function has its name since the import: what replaces it later is not called.

        ``torch.jit.script`` looks its functions up when it compiles, at the import too.
        """
        for scope in place.scope.upward():
            decorators = getattr(scope.node, "decorator_list", [])
            if any(self.qualify(one, place) == "torch.jit.script" for one in decorators):
                return True
        if not isinstance(node, ast.Name):
            return False
        bindings = self.bindings(node.id, place)
        if not bindings:
            return node.id in self.walk.bound or node.id not in self.walk.imports
        return all(
            one.how == "value" and all(scope.kind != "function" for scope in one.place.scope.upward())
            for one in bindings
        )

    def _alias(self, bindings: list[Binding], depth: int) -> str:
        value = bindings[0].value
        if bindings[0].how == "value" and isinstance(value, ast.Name | ast.Attribute | ast.Call):
            return self.qualify(value, bindings[0].place, depth + 1)
        return ""

    def is_certain(self, node: ast.expr, place: Place) -> bool:
        """Say whether what stands for torch, or a part of it, stands for nothing else as well."""
        full = self.qualify(node, place)
        if not full and (prepared := self._partial(node, place, 0)) is not None:
            full = prepared.function
        if full.partition(".")[0] != "torch" and full != "functools.partial":
            return True
        if full.rpartition(".")[2] in self.walk.written or self._runs_text:
            return False
        if isinstance(node, ast.NamedExpr):
            return self.is_certain(node.value, place)
        if isinstance(node, ast.Call):
            return all(self.is_certain(one, place) for one in (node.func, *node.args[:1]))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
            return self.is_certain(node.value, place)
        if isinstance(node, ast.Attribute):
            owner = place.scope.owner
            below = [] if owner is None else self._below(owner)
            if self.writes(node.attr, owner) or any(node.attr in one.imports for one in below):
                return False
            bindings = [*dict.fromkeys(self.attributes(node.attr, place) + self.inherited(node.attr, place))]
        else:
            bindings = self.bindings(getattr(node, "id", ""), place)
        others = [one for one in bindings if not isinstance(one.value, ast.Constant)]
        name = getattr(node, "id", "")
        # What the last star brings is not known.
        starred = name in STARRED and 0 < self.walk.stars < self.walk.starred
        starred = starred and not bindings and name not in self.walk.imports
        if starred or name in self.walk.varied or self._defines(name) or len(others) > 1:
            return False
        if any(one.annotation is not None and one.place.scope.kind == "class" for one in others):
            return False  # a field, which the constructor is given
        return all(one.value is None or self.is_certain(one.value, one.place) for one in others)

    @cached_property
    def _runs_text(self) -> bool:
        """Whether ``exec`` or ``eval`` runs a text, which may bind any name and call any function."""
        called = [(site.node.func, site.place) for site in self.walk.calls.get("eval", ())]  # type: ignore[attr-defined]
        return "exec" in self.walk.calls or any(
            isinstance(one, ast.Name) or self.qualify(one, place) == "builtins.eval" for one, place in called
        )

    def _defines(self, name: str) -> bool:
        """Say whether the file has a function, but no method, or a class of a name."""
        methods = (
            one.parent is not None and one.parent.kind == "class" for one in self.walk.functions.get(name, ())
        )
        return name in self.walk.classes or not all(methods)

    def called(self, node: ast.Call, place: Place) -> str:
        """Return the full name of what a call calls, also by partial."""
        full = self.qualify(node.func, place)
        inner = None if full else self._partial(node.func, place, 0)
        return full if inner is None else inner.function

    def call(self, node: ast.Call, place: Place, depth: int = 0) -> Call:
        """Return a call with what partial and ``**kwargs`` put into it."""
        call = Call(node, self.qualify(node.func, place))
        inner = None if call.function or depth > _DEPTH else self._partial(node.func, place, depth)
        if inner is not None:
            call.function, call.complete = inner.function, inner.complete
            call.unpacked, call.mapped = [*inner.unpacked], inner.mapped
            call.positional = [Argument(item.value, item.place, False) for item in inner.positional]
            call.keywords = {
                name: Argument(item.value, item.place, False) for name, item in inner.keywords.items()
            }
        for value in node.args:
            if isinstance(value, ast.Starred):
                call.unpacked.append(Argument(value.value, place, False))
            elif not call.unpacked:
                call.positional.append(Argument(value, place))
        for keyword in node.keywords:
            if keyword.arg is not None:
                call.keywords[keyword.arg] = Argument(keyword.value, place)
            else:
                unpacked = self._mapping(keyword.value, place)
                call.keywords.update(unpacked or {})
                call.mapped |= unpacked is None or self._may_change(keyword.value, place)
        call.complete &= not call.unpacked and not call.mapped
        return call

    def _may_change(self, node: ast.expr, place: Place) -> bool:
        """Say whether a variable may hold other items than those it is bound with."""
        if not isinstance(node, ast.Name):
            return False
        loads = self.tree.loads.get(node.id, ())
        changed = node.id in self.tree.shared or not all(map(self._only_reads, loads))
        return changed or self.may_be_other(node.id, place)

    @cached_property
    def tree(self) -> Tree:
        """The file's tree from below."""
        return Tree(self.walk)

    def _only_reads(self, node: ast.Name) -> bool:
        """Say whether a variable is only unpacked there, or asked for an item: what it holds stays."""
        match self.tree.parents[id(node)]:
            case ast.keyword(arg=None):
                return True
            case ast.Subscript(value=of, ctx=ast.Load()):
                return of is node
            case ast.Dict(keys=keys, values=values):
                return any(key is None and of is node for key, of in zip(keys, values, strict=True))
        return False

    def item(self, node: ast.Subscript, place: Place) -> Argument | None:
        """Return what a variable's mapping, whose items nothing in the file changes, has by a literal key."""
        if not isinstance(node.value, ast.Name) or self._may_change(node.value, place):
            return None
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return (self._mapping(node.value, place) or {}).get(str(key))

    def counted(self, call: Call) -> Call | None:
        """Return the arange that a call is, or that gives what its tensor of a ``range`` holds; else None."""
        if call.function == "torch.arange":
            return call
        made = call.function in ("torch.tensor", "torch.as_tensor") or _is_new_tensor(call)
        data = call.argument(0, "data") if made else None
        ranged = None if data is None else self._range(data.value, data.place)
        if data is None or ranged is None or self.qualify(ranged.node.func, ranged.place) != "range":
            return None
        bounds = [Argument(bound, ranged.place, False) for bound in ranged.node.args]
        keywords = {name: word for name, word in call.keywords.items() if name != "data"}
        if _is_new_tensor(call) and "dtype" not in keywords:
            assert isinstance(call.node.func, ast.Attribute)
            dtype = ast.Attribute(call.node.func.value, "dtype", ast.Load())
            keywords["dtype"] = Argument(ast.copy_location(dtype, call.node.func), data.place, False)
        complete = call.complete and not ranged.mutable
        return Call(call.node, "torch.arange", bounds, keywords, complete, ranged.floats)

    def _range(self, node: ast.expr, place: Place, depth: int = 0) -> _Range | None:
        """Return the call of ``range`` whose numbers an expression lists, as they are and in their order."""
        match node:
            case ast.Call(func=ast.Name(id="range"), keywords=[]):
                unpacked = any(isinstance(bound, ast.Starred) for bound in node.args)
                return None if unpacked else _Range(node, place)
            case ast.Call(func=ast.Name(id="list" | "tuple" as name), args=[inner], keywords=[]):
                return self._range(inner, place, depth) if self.qualify(node.func, place) == name else None
            case ast.ListComp(elt=ast.Name(id=item), generators=[ast.comprehension(ifs=[]) as loop]):
                return (
                    self._range(loop.iter, place, depth) if getattr(loop.target, "id", "") == item else None
                )
            case ast.ListComp(elt=ast.Call(func=ast.Name(id="float") as called, args=[one], keywords=[])):
                counted = self._range(ast.ListComp(one, node.generators), place, depth)
                known = counted is not None and self.qualify(called, place) == "float"
                return replace(counted, floats=True) if counted is not None and known else None
            case ast.Name(id=name) if depth < _DEPTH:
                bindings = self.bindings(name, place)
                if len(bindings) == 1 and bindings[0].how == "value" and bindings[0].value is not None:
                    value = bindings[0].value
                    found = self._range(value, bindings[0].place, depth + 1)
                    kept = found is None or isinstance(value, ast.Name) or value is found.node
                    return found if found is None or kept else replace(found, mutable=True)
        return None

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
        key = (node, place)
        if key not in self._mappings:
            self._mappings[key] = self._entries(node, place)
        return self._mappings[key]

    def _entries(self, node: ast.expr, place: Place) -> dict[str, Argument] | None:
        entries: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            entries = list(zip(keys, node.values, strict=True))
        elif isinstance(node, ast.Call) and self.qualify(node.func, place) == "dict" and not node.args:
            entries = [(word.arg, word.value) for word in node.keywords]
        else:
            return None
        if not all(isinstance(key, str) for key, _ in entries):
            return None
        return {str(key): Argument(value, place, False) for key, value in entries}


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return what a call is given, but for mappings that it unpacks."""
    return [*call.args, *[word.value for word in call.keywords if word.arg is not None]]


def _is_new_tensor(call: Call) -> bool:
    return getattr(call.node.func, "attr", "") == "new_tensor"
