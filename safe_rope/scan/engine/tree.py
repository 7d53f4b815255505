"""One file's tree from below: what is around each node, and where names, attributes and strings are read."""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine.nodes import children, pattern
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.walk import Walk

_LONG = 200  # characters that no dotted name has
_GETTERS = ("attrgetter", "methodcaller")


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
        self.nodes: dict[int, ast.AST] = {}
        self.parents: dict[int, ast.AST] = {}
        self.loads: dict[str, list[ast.Name]] = {}
        self.attributes: dict[str, list[ast.Attribute]] = {}
        self.strings: dict[str, list[ast.Constant]] = {}
        self.augmented: list[ast.AugAssign] = []
        # Attributes that are read by a name that is computed, but for those of a configuration.
        self.computed: list[tuple[ast.Call, Named]] = []
        self.computes = False  # whether a function is made that reads attributes by such names
        self._places = {id(statement): place for statement, place in walk.statements}
        waiting: list[ast.AST] = [walk.module.node]
        while waiting:
            node = waiting.pop()
            self.nodes[id(node)] = node
            for child in children(node):
                self.parents[id(child)] = node
                waiting.append(child)
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    self.loads.setdefault(name, []).append(node)
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    self.attributes.setdefault(name, []).append(node)
                case ast.Constant(value=str(name)):
                    for part in {name, *(name.split(".") if len(name) < _LONG else ())}:
                        self.strings.setdefault(part, []).append(node)
                case ast.AugAssign():
                    self.augmented.append(node)
                case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *_]):
                    if not isinstance(name, ast.Constant) and "config" not in ast.unparse(of):
                        self.computed.append((node, Named(name)))
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=some) if (
                    name in _GETTERS
                ):
                    self.computes |= not all(isinstance(one, ast.Constant) for one in some)

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
