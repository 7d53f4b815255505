"""What the calls of one file give to its functions, directly or in another way."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from safe_rope.scan.engine.names import Argument, Call, Names, arguments_of
from safe_rope.scan.engine.nodes import parameters_of, targets_of
from safe_rope.scan.engine.scopes import WRITES_ITEMS, Function, Place, Scope, Site
from safe_rope.scan.engine.walk import Walk

FORWARDS = ("forward", "__call__")  # called through their module, by no name
# Methods of lists, mappings and the like that keep what they are given.
_KEEPS = {"append", "extend", "insert", "add", "appendleft", "setdefault", "update", "put"}
Alias = tuple[str, Scope]  # a name, and the scope in which something has it


class CallSites:
    """Finds what a function's parameters are given by the calls in the same file.

    Args:
        walk: of the file.
        names: of the file.
        whole: it is all of the file; else what holds its functions is not asked, which only a safe fix needs.
    """

    def __init__(self, walk: Walk, names: Names, *, whole: bool = True) -> None:
        self._whole = whole
        self._walk = walk
        self._names = names
        self._known: dict[int, list[Call]] = {}
        self._calls_made: dict[int, Call] = {}
        self._given_after: dict[tuple[str, int], list[Call]] = {}
        # Of a table and a name, the sites in each scope.
        self._inside: dict[tuple[int, str], dict[int, list[Site]]] = {}
        self._passed: dict[int, set[str]] = {}  # of a scope, the names that it does more with than call them
        # Of a function, the calls with something unpacked, and those that may be of it.
        self._supposed: dict[int, tuple[list[Call], list[Call]]] = {}
        self._constructing: dict[int, list[Call]] = {}
        self._to_variables: dict[tuple[int, str], list[Argument]] = {}
        self._arguments: dict[tuple[int, str, bool], list[Argument]] = {}

    def arguments(self, scope: Scope, parameter: str, *, indirect: bool = False) -> list[Argument]:
        """Return the arguments that calls give to a parameter.

        Args:
            scope: the function.
            parameter: its name.
            indirect: also by what is given the function, as ``partial`` is, by ``super().__init__``, and by a
                class that inherits it.
        """
        if not isinstance(scope.node, Function) or scope.name in FORWARDS:
            return []
        key = (id(scope), parameter, indirect)
        if key not in self._arguments:
            calls = self._calls(scope)
            if indirect:
                calls = [*calls, *self._indirect(scope)]
            position = self._position(scope, parameter)
            found = (call.argument(position + self._is_unbound(scope, call), parameter) for call in calls)
            self._arguments[key] = [argument for argument in found if argument is not None]
        return self._arguments[key]

    def _is_unbound(self, scope: Scope, call: Call) -> bool:
        """Say whether a call is of a method by its class, with the object as its first argument."""
        function = call.node.func
        if scope.parent is None or scope.parent.kind != "class" or not isinstance(function, ast.Attribute):
            return False
        return function.attr == scope.name and not _is_of_class(scope) and self._is_class(function.value)

    def _is_class(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._walk.classes

    def supposed(self, scope: Scope, parameter: str) -> list[Argument]:
        """Return what calls may give to a parameter besides.

        By a sequence or a mapping that is unpacked, under another name of the function, or through what an
        expression gives.
        """
        if not isinstance(scope.node, Function):
            return []
        position = self._position(scope, parameter)
        if id(scope) not in self._supposed:
            if scope.name in FORWARDS:
                self._supposed[id(scope)] = ([], self._of_objects)
            else:
                named = [*self._calls(scope), *self._indirect(scope)]
                incomplete = [one for one in named if not one.complete]
                self._supposed[id(scope)] = (incomplete, self._otherwise(scope))
        named, others = self._supposed[id(scope)]
        found = [call.argument(position, parameter) for call in others]
        if scope.owner is not None and scope.name != "__init__":  # with the object before it
            found += [call.argument(position + 1, parameter) for call in others]
        given = [argument for argument in found if argument is not None]
        given += self._of_holders(scope, position, parameter)
        given += self.unpacked(call for call in named + others if len(call.positional) <= position)
        given += self._packed(scope, parameter)
        return given + (self.items(parameter) if any(call.mapped for call in named) else [])

    def _otherwise(self, scope: Scope) -> list[Call]:
        """Return the calls of what may be a function, or a class, under another name or none."""
        calls = self._walk.calls
        sites = [*calls.get("", ()), *calls.get("__call__", ())]
        sites += [site for one in self._names_of(scope)[1:] for site in self._sites(calls, one)]
        return self._made(sites)

    def _of_holders(self, scope: Scope, position: int, parameter: str) -> list[Argument]:
        """Return what calls of variables give, where something of the file holds the function."""
        found = self.of_variables(position, parameter) if self._whole else []
        return found if found and any(map(self._is_held, self._names_of(scope))) else []

    def _is_held(self, alias: Alias) -> bool:
        """Say whether a list, a loop or the like takes what has a name, or a function returns it."""
        tree = self._names.tree
        for load in (*tree.loads.get(alias[0], ()), *tree.attributes.get(alias[0], ())):
            match tree.parents[id(load)]:
                case ast.Call() as call if call.func is not load:
                    # What takes what the call gives may be the function.
                    taken = isinstance(tree.parents[id(call)], ast.withitem | ast.For | ast.comprehension)
                    if taken or _last(call.func) in _KEEPS:
                        return True
                case ast.keyword() as word:
                    if _last(getattr(tree.parents[id(word)], "func", load)) == "dict":
                        return True
                case (
                    ast.Call() | ast.Attribute() | ast.Compare() | ast.Assign() | ast.arg()
                    | ast.AnnAssign() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef()
                ):  # fmt: skip
                    pass
                case _:
                    return True
        return False

    def unpacked(self, calls: Iterable[Call]) -> list[Argument]:
        """Return what calls unpack, and what a function is called with that passes all of it on."""
        given = [one for call in calls for one in call.unpacked]
        seen: set[int] = set()
        for one in given:  # which grows
            scope = one.place.scope
            packed = scope.node.args.vararg if isinstance(scope.node, Function) else None
            if packed is not None and getattr(one.value, "id", "") == packed.arg and id(scope) not in seen:
                seen.add(id(scope))
                for call in self._calls(scope):
                    given += call.positional + call.unpacked
        return given

    def _packed(self, scope: Scope, parameter: str) -> list[Argument]:
        """Return what is given with a function in a tuple or the like, as a thread is given its arguments."""
        given: list[Argument] = []
        position = self._position(scope, parameter)
        for site in (site for one in self._names_of(scope) for site in self._sites(self._given, one)):
            assert isinstance(site.node, ast.Call)
            listed = [one for one in site.node.args if isinstance(one, ast.Tuple | ast.List)]
            given += [Argument(one, site.place, False) for one in listed]  # as ``map`` calls it with each
            for word in site.node.keywords:
                match word.value:
                    case ast.Tuple(elts=items) | ast.List(elts=items):
                        given += [Argument(one, site.place, False) for one in items[position : position + 1]]
                    case ast.Dict() | ast.Call(func=ast.Name(id="dict")):
                        given += self.items(parameter)
        for name, _ in self._names_of(scope):
            for items, place in self._listed.get(name, ()):
                given += [Argument(one, place, False) for one in items if _last(one) != name]
        return given

    @cached_property
    def _listed(self) -> dict[str, list[tuple[list[ast.expr], Place]]]:
        """What is listed in tuples and lists, by the last part of each name in them."""
        listed: dict[str, list[tuple[list[ast.expr], Place]]] = {}
        for node, place in self._walk.listed:
            for name in {_last(one) for one in node.elts} - {""}:
                listed.setdefault(name, []).append((node.elts, place))
        return listed

    @cached_property
    def _of_objects(self) -> list[Call]:
        """The calls that may be of modules and are given a fraction, as it is written."""
        return [
            call for call in self._of_variables if any(map(_is_written_fraction, arguments_of(call.node)))
        ]

    def of_variables(self, position: int, parameter: str) -> list[Argument]:
        """Return what the calls of variables give by a position or a name."""
        key = (position, parameter)
        if key not in self._to_variables:
            given = (call.argument(position, parameter) for call in self._of_variables)
            self._to_variables[key] = [one for one in given if one is not None]
        return self._to_variables[key]

    @cached_property
    def _of_variables(self) -> list[Call]:
        """The calls of what a variable, an attribute or an expression holds."""
        return self._made(filter(self._is_of_object, self._walk.sites))

    def _is_of_object(self, site: Site) -> bool:
        """Say whether a call may be of a module: of what a variable, an attribute or an expression holds."""
        match site.node:
            case ast.Call(func=ast.Call() | ast.Subscript()):
                return True
            case ast.Call(func=ast.Name(id=name)):
                return bool(self._names.bindings(name, site.place))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return name not in self._walk.functions
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in FORWARDS
        return False

    def _position(self, scope: Scope, parameter: str) -> int:
        assert isinstance(scope.node, Function)
        arguments = [*scope.node.args.posonlyargs, *scope.node.args.args]
        position = next((n for n, argument in enumerate(arguments) if argument.arg == parameter), 10**6)
        if scope.parent is not None and scope.parent.kind == "class":
            position -= not any(
                isinstance(decorator, ast.Name) and decorator.id == "staticmethod"
                for decorator in scope.node.decorator_list
            )
        return position

    def _of_class(self, scope: Scope) -> list[Site]:
        """Return the calls of a class, and of those of the file that derive from it."""
        names = {scope.name, "cls", "__class__"}
        waiting = [*names]
        while waiting:
            more = {one.name for one in self._names.children.get(waiting.pop(), ())} - names
            names |= more
            waiting += more
        return [site for name in names for site in self._walk.calls.get(name, ())]

    def constructing(self, scope: Scope) -> list[Call]:
        """Return the calls that may construct a class or copy an object of it, and those given the class."""
        if id(scope) not in self._constructing:
            names = ("replace", "_replace", "_make")
            copying = [site for name in names for site in self._walk.calls.get(name, ())]
            calls = self._made([*copying, *self._of_class(scope)]) + self._given_it(scope)
            self._constructing[id(scope)] = calls + self._otherwise(scope)
        return self._constructing[id(scope)]

    def _given_it(self, scope: Scope) -> list[Call]:
        return [call for one in self._names_of(scope) for call in self._after(one)]

    def _calls(self, scope: Scope) -> list[Call]:
        if id(scope) not in self._known:
            owner = scope.parent if scope.name == "__init__" else None
            self._known[id(scope)] = self._made(self._walk.calls.get(owner.name if owner else scope.name, ()))
        return self._known[id(scope)]

    def _indirect(self, scope: Scope) -> list[Call]:
        owner = scope.parent if scope.name == "__init__" else None
        sites: list[Site] = []
        if owner is not None:
            sites = [*self._of_class(owner), *self._walk.calls.get("__init__", ())]
        calls = self._made(sites)
        return calls + self._given_it(scope)

    def _after(self, alias: Alias) -> list[Call]:
        """Return the calls that are given something of a name, with what is given after it."""
        key = (alias[0], id(alias[1]))
        if key not in self._given_after:
            calls = self._given_after[key] = []
            for call in self._made(self._sites(self._given, alias)):
                at = [_last(one.value) == alias[0] for one in call.positional]
                after = at.index(True) + 1 if True in at else 0
                calls.append(replace(call, positional=call.positional[after:]))
        return self._given_after[key]

    def _sites(self, table: dict[str, list[Site]], alias: Alias) -> list[Site]:
        """Return what a table has of a name in a scope."""
        name, scope = alias
        inside = self._inside.get((id(table), name))
        if inside is None:
            inside = self._inside[id(table), name] = {}
            for site in table.get(name, ()):
                for around in site.place.scope.upward():
                    inside.setdefault(id(around), []).append(site)
        return inside.get(id(scope), [])

    def _names_of(self, scope: Scope) -> list[Alias]:
        """Return the name of a function, or of the class that it constructs, then its other names."""
        owner = scope.parent if scope.name == "__init__" else None
        names: dict[Alias, None] = {((owner or scope).name, self._walk.module): None}
        waiting = [*names]
        while waiting:
            more = self._aliases.get(waiting.pop(0)[0], {})
            waiting += [one for one in more if one not in names]
            names |= more
        return [*names]

    @cached_property
    def _given(self) -> dict[str, list[Site]]:
        """The calls that are given something, by the last part of its name."""
        given: dict[str, list[Site]] = {}
        for site in self._walk.sites:
            if isinstance(site.node, ast.Call):
                for name in {_last(one) for one in arguments_of(site.node)} - {""}:
                    given.setdefault(name, []).append(site)
        return given

    @cached_property
    def _aliases(self) -> dict[str, dict[Alias, None]]:
        """What functions and classes are called as well: what is assigned them, and what takes them."""
        aliases: dict[str, dict[Alias, None]] = {}
        everywhere = self._walk.module
        for statement, _ in self._walk.statements:
            targets = [(_last(one), everywhere) for one in targets_of(statement)]
            for held in _held(getattr(statement, "value", None)) if targets else ():
                aliases.setdefault(held, {}).update(dict.fromkeys(targets))
        for name in {*self._walk.functions, *self._walk.classes} & self._given.keys():
            for site in self._given[name]:
                assert isinstance(site.node, ast.Call)
                at = next((n for n, one in enumerate(site.node.args) if _last(one) == name), None)
                takes = self._parameters(_last(site.node.func), at) if at is not None else []
                for word in site.node.keywords:
                    if word.arg and _last(word.value) == name:
                        takes.append((word.arg, everywhere))
                aliases.setdefault(name, {}).update(dict.fromkeys(takes))
        for scopes in self._walk.functions.values():
            for scope in scopes:
                for one in scope.node.decorator_list:  # type: ignore[attr-defined]
                    made_by = one.func if isinstance(one, ast.Call) else one
                    takes = self._parameters(_last(made_by), None)
                    takes += [(name, everywhere) for name in _of_lambdas(one)]
                    if isinstance(made_by, ast.Attribute) and _last(made_by.value) in self._walk.functions:
                        takes.append((_last(made_by.value), everywhere))  # as what dispatches calls it
                    aliases.setdefault(scope.name, {}).update(dict.fromkeys(takes))
        return aliases

    def _parameters(self, name: str, at: int | None) -> list[Alias]:
        """Return what the functions of a name, or a constructor, call an argument; all of them for None.

        Of decorators, also what the functions in them do.
        """
        scopes = [*self._walk.functions.get(name, ())]
        if name in self._walk.classes:
            owner = self._walk.classes[name]
            scopes += [one for one in self._walk.functions.get("__init__", ()) if one.parent is owner]
        if at is None:
            inner = [one for scope in scopes for one in self._inner.get(id(scope), ())]
            named = [self._alias(one, scope) for scope in [*scopes, *inner] for one in _named(scope)]
            return named + [(one, scope) for scope in scopes for one in _of_lambdas(scope.node)]
        takes = ((scope, _named(scope)[at + (scope.owner is not None) :]) for scope in scopes)
        return [self._alias(one, scope) for scope, names in takes for one in names[:1]]

    def _alias(self, parameter: str, scope: Scope) -> Alias:
        """Return a parameter as a name: of its function where that only calls it, else of the file."""
        if id(scope) not in self._passed:
            nodes = [*ast.walk(scope.node)]
            wraps = {"wraps"} - self._walk.functions.keys()
            kept = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
            for node in nodes:
                if isinstance(node, ast.Call):
                    kept.update(map(id, node.args if _last(node.func) in wraps else [node.func]))
            loads = (node for node in nodes if isinstance(node, ast.Name) and id(node) not in kept)
            self._passed[id(scope)] = {node.id for node in loads}
        return parameter, self._walk.module if parameter in self._passed[id(scope)] else scope

    @cached_property
    def _inner(self) -> dict[int, list[Scope]]:
        """The functions right in each scope."""
        inner: dict[int, list[Scope]] = {}
        for scope in (one for some in self._walk.functions.values() for one in some):
            inner.setdefault(id(scope.parent), []).append(scope)
        return inner

    def items(self, key: str) -> list[Argument]:
        """Return what mappings are given by a key."""
        return self._items.get(key, [])

    @cached_property
    def _items(self) -> dict[str, list[Argument]]:
        """What mappings are given, by its key."""
        given: list[tuple[ast.expr | None, ast.expr, Place]] = []
        for node, place in self._walk.mappings:
            given += [(key, value, place) for key, value in zip(node.keys, node.values, strict=True)]
        for statement, place in self._walk.statements:
            value = getattr(statement, "value", None)
            if isinstance(value, ast.expr):
                targets = targets_of(statement)
                given += [(one.slice, value, place) for one in targets if isinstance(one, ast.Subscript)]
        makers = {"dict", *WRITES_ITEMS, *self._take_mappings()}
        for site in (site for name in makers for site in self._walk.calls.get(name, ())):
            match site.node:
                case ast.Call(args=[key, value]):
                    given.append((key, value, site.place))
                case ast.Call(keywords=words):
                    given += [(ast.Constant(word.arg), word.value, site.place) for word in words]
        items: dict[str, list[Argument]] = {}
        for name, value, place in given:
            if isinstance(name, ast.Constant):
                items.setdefault(str(name.value), []).append(Argument(value, place, False))
        return items

    def _take_mappings(self) -> Iterator[str]:
        """Yield the names of functions and classes that take any keywords."""
        for scope in (one for some in self._walk.functions.values() for one in some):
            if scope.node.args.kwarg is not None:  # type: ignore[attr-defined]
                yield self._names_of(scope)[0][0]

    def _made(self, sites: Iterable[Site]) -> list[Call]:
        made = []
        for site in sites:
            if isinstance(site.node, ast.Call):
                call = self._calls_made.get(id(site.node))
                if call is None:
                    call = self._calls_made[id(site.node)] = self._names.call(site.node, site.place)
                made.append(call)
        return made


def _of_lambdas(node: ast.AST) -> list[str]:
    """Return the parameters of the lambdas in a node."""
    made = (one for one in ast.walk(node) if isinstance(one, ast.Lambda))
    return [parameter.arg for one in made for parameter in parameters_of(one)]


def _held(node: ast.expr | None) -> Iterator[str]:
    """Yield the names, or their last parts, of what a value may be or is made with."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            yield name
        case ast.Call(args=some) | ast.BoolOp(values=some) | ast.Tuple(elts=some):
            for one in some:
                yield from _held(one)
        case ast.IfExp(body=one, orelse=other):
            yield from (*_held(one), *_held(other))


def _is_written_fraction(node: ast.expr) -> bool:
    kinds = (ast.Div, ast.Pow)
    return any(
        isinstance(getattr(one, "value", None), float) or isinstance(getattr(one, "op", None), kinds)
        for one in ast.walk(node)
    )


def _is_of_class(scope: Scope) -> bool:
    """Say whether a method takes no object."""
    decorators = {_last(one) for one in scope.node.decorator_list}  # type: ignore[attr-defined]
    return bool(decorators & {"staticmethod", "classmethod"})


def _last(node: ast.expr) -> str:
    """Return a name, or the last part of a dotted one."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _named(scope: Scope) -> list[str]:
    return [one.arg for one in parameters_of(scope.node)]
