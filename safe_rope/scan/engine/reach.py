"""Where a value goes in its file, until nothing can take its dtype; or that the file does not show it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property

from safe_rope.scan.engine import tensors, ways
from safe_rope.scan.engine.call_sites import FORWARDS
from safe_rope.scan.engine.callees import ANY_DTYPES, KEEPERS, ONE_DTYPE, Callees
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.scopes import Place, Scope
from safe_rope.scan.engine.tree import Named, OpenError, Tree, last
from safe_rope.scan.engine.walk import Walk

_OWN = ("self", "cls")
_MOST = 4000  # expressions on the ways of one value
_DTYPES = re.compile(r"dtype\b")
_Bound = tuple[int, int]  # the id of a scope, and the order of what binds a variable in it
_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class _Way:
    """What is still to be followed after one node, and what was found."""

    waiting: list[ast.AST] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)
    operations: set[int] = field(default_factory=set)

    def once(self, key: object) -> bool:
        """Say whether this is the first time that something is followed."""
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


class Reach:
    """Follows the values of one file forward.

    Args:
        walk: of the file.
        inference: of the file.
        callees: of the file.
    """

    def __init__(self, walk: Walk, inference: Inference, callees: Callees) -> None:
        self._walk = walk
        self._inference = inference
        self._names = inference.names
        self._callees = callees
        self._reached: dict[int, frozenset[int] | None] = {}
        self._steps: dict[int, _Way | None] = {}
        self._readers: dict[str, dict[_Bound | None, list[ast.Name]]] = {}
        self._sums: dict[str, dict[_Bound | None, list[tuple[ast.AugAssign, _Bound]]]] = {}

    def operations(self, value: int) -> frozenset[int] | None:
        """Return the operations of one dtype that a value reaches, by id; None where one may be unseen."""
        if value not in self._reached:
            self._reached[value] = self._all(self._tree.node(value))
        return self._reached[value]

    def _all(self, start: ast.AST) -> frozenset[int] | None:
        seen, waiting, operations = {id(start)}, [start], set[int]()
        while waiting:
            step = self._step(waiting.pop())
            if step is None or len(seen) > _MOST:
                return None
            operations |= step.operations
            new = [node for node in step.waiting if id(node) not in seen]
            seen.update(map(id, new))
            waiting += new
        return frozenset(operations)

    def _step(self, node: ast.AST) -> _Way | None:
        """Return what follows a node, which is the same on every way; None where something may be unseen."""
        if id(node) not in self._steps:
            way = _Way()
            try:
                self._above(node, way)
            except OpenError:
                self._steps[id(node)] = None
            else:
                way.seen.clear()
                self._steps[id(node)] = way
        return self._steps[id(node)]

    @property
    def _tree(self) -> Tree:
        return self._names.tree

    # One step.

    def _above(self, node: ast.AST, way: _Way) -> None:
        """Follow a value into what is right around it."""
        parent = self._tree.parents[id(node)]
        match parent:
            case ast.Attribute(attr=name):
                around = self._tree.parents[id(parent)]
                if isinstance(around, ast.Call) and around.func is parent:
                    self._method(around, name, way)
                elif name in ways.PARTS:
                    if not isinstance(parent.ctx, ast.Load) or isinstance(around, ast.Compare):
                        raise OpenError
                    way.waiting.append(parent)
                elif name not in ways.FACTS:
                    raise OpenError
            case ast.Call() if parent.func is not node:
                self._argument(parent, node, "", way)
            case ast.keyword(arg=name):
                call = self._tree.parents[id(parent)]
                if not isinstance(call, ast.Call) or name is None:
                    raise OpenError
                self._argument(call, node, name, way)
            case ast.Subscript(value=inner):
                if inner is node and isinstance(parent.ctx, ast.Load):
                    way.waiting.append(parent)
                elif inner is node:
                    self._indexed(parent, way)
                else:
                    self._meets({"__getitem__"}, inner)
            case ast.BinOp(left=left, op=operation, right=right):
                self._meets(ways.OPERATES, right if left is node else left)
                if isinstance(operation, ast.MatMult):
                    way.operations.add(id(parent))
                way.waiting.append(parent)
            case ast.IfExp(test=test):
                if test is not node:
                    way.waiting.append(parent)
            case ast.NamedExpr(target=target):
                self._bound(target, node, node, way)
                way.waiting.append(parent)
            case ast.Tuple() | ast.List():
                around = self._tree.parents[id(parent)]
                if isinstance(around, ast.Assign):
                    for target in around.targets:
                        self._bound(target, parent, node, way)
                else:
                    way.waiting.append(parent)
            case ast.Starred() | ast.BoolOp() | ast.Set():
                way.waiting.append(parent)
            case ast.UnaryOp(op=operation):
                if not isinstance(operation, ast.Not):
                    way.waiting.append(parent)
            case ast.Dict(values=values):
                if any(one is node for one in values):
                    way.waiting.append(parent)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                way.waiting.append(parent)
            case ast.comprehension(target=target, iter=taken):
                if taken is node:
                    self._bound(target, node, node, way)
            case ast.For(target=target, iter=taken):
                if taken is node:
                    self._bound(target, node, node, way)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._bound(target, parent.value, node, way)
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                if isinstance(parent, ast.AugAssign):
                    self._meets(ways.OPERATES, target)
                    if isinstance(parent.op, ast.MatMult):
                        way.operations.add(id(parent))
                self._bound(target, node, node, way)
            case ast.Return():
                self._returned(self._tree.place(parent).scope, way)
            case ast.Compare(left=left, comparators=others):
                for other in (left, *others):
                    self._meets(ways.COMPARES, other)
            case ast.FormattedValue() | ast.Slice() | ast.Expr() | ast.Assert():
                pass
            case ast.If() | ast.While() | ast.Raise() | ast.Delete():
                pass
            case _:
                raise OpenError

    def _meets(self, methods: set[str], other: ast.expr) -> None:
        """Check that what meets a value is no object of the file that is given it by one of some methods."""
        if methods & self._walk.functions.keys() and self._sort(other) not in ("tensor", "number", "none"):
            raise OpenError

    def _sort(self, node: ast.expr) -> str:
        return self._inference.value(node, self._tree.place(node)).sort

    # What keeps a value.

    def _bound(self, target: ast.expr, value: ast.AST, part: ast.AST, way: _Way) -> None:
        """Follow what is assigned to a target; ``part`` is the value, or the item of it that is followed."""
        place = self._tree.place(part)
        match target:
            case ast.Name(id=name):
                self._variable(name, {(id(place.scope), place.order)}, way)
                if place.scope.kind == "class":
                    self._attribute(name, way)
            case ast.Attribute(value=ast.Name(id=of), attr=name) if of in _OWN:
                self._attribute(name, way)
            case ast.Tuple(elts=some) | ast.List(elts=some):
                values: list[ast.AST] = [part] * len(some)
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(some):
                    values = [*value.elts]
                for one, given in zip(some, values, strict=True):
                    if value is part or given is part:
                        self._bound(one, given, given, way)
            case ast.Starred(value=inner):
                self._bound(inner, value, part, way)
            case ast.Subscript(value=held, slice=index):
                is_tensor = self._inference.value(held, place).sort == "tensor"
                if is_tensor or _may_be_part(index) or self._inference.value(index, place).sort == "tensor":
                    self._indexed(target, way)
                if not is_tensor and not _is_part(index):
                    self._meets({"__setitem__"}, held)
                    self._put(held, way)
            case _:
                raise OpenError

    def _indexed(self, target: ast.Subscript, way: _Way) -> None:
        """Follow a value into an assignment to items of a tensor, which takes one dtype unless it casts."""
        statement = self._tree.parents[id(target)]
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            if not self._callees.is_plain(target.slice, self._tree.place(target)):
                way.operations.add(id(statement))
        elif not isinstance(statement, ast.AugAssign | ast.Delete):
            raise OpenError

    def _put(self, held: ast.expr, way: _Way) -> None:
        """Follow a list or the like that the value was put into."""
        place = self._tree.place(held)
        match held:
            case ast.Name(id=name):
                bindings = self._names.bindings(name, place)
                if not bindings or any(one.how == "parameter" for one in bindings):
                    raise OpenError
                self._variable(name, {(id(one.place.scope), one.place.order) for one in bindings}, way)
            case ast.Attribute(value=ast.Name(id=of), attr=name) if of in _OWN:
                self._attribute(name, way)
            case _:
                raise OpenError

    def _variable(self, name: str, bound: set[_Bound], way: _Way) -> None:
        """Follow where a variable is read, by the scopes and orders of what binds it."""
        following = [bound]
        while following:
            bound = following.pop()
            if not ways.ALL_NAMES.isdisjoint(self._tree.loads) or self._is_listed(bound):
                raise OpenError
            way.waiting += self._reading(name, bound)
            summed = self._summing(name)
            for statement, at in (one for binding in (None, *bound) for one in summed.get(binding, ())):
                if at not in bound and way.once((name, at)):
                    if isinstance(statement.op, ast.MatMult):
                        way.operations.add(id(statement))
                    following.append({at})

    def _summing(self, name: str) -> dict[_Bound | None, list[tuple[ast.AugAssign, _Bound]]]:
        """Return the augmented assignments of a variable, with what each binds, by what it reads."""
        if name not in self._sums:
            sums: dict[_Bound | None, list[tuple[ast.AugAssign, _Bound]]] = {}
            for statement in self._tree.augmented:
                if getattr(statement.target, "id", "") == name:
                    place = self._tree.place(statement)
                    for read in self._binding(name, place):
                        sums.setdefault(read, []).append((statement, (id(place.scope), place.order)))
            self._sums[name] = sums
        return self._sums[name]

    def _is_listed(self, bound: set[_Bound]) -> bool:
        """Say whether ``locals`` or ``globals`` gives the variables of one of some scopes."""
        scopes = {scope for scope, _ in bound}
        if "globals" in self._tree.loads and id(self._walk.module) in scopes:
            return True
        around = [self._tree.place(node).scope for node in self._tree.loads.get("locals", ())]
        return any(id(scope) in scopes for one in around for scope in one.upward())

    def _reading(self, name: str, bound: set[_Bound]) -> list[ast.Name]:
        """Return where a variable is read, the use of very many bindings among them."""
        if name not in self._readers:
            readers = self._readers[name] = {}
            for node in self._tree.loads.get(name, ()):
                for at in self._binding(name, self._tree.place(node)):
                    readers.setdefault(at, []).append(node)
        found = (node for at in (None, *bound) for node in self._readers[name].get(at, ()))
        return [*{id(node): node for node in found}.values()]

    def _binding(self, name: str, place: Place) -> set[_Bound | None]:
        """Return the scopes and orders of what may bind a name, and None where that is very much."""
        bindings = self._names.bindings(name, place)
        many = {None} if len(bindings) > 64 else set()
        return many | {(id(one.place.scope), one.place.order) for one in bindings}

    def _attribute(self, name: ast.expr | str, way: _Way) -> None:
        """Follow where an attribute of any object is read, also by its name as a string, or a computed one.

        Of whose object it is nothing shows: a class that derives from two hands the attributes of one to the
        methods of the other.
        """
        named = Named(name)
        if not way.once(named.pattern):
            return
        tree = self._tree
        if tree.computes or not ways.ALL_NAMES.isdisjoint(tree.loads):
            raise OpenError
        if any(one in tree.attributes for one in ways.ALL_ATTRIBUTES):
            raise OpenError
        if tree.matches_by_order or not ways.SETS.isdisjoint(self._walk.functions):
            raise OpenError
        if any(map(named.may_be, {*tree.matched, *self._setters})):
            raise OpenError
        way.waiting += self._attribute_reads(named)
        for statement in self._tree.augmented:
            if named.may_be(getattr(statement.target, "attr", "")) and isinstance(statement.op, ast.MatMult):
                way.operations.add(id(statement))

    @cached_property
    def _setters(self) -> set[str]:
        """The attributes that a function of the file sets."""
        some = (scope for scopes in self._walk.functions.values() for scope in scopes)
        decorated = ((scope.name, getattr(scope.node, "decorator_list", ())) for scope in some)
        return {name for name, decorators in decorated if "setter" in map(_decorator, decorators)}

    def _attribute_reads(self, named: Named) -> list[ast.expr]:
        reads: list[ast.expr] = [
            node
            for name in ([named.part] if named.literal else filter(named.may_be, self._tree.attributes))
            for node in self._tree.attributes.get(name, ())
        ]
        for constant in self._tree.naming(named):
            match self._tree.parents[id(constant)]:
                case ast.Call(func=ast.Name(id="getattr")) as call:
                    reads.append(call)
                case ast.Call(func=ast.Attribute(attr="get_buffer" | "get_parameter")) as call:
                    reads.append(call)
                case ast.Call(func=function):
                    if getattr(function, "attr", getattr(function, "id", "")) not in ways.LOOKS:
                        raise OpenError
                case ast.Subscript() | ast.keyword():
                    raise OpenError
        computed = self._tree.computed
        return reads + [call for call, one in computed if not named.literal or one.may_be(named.part)]

    # What is called.

    def _returned(self, scope: Scope, way: _Way) -> None:
        """Follow what a function returns to its callers in the file; others are out of sight."""
        node = scope.node
        if scope.name in FORWARDS or scope.name.startswith("__") or not isinstance(node, _DEFINED):
            raise OpenError
        decorators = {_decorator(one) for one in node.decorator_list}
        if not decorators <= ways.TRANSPARENT:
            raise OpenError
        if not way.once(id(scope)):
            return
        owner = scope.parent if scope.parent is not None and scope.parent.kind == "class" else None
        references: list[ast.expr] = [*self._tree.loads.get(scope.name, ())]
        if owner is None and self._is_named(scope.name):
            raise OpenError
        if owner is not None:
            # The body of the class has it by its plain name, and ``@f.setter`` calls none.
            own = [load for load in references if self._tree.place(load).scope is owner]
            named = [load for load in own if not isinstance(self._tree.parents[id(load)], ast.Attribute)]
            references = named + self._attribute_reads(Named(scope.name))
        if decorators & {"property", "cached_property"}:
            way.waiting += references
            return
        for reference in references:
            self._called(reference, way)

    def _is_named(self, function: str) -> bool:
        """Say whether a function may be read by its name as a string."""
        naming = (self._tree.parents[id(one)] for one in self._tree.naming(Named(function)))
        gets = (ast.Subscript, ast.Call)
        return "globals" in self._tree.loads or any(isinstance(one, gets) for one in naming)

    def _called(self, reference: ast.expr, way: _Way) -> None:
        """Follow the results of a function through an expression that is it."""
        if not way.once(("called", id(reference))):
            return
        parent = self._tree.parents[id(reference)]
        match parent:
            case ast.Call(func=function) if function is reference:
                way.waiting.append(parent)
            case ast.IfExp():
                self._called(parent, way)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                place = self._tree.place(parent)
                if place.scope.kind == "class":  # from now on an attribute, too
                    raise OpenError
                for load in self._reading(name, {(id(place.scope), place.order)}):
                    self._called(load, way)
            case ast.Compare():
                pass
            case _:
                raise OpenError

    def _method(self, call: ast.Call, name: str, way: _Way) -> None:
        """Follow a value into what a method of it gives."""
        if name in ("to", "type", "type_as"):
            target = tensors.cast_argument(
                self._inference, self._inference.call(call, self._tree.place(call))
            )
            if target is not None:
                sort = self._inference.of(target).sort
                named = sort != "none" and _DTYPES.search(ast.unparse(target.value))
                if sort in ("dtype", "tensor") or name == "type_as" or named:
                    return
            elif name == "type":  # the name of its dtype
                raise OpenError
        plain = name.strip("_")
        if plain in ways.ENDS or name in ("append", "extend", "insert"):
            return
        if name == "view" and any(self._sort(one) == "dtype" for one in call.args):
            raise OpenError  # its bits
        if plain in ONE_DTYPE:
            way.operations.add(id(call))
        elif plain not in ANY_DTYPES and not name.startswith("new_"):
            raise OpenError
        way.waiting.append(call)

    def _argument(self, call: ast.Call, node: ast.AST, keyword: str, way: _Way) -> None:
        """Follow a value into a call that is given it."""
        place = self._tree.place(call)
        made = self._inference.call(call, place)
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        torch = made.function.partition(".")[0] in ("torch", "einops")
        if made.function in ways.NO_TENSOR or (torch and name in ways.ENDS):
            return
        if made.function in ways.SAME and any(one.arg == "key" for one in call.keywords):
            raise OpenError
        if made.function in ways.SAME or keyword == "dtype":
            way.waiting.append(call)
            return
        if made.function == "setattr":
            self._attribute(call.args[1], way)
            return
        if not torch and isinstance(function, ast.Attribute):
            of = getattr(function.value, "id", "")
            if name in ("register_buffer", "register_parameter") and call.args:
                self._attribute(call.args[0], way)
                return
            if name in KEEPERS:
                self._meets({name}, function.value)
                self._put(function.value, way)
                return
            plain = name.strip("_")
            if of not in _OWN and plain in ANY_DTYPES | ONE_DTYPE:
                if any(one.owner is not None for one in self._walk.functions.get(name, ())):
                    raise OpenError
                if plain in ONE_DTYPE:
                    way.operations.add(id(call))
                if not name.endswith("_") and plain not in ways.ENDS:
                    way.waiting.append(call)
                return
        takes_any = self._callees.takes_any(made, self._callees.given(made, place), place)
        if takes_any is None or (not made.complete and not torch):
            raise OpenError
        if torch:
            if not takes_any:
                way.operations.add(id(call))
            way.waiting.append(call)
            return
        for scope in self._callees.scopes(call, place):
            self._parameter(scope, call, node, keyword, way)

    def _parameter(self, scope: Scope, call: ast.Call, node: ast.AST, keyword: str, way: _Way) -> None:
        """Follow an argument into a function of the file."""
        arguments = scope.node.args  # type: ignore[attr-defined]
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        if not keyword:
            if scope.parent is not None and scope.parent.kind == "class":
                decorators = {_decorator(one) for one in scope.node.decorator_list}  # type: ignore[attr-defined]
                names = names if "staticmethod" in decorators else names[1:]
            at = next(number for number, one in enumerate(call.args) if one is node)
            keyword = names[at] if at < len(names) else ""
        if keyword not in {*names, *(one.arg for one in arguments.kwonlyargs)}:
            raise OpenError
        if way.once((id(scope), keyword)):
            self._variable(keyword, {(id(scope), 0)}, way)


def _decorator(node: ast.expr) -> str:
    """Return the last part of the name of a decorator."""
    return last(node.func if isinstance(node, ast.Call) else node)


def _is_part(index: ast.expr) -> bool:
    """Say whether only a tensor takes such an index."""
    items = index.elts if isinstance(index, ast.Tuple) else []
    return any(isinstance(item, ast.Slice) or getattr(item, "value", "") in (None, ...) for item in items)


def _may_be_part(index: ast.expr) -> bool:
    """Say whether an index may be a tensor's: a list takes a slice, too, and a dictionary a tuple."""
    return isinstance(index, ast.Tuple | ast.Slice | ast.Compare | ast.UnaryOp)
