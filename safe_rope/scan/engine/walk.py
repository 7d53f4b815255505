"""One walk over a tree: scopes, what each name is bound to, and the expressions that rules look at."""

from __future__ import annotations

import ast
import copy
import sys
from bisect import insort
from collections.abc import Iterator
from typing import Any

from safe_rope.scan.engine.nodes import parameters_of, pattern, within
from safe_rope.scan.engine.scopes import (
    ASKED,
    LOOP,
    WRITES_ITEMS,
    Binding,
    Function,
    Path,
    Place,
    Run,
    Scope,
    Site,
)

# Functions and methods that read all of a mapping, or copy it.
_COPIES = {
    "dict", "copy", "deepcopy", "len", "list", "tuple", "set", "sorted", "str", "repr", "print", "isinstance",
    "update", "dumps", "pformat", "pprint", "format", "join", "items", "asdict",
}  # fmt: skip
_LISTED = {ast.Tuple, ast.List}
_NAMES = {ast.Name, ast.Attribute}
_READS = {"getattr", "hasattr", "delattr"}
# Packages all of whose names leave torch, and what is built in, what they are.
_PLAIN = {"torch", "numpy", *sys.stdlib_module_names}
_MOST_BASES = 16  # of one class
# How the context managers begin that pass errors on.
_PASSES_ON = (
    "torch.",
    "open",
    "autocast",
    "no_grad",
    "nullcontext",
    "deepspeed.",
    "record_function",
    "init_",
)


class Walk:
    """The result of the walk."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope("", "module", None, tree)
        self._scopes = [self.module]
        self.imports: dict[str, str] = {}
        # The imported names that every later statement of the module can use, by the order of the import.
        self.bound: dict[str, int] = {}
        self.classes: dict[str, Scope] = {}
        self.functions: dict[str, list[Scope]] = {}
        self.statements: list[tuple[ast.AST, Place]] = []
        self.varied: set[str] = set()  # names for which one scope imports one thing or another
        self.stars = 0  # the order of the statement that imports all names of torch, if any does
        self.starred = 0  # the order of the last such import of another module
        self.obscured = False  # an import or an assignment may give torch, len and the like another meaning
        self.written: set[str] = set()  # attributes that are assigned to others than self
        # Patterns of attributes that are assigned by names that are made: of a class, or of any with None.
        self.computed: list[tuple[str, Scope | None]] = []
        self.mappings: list[tuple[ast.Dict, Place]] = []
        self.listed: list[tuple[ast.Tuple | ast.List, Place]] = []  # several things, a name among them
        self._order = 0
        self._body(tree.body, self.module, (), ())
        self.mentions: dict[str, list[Place]] = {}  # of attributes of self
        self.kinds: dict[tuple[int, int], Run] = {}  # where functions run, as far as it was asked
        self.sites: list[Site] = []
        for statement in self.statements:
            self._expressions(*statement)
        self.calls: dict[str, list[Site]] = {}  # by the last part of the name that is called
        for site in self.sites:
            if isinstance(site.node, ast.Call):
                name = getattr(site.node.func, "attr", getattr(site.node.func, "id", ""))
                self.calls.setdefault(name, []).append(site)
        for site in self.sites:
            if isinstance(site.node, ast.Call) and site.node.args:
                self._patches(site.node, site.node.args)
        for site in (*self.calls.get("setattr", ()), *self.calls.get("__setattr__", ())):
            match site.node:
                case ast.Call(args=[*_, ast.Constant(value=str(attribute)), _]):
                    self.written.add(attribute)
                case ast.Call(func=ast.Attribute(value=of), args=[name, _]):
                    self._computes(pattern(name), ast.unparse(of), site.place)
                case ast.Call(args=[of, name, _]):
                    self._computes(pattern(name), ast.unparse(of), site.place)
                case ast.Call(func=ast.Name()):
                    self.computed.append((r"\w*", None))
        for site in self.calls.get("__set__", ()):
            self.written.add(getattr(getattr(site.node.func, "value", None), "attr", ""))  # type: ignore[attr-defined]
        for site in (site for name in WRITES_ITEMS for site in self.calls.get(name, ())):
            self._writes(getattr(getattr(site.node, "func", None), "value", None), site.place)

    def _hands_on(self, held: ast.expr, ancestors: tuple[ast.AST, ...], place: Place) -> None:
        """Note that an object's dictionary goes where its items may be written: to a name or a function."""
        around = ancestors[-2] if ancestors and isinstance(ancestors[-1], ast.keyword) else ancestors[-1:]
        match around:
            case ast.Call(func=function) | (ast.Call(func=function),):
                if getattr(function, "attr", getattr(function, "id", "")) not in _COPIES:
                    self._writes(held, place)
            case (ast.Assign() | ast.AnnAssign() | ast.NamedExpr(),):
                self._writes(held, place)

    def _patches(self, call: ast.Call, given: list[ast.expr]) -> None:
        """Note what ``mock.patch`` may replace, and what of torch another call may."""
        name = given[0] if isinstance(given[0], ast.Constant) else given[min(len(given), 2) - 1]
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            return
        function = call.func.value if getattr(call.func, "attr", "") == "object" else call.func  # type: ignore[attr-defined]
        if getattr(function, "attr", getattr(function, "id", "")) == "patch":
            self.written.add(name.value.rpartition(".")[2])
        elif isinstance(given[0], ast.Name):
            read = getattr(call.func, "id", "") in _READS
            if self.imports.get(given[0].id) == "torch" and not read:
                self.written.add(name.value)
        elif name.value.startswith("torch.") and "patch" in ast.unparse(call.func):
            self.written.add(name.value.rpartition(".")[2])

    def _writes(self, held: ast.AST | None, place: Place, name: ast.expr | None = None) -> None:
        """Note what an item of an object's dictionary, or of some other mapping, makes of its attributes."""
        match held:
            case ast.Attribute(value=of, attr="__dict__") | ast.Call(func=ast.Name(id="vars"), args=[of]):
                match name:
                    case ast.Constant(value=str(known)) if self.imports.get(getattr(of, "id", "")) == "torch":
                        self.written.add(known)
                self._computes(r"\w*" if name is None else pattern(name), ast.unparse(of), place)
            case ast.Call(func=ast.Name(id="globals")) | ast.Attribute(attr="__globals__"):
                match name:
                    case ast.Constant(value=str(known)):
                        self._bind_aside(known, Binding("value", None, place), self.module)
                    case _:
                        self.obscured = True  # whatever is bound, whenever that runs

    def _computes(self, names: str, of: str, place: Place) -> None:
        if "config" not in of:  # no module's
            own = of in ("self", "cls", "super()")
            self.computed.append((names, place.scope.owner if own else None))

    def _expressions(self, statement: ast.AST, place: Place) -> None:
        """Note the calls and binary operations of a statement; comprehensions bind their targets."""
        node: Any
        for node, ancestors in within(statement, names=False):
            kind = type(node)  # isinstance takes longer, and there are a million nodes
            if kind is ast.Call or kind is ast.BinOp:
                self.sites.append(Site(node, ancestors, place))
                if kind is ast.Call and getattr(node.func, "id", "") in ("vars", "globals"):
                    self._hands_on(node, ancestors, place)
            elif kind is ast.Attribute:
                name = getattr(node.value, "id", "")
                if node.attr in ("__dict__", "__globals__"):
                    self._hands_on(node, ancestors, place)
                if name == "self":
                    self.mentions.setdefault(node.attr, []).append(place)
                elif name and node.attr in ASKED:
                    bound = place.scope.bindings.get(name)
                    place.scope.takes_tensors |= bool(bound and bound[0].how == "parameter")
            elif kind is ast.comprehension or kind is ast.Lambda:
                _bind_inner(node, place)
                if kind is ast.comprehension and not isinstance(node.target, ast.Name):
                    for target in ast.walk(node.target):
                        if isinstance(target, ast.Attribute):
                            self._bind_target(target, None, place)
            elif kind is ast.NamedExpr:
                _bind_named(node, place)
            elif kind is ast.Dict:
                self.mappings.append((node, place))
            elif kind in _LISTED and len(node.elts) > 1 and not _NAMES.isdisjoint(map(type, node.elts)):
                self.listed.append((node, place))

    def release(self) -> None:
        """Break the cycles between scopes and bindings, so that the tree goes without a collector."""
        for scope in self._scopes:
            scope.bindings.clear()
            scope.inner.clear()
            scope.attributes.clear()
            scope.returns.clear()
            scope.owner = None

    def _body(self, body: list[ast.stmt], scope: Scope, path: Path, contexts: tuple[ast.expr, ...]) -> None:
        for statement in body:
            self._order += 1
            place = Place(scope, self._order, path, contexts)
            handler = getattr(self, f"_{type(statement).__name__.lower()}", None)
            if handler is None:
                self.statements.append((statement, place))
            else:
                handler(statement, place)

    def _arms(self, node: ast.AST, place: Place, *arms: list[ast.stmt]) -> None:
        for number, arm in enumerate(arms, start=1):
            if arm:
                self._body(arm, place.scope, (*place.path, (id(node), number)), place.contexts)

    # Statements that bind names.

    def _import(self, node: ast.Import, place: Place) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            self._import_as(alias.asname or name, name, place)

    def _importfrom(self, node: ast.ImportFrom, place: Place) -> None:
        for alias in node.names:
            name = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            self._import_as(alias.asname or alias.name, name, place)

    def _import_as(self, local: str, name: str, place: Place) -> None:
        holder = place.scope.declared.get(local, place.scope)
        if holder.imports.setdefault(local, name) != name:
            self.varied.add(local)
        self.imports[local] = holder.imports[local] = name
        if name == "torch.*":
            self.stars = place.order
        elif local == "*":
            self.starred = place.order
            self.obscured |= name.partition(".")[0] not in _PLAIN
        if place.scope is self.module and not place.path:
            self.bound.setdefault(local, place.order)

    def _bind_target(
        self, target: ast.expr, value: ast.expr | None, place: Place, how: str = "value",
        annotation: ast.expr | None = None, index: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        binding = Binding(how, value, place, annotation, index=index)
        if isinstance(target, ast.Name):
            holder = place.scope.declared.get(target.id, place.scope)
            if holder is not place.scope:  # when the function is called, if it is
                self._bind_aside(target.id, binding, holder)
            else:
                holder.bindings.setdefault(target.id, []).append(binding)
        elif isinstance(target, ast.Subscript):
            self._writes(target.value, place, target.slice)
        elif isinstance(target, ast.Attribute):
            owner = place.scope.owner
            self._writes(target, place)
            if owner is not None and getattr(target.value, "id", "") in ("self", "cls"):
                owner.attributes.setdefault(target.attr, []).append(binding)
            elif target.attr == "data":
                self._bind_target(target.value, None, place)  # it is another tensor, of another dtype
            else:
                self.written.add(target.attr)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) and how == "value" else []
            for number, element in enumerate(target.elts):
                inner = element.value if isinstance(element, ast.Starred) else element
                if len(values) == len(target.elts):
                    self._bind_target(inner, values[number], place)
                else:
                    unpacked = "element" if how == "value" else how
                    self._bind_target(inner, value, place, unpacked, index=(*index, number))

    def _bind_aside(self, name: str, binding: Binding, holder: Scope) -> None:
        """Bind a name of a scope by what runs at another time, or not at all."""
        place = binding.place
        binding.place = Place(place.scope, place.order, _aside(binding, place), place.contexts)
        holder.bindings.setdefault(name, []).append(binding)

    def _assign(self, node: ast.Assign, place: Place) -> None:
        for target in node.targets:
            self._bind_target(target, node.value, place)
        self.statements.append((node, place))

    def _annassign(self, node: ast.AnnAssign, place: Place) -> None:
        self._bind_target(node.target, node.value, place, annotation=node.annotation)
        self.statements.append((node, place))

    def _augassign(self, node: ast.AugAssign, place: Place) -> None:
        if isinstance(node.target, ast.Name | ast.Attribute):
            loaded = copy.copy(node.target)
            loaded.ctx = ast.Load()
            value = ast.copy_location(ast.BinOp(loaded, node.op, node.value), node)
            self._bind_target(node.target, value, place)
        else:
            self._bind_target(node.target, None, place)
        self.statements.append((node, place))

    def _expr(self, node: ast.Expr, place: Place) -> None:
        self.statements.append((node, place))
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) < 2:
            return
        name, owner = call.args[0], place.scope.owner
        if call.func.attr == "register_buffer" and owner is not None and isinstance(name, ast.Constant):
            owner.attributes.setdefault(str(name.value), []).append(Binding("buffer", call.args[1], place))

    def _return(self, node: ast.Return, place: Place) -> None:
        if node.value is not None:
            place.scope.returns.append((node.value, place))
        self.statements.append((node, place))

    def _global(self, node: ast.Global, place: Place) -> None:
        place.scope.declared.update(dict.fromkeys(node.names, self.module))

    def _nonlocal(self, node: ast.Nonlocal, place: Place) -> None:
        for name in node.names:
            around = (scope for scope in place.scope.upward() if scope is not place.scope)
            place.scope.declared[name] = next((one for one in around if name in one.bindings), self.module)

    def _delete(self, node: ast.Delete, place: Place) -> None:
        for target in node.targets:
            self.bound.pop(getattr(target, "id", ""), None)
            if isinstance(target, ast.Attribute):  # its class, or __getattr__, gives another
                self.written.add(target.attr)
        self.statements.append((node, place))

    # Compound statements.

    def _functiondef(self, node: Function, place: Place) -> None:
        scope = Scope(node.name, "function", place.scope, node)
        self._scopes.append(scope)
        self.functions.setdefault(node.name, []).append(scope)
        inside = Place(scope, 0, ())
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults: list[ast.expr | None] = [None] * (len(arguments) - len(node.args.defaults))
        defaults += node.args.defaults
        parameters = [*arguments, *node.args.kwonlyargs]
        for argument, default in zip(parameters, [*defaults, *node.args.kw_defaults], strict=True):
            binding = Binding("parameter", default, inside, argument.annotation, argument.arg)
            scope.bindings.setdefault(argument.arg, []).append(binding)
        for packed in (node.args.vararg, node.args.kwarg):
            if packed is not None:
                scope.bindings.setdefault(packed.arg, []).append(Binding("value", None, inside))
        outside = (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
        self.statements += [(expression, place) for expression in outside if expression is not None]
        self._body(node.body, scope, (), ())

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, place: Place) -> None:
        scope = Scope(node.name, "class", place.scope, node)
        scope.bases = self._bases(node, scope)
        self._scopes.append(scope)
        outside = (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords))
        self.statements += [(expression, place) for expression in outside]
        self.classes.setdefault(node.name, scope)
        self._body(node.body, scope, (), ())
        imported = {name: [Binding("value", None, place)] for name in scope.imports}
        for name, bindings in (*scope.bindings.items(), *imported.items()):
            scope.attributes.setdefault(name, []).extend(bindings)

    def _bases(self, node: ast.ClassDef, scope: Scope) -> list[str]:
        """Return the names of what a class derives from, by other names too: generic, nested or made."""
        names: list[str] = []
        waiting = [*node.bases]
        for base in waiting:  # which grows
            match base:
                case ast.Name(id=name) if name not in names and len(names) < _MOST_BASES:
                    names.append(name)
                    bound = [one for around in scope.upward() for one in around.bindings.get(name, ())]
                    waiting += [one.value for one in bound if one.value is not None]
                case ast.Attribute(value=ast.Name(id=of), attr=name) if of not in self.imports:
                    names.append(name)
                case ast.Subscript(value=inner) | ast.Starred(value=inner):
                    waiting.append(inner)
                case ast.Call(args=some) | ast.Tuple(elts=some) | ast.List(elts=some):
                    waiting += some
        return names

    def _if(self, node: ast.If, place: Place) -> None:
        while True:  # not recursive: a chain of elif may be longer than the stack is deep
            self.statements.append((node.test, place))
            self._arms(node, place, node.body)
            place = Place(place.scope, place.order, (*place.path, (id(node), 2)), place.contexts)
            if len(node.orelse) != 1 or not isinstance(node.orelse[0], ast.If):
                break
            node = node.orelse[0]
        self._body(node.orelse, place.scope, place.path, place.contexts)

    def _while(self, node: ast.While, place: Place) -> None:
        self.statements.append((node.test, place))
        self._loop(node, place)

    def _for(self, node: ast.For | ast.AsyncFor, place: Place) -> None:
        inside = Place(place.scope, place.order, (*place.path, (id(node), LOOP)), place.contexts)
        self._bind_target(node.target, node.iter, inside, "item")
        self.statements.append((node.iter, place))
        self._loop(node, place)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, place: Place) -> None:
        self._body(node.body, place.scope, (*place.path, (id(node), LOOP)), place.contexts)
        # What the loop binds reaches what is run after it, too.
        self._body(node.orelse, place.scope, (*place.path, (id(node.orelse), 1)), place.contexts)

    _asyncfor = _for

    def _with(self, node: ast.With | ast.AsyncWith, place: Place) -> None:
        contexts = tuple(item.context_expr for item in node.items)
        for item in node.items:
            self.statements.append((item.context_expr, place))
            if item.optional_vars is not None:
                self._bind_target(item.optional_vars, None, place)
        # One that may go on after an error leaves what was bound before.
        goes_on = not all(_raises_on(one) for one in contexts)
        path = (*place.path, (id(node.body), 1)) if goes_on else place.path
        self._body(node.body, place.scope, path, (*place.contexts, *contexts))

    _asyncwith = _with

    def _try(self, node: ast.Try, place: Place) -> None:
        # What a try assigns holds in its handlers and afterwards, and so may what it assigned before.
        tried = (*place.path, (id(node.body), 1))
        self._body([*node.body, *node.orelse], place.scope, tried, place.contexts)
        for number, handler in enumerate(node.handlers, start=2):
            if handler.name is not None:
                inside = Place(place.scope, self._order, (*place.path, (id(node), number)), place.contexts)
                self._bind_target(ast.Name(handler.name), None, inside)
        self._arms(node, place, [], *(handler.body for handler in node.handlers))
        self._body(node.finalbody, place.scope, place.path, place.contexts)

    _trystar = _try

    def _match(self, node: ast.Match, place: Place) -> None:
        self.statements.append((node.subject, place))
        for inner in ast.walk(node):
            name = getattr(inner, "name", None) or getattr(inner, "rest", None)
            if isinstance(inner, ast.MatchAs | ast.MatchStar | ast.MatchMapping) and name:
                self._bind_target(ast.Name(name), None, place)
        self.statements += [(case.guard, place) for case in node.cases if case.guard is not None]
        self._arms(node, place, *(case.body for case in node.cases))


def _raises_on(context: ast.expr) -> bool:
    """Say whether a context manager is one of torch, or a file, which no error ends in."""
    function = context.func if isinstance(context, ast.Call) else context
    return ast.unparse(function).startswith(_PASSES_ON)


def _bind_inner(node: ast.comprehension | ast.Lambda, place: Place) -> None:
    """Bind what a comprehension or a lambda gives a name to, for the whole of its statement."""
    if isinstance(node, ast.Lambda):
        packed = (one for one in (node.args.vararg, node.args.kwarg) if one is not None)
        bound = [
            (one.arg, Binding("lambda", None, place, parameter=one.arg, index=(number,)))
            for number, one in enumerate((*parameters_of(node), *packed))
        ]
    else:
        taken = _taken(node.target, ())
        bound = [(name, Binding("item", node.iter, place, index=index)) for name, index in taken]
    for name, binding in bound:
        place.scope.inner.setdefault((name, place.order), []).append(binding)


def _taken(target: ast.expr, index: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of a target, each with where it stands in the items that are unpacked."""
    match target:
        case ast.Name(id=name):
            yield name, index
        case ast.Starred(value=inner):
            yield from _taken(inner, index)
        case ast.Tuple(elts=some) | ast.List(elts=some):
            for number, one in enumerate(some):
                yield from _taken(one, (*index, number))


def _bind_named(node: ast.NamedExpr, place: Place) -> None:
    """Bind a name within an expression, which may not be reached: for its statement and for what follows."""
    binding = Binding("value", node.value, place)
    place.scope.inner.setdefault((node.target.id, place.order), []).append(binding)
    after = Place(place.scope, place.order, _aside(binding, place), place.contexts)
    holder = place.scope.declared.get(node.target.id, place.scope)
    known = holder.bindings.setdefault(node.target.id, [])
    insort(known, Binding("value", node.value, after), key=lambda one: one.place.order)


def _aside(binding: Binding, place: Place) -> Path:
    """Return the path of what may run or not."""
    return (*place.path, (id(binding), 1))
