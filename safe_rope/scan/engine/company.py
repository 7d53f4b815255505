"""Which operations take tensors of one dtype only, and what meets in them."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from safe_rope.scan.engine import tensors
from safe_rope.scan.engine.callees import MOST_CALLS, Callees, Operand, surely_takes_any
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.names import Call
from safe_rope.scan.engine.scopes import Binding, Place, Scope
from safe_rope.scan.engine.values import PINNED
from safe_rope.scan.engine.walk import Walk

# What gives a tensor of the dtype of what it is given.
_KEEPING = (
    tensors.KEPT | tensors.JOINED | tensors.FLOATED | tensors.SUMMED | tensors.ROUNDED
    | set(tensors.OPERATORS)
    | {"cartesian_prod", "einsum", "where", "rearrange", "lerp"}
)  # fmt: skip
_FREE = {"linspace", "logspace"}  # of torch's constructors, those that no one replaces
_NUMBERS = {"size", "numel", "dim", "item", "tolist", "len", "shape", "dtype", "device", "ndim"}
_DEPTH = 40
_MOST = 400  # expressions of one operand that a loop makes asked again
_MOST_FUNCTIONS = 3  # of one name
_WRITES = {"append", "extend", "insert"}

# The certain expressions that a value is made of, by id, and whether nothing else in it is floating.
_Made = tuple[frozenset[int], bool]
_OTHER: _Made = (frozenset(), False)
_NO_TENSOR: _Made = (frozenset(), True)


class Group(NamedTuple):
    """The certain expressions that meet in an operation of one dtype, ``only`` these, or others too."""

    operation: int  # by id
    members: frozenset[int]
    only: bool


class Company:
    """Follows the operands of one file's operations back to what makes them.

    Args:
        walk: of the file.
        inference: of the file.
        callees: of the file.
    """

    def __init__(self, walk: Walk, inference: Inference, callees: Callees) -> None:
        self._walk = walk
        self._inference = inference
        self._certain: Collection[int] = ()
        self._callees = callees
        self._known: dict[tuple[int, int], _Made] = {}
        self._active: set[tuple[int, int]] = set()  # what is being asked
        self._asked = 0  # within one question
        self._open = False  # whether a part of the answer is left to a question around
        self._operations: dict[Collection[int] | None, list[tuple[ast.AST, list[Operand]]]] = {}
        self._followed: Collection[int] = ()  # the expressions that the operations may meet
        self._near: Collection[int] = ()  # what may be made of them, by id

    def groups(
        self, certain: Collection[int], among: frozenset[int] | None = None, of: Collection[int] | None = None
    ) -> Iterator[Group]:
        """Yield what of some expressions meets where one dtype is taken.

        Args:
            certain: expressions, by id, whose fix makes them float32 whatever a default or zero.Init does.
            among: the operations, by id, that are looked at; all when None.
            of: those of the expressions that matter: a group without any may be left out; all when None.
        """
        of = certain if of is None else of
        self._certain = certain
        self._known.clear()
        if not {*of} <= {*self._followed}:
            self._followed, self._near = of, self._inference.names.tree.made_of(of)
            self._operations.clear()
        if among not in self._operations:
            self._operations[among] = [one for one in self._found(among) if one[1]]
        for node, operands in self._operations[among]:
            made, only = _joined(self._made(*operand) for operand in operands)
            if made:
                yield Group(id(node), made, only)

    def _found(self, among: frozenset[int] | None) -> Iterator[tuple[ast.AST, list[Operand]]]:
        """Yield the operations that are known to take one dtype, and what has to have it in each."""
        for site in self._walk.sites:
            if id(site.node) not in self._near or (among is not None and id(site.node) not in among):
                continue
            match site.node:
                case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                    yield site.node, [(left, site.place), (right, site.place)]
                case ast.Call() if not surely_takes_any(site.node):
                    yield site.node, self._operands(site.node, site.place)
        for statement, place in self._walk.statements:
            if among is not None and id(statement) not in among:
                continue
            match statement:
                case ast.Assign(targets=[ast.Subscript(value=target, slice=index)], value=value):
                    if not self._callees.is_plain(index, place):
                        yield statement, [(target, place), (value, place)]
                case ast.AugAssign(target=target, op=ast.MatMult(), value=value):
                    yield statement, [(target, place), (value, place)]

    def _operands(self, node: ast.Call, place: Place) -> list[Operand]:
        """Return what a call takes in one dtype, nothing where it takes any or nothing shows it."""
        call = self._inference.call(node, place)
        given = self._callees.given(call, place)
        if self._callees.takes_any(call, given, place) is not False:
            return []
        return [*given, *self._callees.receiver(call, place)]

    def _all(self, nodes: Iterable[ast.expr | None], place: Place) -> _Made:
        return _joined(self._made(node, place) for node in nodes if node is not None)

    def _made(self, node: ast.expr, place: Place) -> _Made:
        key = (id(node), id(place))
        if key in self._known:
            return self._known[key]
        if key in self._active:  # a loop: the question around it has the rest
            self._open = True
            return _NO_TENSOR
        if len(self._active) > _DEPTH or self._asked > _MOST:
            return _OTHER
        self._asked += 1
        self._active.add(key)
        made = self._of(node, place)
        self._active.remove(key)
        if not made[0] and self._inference.value(node, place).dtype == "default":
            made = _OTHER  # integers meet in it
        if not self._active:
            self._open, self._asked = False, 0
        if not self._open:
            self._known[key] = made
        return made

    def _of(self, node: ast.expr, place: Place) -> _Made:
        if id(node) in self._certain:
            return frozenset({id(node)}), True
        value = self._inference.value(node, place)
        if value.sort in ("number", "none", "device", "dtype") or (value.is_int and not value.assumed):
            return _NO_TENSOR
        match node:
            case ast.Constant() | ast.Compare() | ast.JoinedStr():
                return _NO_TENSOR
            case ast.Name(id=name):
                return self._bound(self._inference.names.bindings(name, place), name, place)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                bindings = self._inference.names.attributes(name, place)
                return self._bound(bindings) if bindings else self._attribute(name)
            case ast.Attribute(value=inner, attr=name):
                if name in _NUMBERS:
                    return _NO_TENSOR
                made, only = self._made(inner, place)
                return made | self._attribute(name)[0], only
            case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.UnaryOp(operand=inner):
                return self._made(inner, place)
            case ast.NamedExpr(value=inner) | ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner):
                return self._made(inner, place)
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                return self._all([left, right], place)
            case ast.Tuple(elts=some) | ast.List(elts=some) | ast.Dict(values=some) | ast.BoolOp(values=some):
                return self._all(some, place)
            case ast.Call():
                return self._called(self._inference.call(node, place), place)
        return _OTHER

    def _bound(self, bindings: list[Binding], name: str = "", place: Place | None = None) -> _Made:
        """Return what a variable or an attribute is made of, a list's later elements among it."""
        made = [self._binding(one) for one in bindings]
        if place is not None and any(isinstance(one.value, ast.List | ast.Dict) for one in bindings):
            first = min(one.place.order for one in bindings)
            last = (
                place.order if not place.path else math.inf
            )  # in a loop, what stands below comes before, too
            added = self._added.get((id(place.scope), name), ())
            made += [self._all(given, at) for given, at in added if first < at.order < last]
        return _joined(made) if made else _OTHER

    def _attribute(self, name: str) -> _Made:
        """Return what an attribute of some object is made of: one of the file's classes may have it."""
        made = {some for one in self._attributes.get(name, ()) for some in self._binding(one)[0]}
        properties = [
            scope for scope in self._walk.functions.get(name, ())[:_MOST_FUNCTIONS]
            if any(ast.unparse(one).endswith("property") for one in scope.node.decorator_list)  # type: ignore[attr-defined]
        ]  # fmt: skip
        returned = [one for scope in properties for one in scope.returns]
        return frozenset(made.union(*(self._made(*one)[0] for one in returned))), False

    @cached_property
    def _attributes(self) -> dict[str, list[Binding]]:
        """What an attribute of any class is bound to, by its name."""
        known: dict[str, list[Binding]] = {}
        for owner in self._walk.classes.values():
            for name, bindings in owner.attributes.items():
                known.setdefault(name, []).extend(bindings)
        return known

    def _binding(self, binding: Binding) -> _Made:
        if binding.how == "parameter":
            sites = self._inference.arguments(binding.place.scope, binding.parameter)
            given = [self._made(site.value, site.place)[0] for site in sites[:MOST_CALLS]]
            return frozenset().union(*given), False
        return _OTHER if binding.value is None else self._made(binding.value, binding.place)

    @cached_property
    def _added(self) -> dict[tuple[int, str], list[tuple[list[ast.expr], Place]]]:
        """What is put into lists and the like, by scope and variable."""
        added: dict[tuple[int, str], list[tuple[list[ast.expr], Place]]] = {}
        for statement, place in self._walk.statements:
            match statement:
                case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=attr), args=given)):
                    if attr in _WRITES:
                        added.setdefault((id(place.scope), of), []).append((given, place))
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=of))], value=value):
                    added.setdefault((id(place.scope), of), []).append(([value], place))
        return added

    def _called(self, call: Call, place: Place) -> _Made:
        """Return what a call's result is made of."""
        module, _, name = call.function.rpartition(".")
        function = call.node.func
        method = isinstance(function, ast.Attribute) and module.partition(".")[0] not in ("torch", "einops")
        name = getattr(function, "attr", name) if method else name
        if name in _NUMBERS:
            return _NO_TENSOR
        if method and name in tensors.CASTS:
            return frozenset(), tensors.CASTS[name] in PINNED
        if method and name in ("to", "type", "type_as"):
            target = tensors.cast_target(self._inference, call)
            if target is not None:
                return frozenset(), target.dtype in PINNED and not target.assumed
        if module == "torch" and (name in _FREE or (name.endswith("_like") and "dtype" in call.keywords)):
            value = self._inference.value(call.node, place)
            return frozenset(), value.dtype in PINNED and not value.assumed
        scopes = self._functions(function, call.function)
        if 0 < len(scopes) <= _MOST_FUNCTIONS:
            return _joined(self._made(*one) for scope in scopes for one in scope.returns)
        of = [function.value] if method and isinstance(function, ast.Attribute) else []
        given = [*call.node.args, *(word.value for word in call.node.keywords)]
        made, only = self._all([*of, *given], place)
        keeps = name.rstrip("_") in _KEEPING | {"to"} or (module == "torch" and name.endswith("_like"))
        return made, only and bool(given or of) and keeps

    def _functions(self, node: ast.expr, function: str) -> list[Scope]:
        """Return the functions or methods of the file that a call may mean."""
        if isinstance(node, ast.Attribute) and not function.startswith(".") and node.attr not in _KEEPING:
            return [one for one in self._walk.functions.get(node.attr, ()) if one.owner is not None]
        return self._walk.functions.get(function[1:], []) if function.startswith(".") else []


def _joined(made: Iterable[_Made]) -> _Made:
    some = list(made)
    return frozenset().union(*(one for one, _ in some)), all(only for _, only in some)
