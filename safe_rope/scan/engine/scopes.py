"""Scopes, what each name is bound to in them, and where expressions stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Function = ast.FunctionDef | ast.AsyncFunctionDef
# The branches that lead to a statement: pairs of a compound statement's id and its arm.
Path = tuple[tuple[int, int], ...]
Kind = Literal["constructor", "forward", "script", "unknown"]
Run = Kind | Literal["helper"]  # what only its name, or its caller's, says that a constructor calls
# What a tensor is asked for.
ASKED = {"device", "dtype", "shape", "size", "ndim"}
# Methods that write items of a mapping.
WRITES_ITEMS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__"}
# The arm that is a loop's body: what is bound in it reaches what stands before, too.
LOOP = 0


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class or function."""

    name: str
    kind: str  # "module", "class" or "function"
    parent: Scope | None
    node: ast.AST
    bindings: dict[str, list[Binding]] = field(default_factory=dict)  # of each name, in the order of the text
    # What comprehensions and lambdas bind, by name and the order of the statement that they are in.
    inner: dict[tuple[str, int], list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # of a class: self.name = value
    bases: list[str] = field(default_factory=list)
    returns: list[tuple[ast.expr, Place]] = field(default_factory=list)
    declared: dict[str, Scope] = field(
        default_factory=dict
    )  # global and nonlocal names: where they are bound
    imports: dict[str, str] = field(default_factory=dict)  # full names by local ones, of the last imports
    takes_tensors: bool = False  # a function that asks a parameter for its device, dtype or shape
    owner: Scope | None = field(init=False)  # the class that this scope is, or is in

    def __post_init__(self) -> None:
        around = None if self.parent is None else self.parent.owner
        self.owner = self if self.kind == "class" else around

    def upward(self) -> Iterator[Scope]:
        """Yield this scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


# Made by the ten thousands, and therefore not frozen: a frozen one takes three times as long to make.
@dataclass(slots=True, eq=False)
class Place:
    """Where an expression stands: what it can see."""

    scope: Scope
    order: int
    path: Path
    contexts: tuple[ast.expr, ...] = ()  # of the with statements around it


@dataclass(slots=True, eq=False)
class Binding:
    """One way in which a name gets a value.

    ``how`` is "value", "element" (one of several unpacked from the value), "item" (an item that a loop
    takes from the value), "buffer" (the value as a registered buffer) or "parameter". It is "lambda" for a
    parameter of a lambda.
    """

    how: str
    value: ast.expr | None
    place: Place
    annotation: ast.expr | None = None
    parameter: str = ""
    index: tuple[int, ...] = ()  # of what is unpacked, and of what that is unpacked from


@dataclass(slots=True, eq=False)
class Site:
    """An expression that a rule may look at, and the expressions and the statement around it."""

    node: ast.expr
    ancestors: tuple[ast.AST, ...]  # from the statement inwards
    place: Place

    @property
    def targets(self) -> list[ast.expr]:
        """What the statement assigns to."""
        statement = self.ancestors[0] if self.ancestors else None
        return statement.targets if isinstance(statement, ast.Assign) else []
