"""One file's tree from below: what is around each node, and where names, attributes and strings are read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from safe_rope.scan.engine.nodes import FIELDS, NO_NODES, children, parameters_of, pattern
from safe_rope.scan.engine.scopes import Place, Scope
from safe_rope.scan.engine.walk import Walk

_LONG = 200  # characters that no dotted name has
_GETTERS = ("attrgetter", "methodcaller")
_ADDS = ("append", "extend", "insert")
# What gives a value to a name, or hands it on.
_HOLDING = (ast.Call, ast.comprehension, ast.NamedExpr, ast.stmt)
# A variable and the scope that binds it; or an attribute, a function or a string.
_Holder = tuple[str, Scope | None]


class Named:
    """The name of an attribute: as it is, or as what an expression can make."""

    def __init__(self, name: ast.expr | str) -> None:
        known = name.value if isinstance(name, ast.Constant) else name
        self.literal = isinstance(known, str)
        self.part = known if isinstance(known, str) else ""
        self.pattern = re.escape(self.part) if isinstance(name, str) else pattern(name)
        self._fits = None if self.literal else re.compile(self.pattern)

    def may_be(self, name: str) -> bool:
        """Say whether this can be a name."""
        return name == self.part if self._fits is None else self._fits.fullmatch(name) is not None


class OpenError(Exception):
    """The value goes where the file does not show what becomes of it."""


class Tree:
    """The nodes of one file.

    Args:
        walk: of the file.
    """

    def __init__(self, walk: Walk) -> None:
        self.parents: dict[int, ast.AST] = {}
        self.loads: dict[str, list[ast.Name]] = {}
        self.attributes: dict[str, list[ast.Attribute]] = {}
        self.strings: dict[str, list[ast.Constant]] = {}
        self.augmented: list[ast.AugAssign] = []
        self.shared: set[str] = set()  # variables that a statement assigns to others as well
        # Attributes that are read by a name that is computed, but for those of a configuration.
        self.computed: list[tuple[ast.Call, Named]] = []
        self.computes = False  # whether a function is made that reads attributes by such names
        self.matched: set[str] = set()  # attributes that a pattern reads by their names
        self.matches_by_order = False  # whether a pattern reads others of a class by their order
        self._walk = walk
        self._loads_in: dict[str, dict[int, list[ast.expr]]] = {}
        waiting: list[Any] = [walk.module.node]
        while waiting:
            node = waiting.pop()
            kind = type(node)  # there are very many nodes, and most are of the first three kinds
            if kind is ast.Name:
                if type(node.ctx) is ast.Load:
                    self.loads.setdefault(node.id, []).append(node)
                continue
            if kind is ast.Constant:
                if type(node.value) is str:
                    self._string(node.value, node)
                continue
            if kind is ast.Attribute:
                if type(node.ctx) is ast.Load:
                    self.attributes.setdefault(node.attr, []).append(node)
            elif kind is ast.AugAssign:
                self.augmented.append(node)
            elif kind is ast.Assign and len(node.targets) > 1:
                self.shared.update(one.id for one in node.targets if isinstance(one, ast.Name))
            elif kind is ast.Call:
                self._call(node)
            elif kind is ast.MatchClass:
                self.matched.update(node.kwd_attrs)
                self.matches_by_order |= bool(node.patterns)
            for name in FIELDS[kind]:
                child: Any = getattr(node, name, None)
                if type(child) is not list:
                    child = (child,)
                for item in child:
                    if type(item) not in NO_NODES:
                        self.parents[id(item)] = node
                        waiting.append(item)
        for getter in self.loads.get("getattr", ()):
            called = self.parents[id(getter)]
            self.computes |= not isinstance(called, ast.Call) or called.func is not getter

    def _string(self, text: str, node: ast.Constant) -> None:
        for part in {text, *text.split(".")} if "." in text and len(text) < _LONG else (text,):
            self.strings.setdefault(part, []).append(node)

    def _call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *_]):
                if not isinstance(name, ast.Constant) and "config" not in ast.unparse(of):
                    self.computed.append((node, Named(name)))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=some) if name in _GETTERS:
                self.computes |= not all(isinstance(one, ast.Constant) for one in some)

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {id(statement): place for statement, place in self._walk.statements}

    def node(self, known: int) -> ast.AST:
        """Return the node of an id.

        Raises:
            OpenError: the tree has none.
        """
        if known not in self.parents:
            raise OpenError
        return next(one for one in children(self.parents[known]) if id(one) == known)

    def made_of(self, some: Iterable[int]) -> set[int]:
        """Return the ids of the expressions and statements that hold some nodes, or what may be made of them.

        Attributes of one name are one, and so are functions: more is returned than is true.
        """
        found = {*some}
        holders: set[_Holder] = set()
        waiting = [self.node(one) for one in found]
        while waiting:
            node = waiting.pop()
            found.add(id(node))
            while not isinstance(node, ast.stmt) and id(node := self.parents[id(node)]) not in found:
                found.add(id(node))
                for holder in {*self._holders(node)} - holders if isinstance(node, _HOLDING) else ():
                    holders.add(holder)
                    waiting += self._reads(*holder)
        return found

    def _reads(self, name: str, scope: Scope | None) -> list[ast.expr]:
        """Return where a variable of a scope is read, or, without one, what any object has by a name."""
        loads = self.loads.get(name, [])
        if scope is None or scope.kind != "function":
            return [*loads, *self.attributes.get(name, ()), *self.strings.get(name, ())]
        if name not in self._loads_in:
            inside = self._loads_in[name] = {}
            for load in loads:
                for around in self._scope(load).upward():
                    inside.setdefault(id(around), []).append(load)
        return self._loads_in[name].get(id(scope), [])

    def _holders(self, node: ast.AST) -> Iterator[_Holder]:
        """Yield what holds, after an expression or a statement, what may be made of a part of it."""
        match node:
            case ast.Call(func=function, args=given):
                for one in (function, *given):
                    yield from self._parameters.get(last(one), ())
                    if isinstance(getattr(one, "value", None), str):
                        yield one.value, None  # type: ignore[attr-defined]
                if isinstance(function, ast.Attribute) and function.attr in _ADDS:
                    yield from _targets(function.value, self._scope(node))
            case ast.Assign(targets=targets):
                for target in targets:
                    yield from _targets(target, self._scope(node))
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.NamedExpr(target=target):
                yield from _targets(target, self._scope(node))
            case (
                ast.comprehension(target=target, iter=taken) | ast.For(target=target, iter=taken)
                | ast.AsyncFor(target=target, iter=taken)
            ):  # fmt: skip
                yield from _targets(target, self._scope(taken))
            case ast.Return():
                yield self._scope(node).name, None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from self._parameters.get(name, ())  # of which it may be a default

    def _scope(self, node: ast.AST) -> Scope:
        """Return the scope around a node, or the module's where the walk has not seen it."""
        try:
            return self.place(node).scope
        except OpenError:
            return self._walk.module

    @cached_property
    def _parameters(self) -> dict[str, list[_Holder]]:
        """The parameters of the functions of a name, and of the constructor of a class."""
        known: dict[str, list[_Holder]] = {}
        for name, scopes in self._walk.functions.items():
            for scope in scopes:
                called = scope.parent.name if name == "__init__" and scope.parent is not None else name
                known.setdefault(called, []).extend((one.arg, scope) for one in parameters_of(scope.node))
        return known

    def place(self, node: ast.AST) -> Place:
        """Return where a node stands.

        Raises:
            OpenError: it stands in no statement that the walk has seen.
        """
        while id(node) not in self._places:
            if id(node) not in self.parents:
                raise OpenError
            node = self.parents[id(node)]
        return self._places[id(node)]

    def naming(self, named: Named) -> list[ast.Constant]:
        """Return the strings that are a name, or a part of a dotted one."""
        if named.literal:
            return self.strings.get(named.part, [])
        return [node for name, nodes in self.strings.items() if named.may_be(name) for node in nodes]


def last(node: ast.expr) -> str:
    """Return a name, or the last part of a dotted one."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _targets(target: ast.expr, scope: Scope) -> Iterator[_Holder]:
    """Yield the variables and attributes that an assignment in a scope changes."""
    match target:
        case ast.Name(id=name):
            yield name, scope.declared.get(name, scope)
        case ast.Attribute(attr=name):
            yield name, None
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            yield from _targets(inner, scope)
        case ast.Tuple(elts=some) | ast.List(elts=some):
            for one in some:
                yield from _targets(one, scope)
