"""Whether a value is shown to become positions or frequencies of a model, rather than samples of a window."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from safe_rope.scan.engine import tensors
from safe_rope.scan.engine.flow import Flow, Use
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.nodes import within
from safe_rope.scan.engine.scopes import Place, Scope, Site
from safe_rope.scan.engine.vocabulary import CONSTRUCTORS, FORWARD, INVERSE_FREQUENCIES, POSITIONS, words
from safe_rope.scan.engine.walk import Walk

_STEPS = 400  # expressions looked at for one value
_CIRCULAR = {"sin", "cos", "polar", "sincos", "cis"}
_EXPONENTIAL = {"exp", "exp2"}
_PRODUCTS = {"div", "outer", "ger", "einsum", "matmul", "mm", "bmm", "mul", "multiply", "kron"}
_LINEAR = {"add", "sub", "mul", "div", "true_divide", "rsub"}
_CASTS = {
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "as_tensor",
    "tensor",
}
_VIEWS = (
    tensors.KEPT
    | tensors.JOINED
    | _CASTS
    | {"cartesian_prod", "rearrange", "ravel", "Buffer", "Parameter", "list", "tuple"}
)
# What keeps the values under a name, which stands before them, and where they stand.
_SETTERS = {"register_buffer": 1, "setattr": 2}
_NO_WORDS = re.compile(r"\W+")
_WRITES = {"copy", "append", "extend", "insert"}


@dataclass(frozen=True, slots=True)
class _State:
    """What became of the values on the way.

    ``kept``: still what it was, as views, casts and lists leave it; ``linear``: at most shifted or scaled by
    numbers; ``frequency``: a number was raised to it, or it met what is such a power.
    """

    kept: bool = True
    linear: bool = True
    frequency: bool = False
    part: int = -1  # of a tuple that a function returns, or that several names are assigned


class _Use(NamedTuple):
    """An expression that holds the values, to follow."""

    node: ast.expr
    ancestors: tuple[ast.AST, ...]
    place: Place
    state: _State


class _End(NamedTuple):
    """Where nobody knows what follows."""

    place: Place
    state: _State


_Found = bool | _End | _Use  # True: positions are reached


class Purpose:
    """Follows values forward in one file, through variables, attributes, calls and returns."""

    def __init__(self, walk: Walk, inference: Inference, flow: Flow, module: str) -> None:
        self._walk = walk
        self._inference = inference
        self._flow = flow
        self._module = module
        self._attributes: dict[int, dict[str, list[Use]]] = {}
        self._known: dict[int, bool] = {}

    def shown(self, site: Site, *, count: bool = False, pairs: bool = False, frequency: bool = False) -> bool:
        """Say whether the values are shown to reach positions or frequencies.

        A count that a model keeps or returns as it is, is one of positions, and what a number is raised to
        for each pair of channels are frequencies. Names say it too: of the functions and classes around, of
        what the values are assigned to, and of what takes them.

        Args:
            site: the expression that makes the values.
            count: they are whole numbers in a row, or sums of a mask.
            pairs: they are every second number.
            frequency: they are inverse frequencies already.
        """
        if id(site.node) not in self._known:
            state = _State(not frequency, not frequency, frequency)
            self._known[id(site.node)] = self._is_around(site.place) or self._reaches(
                [_Use(site.node, site.ancestors, site.place, state)], count, pairs
            )
        return self._known[id(site.node)]

    def keeps(self, place: Place, name: str) -> bool:
        """Say whether an attribute of self that holds powers is shown to hold frequencies of positions."""
        found = self._kept_as(name, place, _State(False, False, True))
        return (
            self._is_around(place)
            or True in found
            or self._reaches([use for use in found if isinstance(use, _Use)])
        )

    def reads(self, name: str, place: Place) -> list[Use]:
        """Return where the methods of the class around read an attribute of self."""
        owner = place.scope.owner
        return [] if owner is None else self._reads(owner).get(name, [])

    def _is_around(self, place: Place) -> bool:
        names = [scope.name for scope in place.scope.upward() if scope.kind != "module"]
        return any(map(is_position, (*names, self._module)))

    def _reaches(self, waiting: list[_Use], count: bool = False, pairs: bool = False) -> bool:
        modelled = bool(waiting) and _in_model(waiting[0].place.scope)
        open_ended = False
        seen: set[tuple[int, _State]] = set()
        while waiting and len(seen) < _STEPS:
            current = waiting.pop()
            key = (id(current[0]), current[3])
            if key in seen:
                continue
            seen.add(key)
            for found in self._climb(*current):
                if found is True or (pairs and not isinstance(found, bool) and found.state.frequency):
                    return True
                if len(waiting) > _STEPS:
                    break
                if isinstance(found, _Use):
                    waiting.append(found)
                elif isinstance(found, _End):
                    open_ended |= found.state.kept and (modelled or _constructs(found.place.scope))
        return count and open_ended

    def _climb(
        self, current: ast.expr, ancestors: tuple[ast.AST, ...], place: Place, state: _State
    ) -> Iterator[_Found]:
        """Yield True where positions are reached, ends, and what else to follow."""
        above = list(ancestors)
        while above:
            parent = above.pop()
            match parent:
                case ast.Attribute(attr=name) if above and parent is getattr(above[-1], "func", None):
                    call = above.pop()
                    assert isinstance(call, ast.Call)
                    after = self._called(call, name, current, state, place, method=True)
                    if isinstance(after, list):
                        yield from after
                        return
                    parent, state = call, after
                case ast.Attribute(attr=name) if name not in ("T", "mT", "data"):
                    return
                case ast.keyword(arg=name) if above and isinstance(above[-1], ast.Call):
                    if name and is_position(name):
                        yield True
                        return
                    call = above.pop()
                    assert isinstance(call, ast.Call)
                    after = self._called(call, _last(call.func), current, state, place, keyword=name)
                    if isinstance(after, list):
                        yield from after
                        return
                    parent, state = call, after
                case ast.Call(func=function):
                    after = self._called(parent, _last(function), current, state, place)
                    if isinstance(after, list):
                        yield from after
                        return
                    state = after
                case ast.BinOp():
                    changed = self._operated(parent, current, state, place)
                    if changed is None:
                        return
                    state = changed
                case ast.Subscript() if parent.value is not current:
                    return
                case ast.Tuple(elts=elements) if above and isinstance(above[-1], ast.Assign | ast.Return):
                    state = replace(state, part=elements.index(current))
                case ast.Compare() | ast.Lambda() | ast.BoolOp():
                    return
                case ast.Assign(targets=targets):
                    for target in targets:
                        yield from self._assigned(target, place, state, getattr(parent, "value", None))
                    return
                case (
                    ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.NamedExpr(target=target)
                ):
                    yield from self._assigned(target, place, state, parent.value)
                    if not isinstance(parent, ast.NamedExpr):
                        return
                case ast.Return():
                    yield from self._returned(place, state)
                    return
                case ast.Expr():
                    yield _End(place, state)
                    return
            current = parent if isinstance(parent, ast.expr) else current

    def _called(
        self, call: ast.Call, name: str, current: ast.expr, state: _State, place: Place, *,
        method: bool = False, keyword: str | None = None,
    ) -> _State | list[_Found]:  # fmt: skip
        """Return what a call makes of the values, or, in a list, where they end."""
        name = name.rstrip("_")
        if not method and is_position(name):
            return [True]
        if name in _CIRCULAR:
            return [True] if state.frequency else []
        if name in _EXPONENTIAL:
            return replace(state, kept=False, linear=False, frequency=True) if state.linear else []
        if name in ("pow", "float_power") and len(call.args) == 2 - method:
            if method or call.args[0] is current or not self._is_base(call.args[0], current, place):
                return []
            return replace(state, kept=False, linear=False, frequency=True) if state.linear else []
        if name in _SETTERS and len(call.args) > _SETTERS[name]:
            named = call.args[_SETTERS[name] - 1]
            if isinstance(named, ast.Constant):
                return self._kept_as(str(named.value), place, state)
            return [True] if is_position(_NO_WORDS.sub("_", ast.unparse(named))) else []
        others = [argument for argument in call.args if argument is not current]
        if method and isinstance(call.func, ast.Attribute) and name in _PRODUCTS:
            others = [*call.args]
        if name in _PRODUCTS and any(self._is_frequency(other, place) for other in others):
            return replace(state, kept=False, linear=False, frequency=True)
        if name in _VIEWS:
            first = method or keyword is not None or call.args[0] is current
            return state if first or name in tensors.JOINED or isinstance(call.args[0], ast.Starred) else []
        if name in _LINEAR and all(self._is_number(other, place) for other in others):
            return replace(state, kept=False)
        if name in _PRODUCTS | _LINEAR | tensors.FLOATED | {"where", "sum", "clamp", "arange"}:
            return replace(state, kept=False, linear=False)
        if name in _WRITES and method is False and isinstance(call.func, ast.Attribute):
            return list(self._assigned(call.func.value, place, state, None))
        return self._into(call, current, place, state, keyword)

    def _into(
        self, call: ast.Call, current: ast.expr, place: Place, state: _State, keyword: str | None
    ) -> list[_Found]:
        """Follow an argument into a function of this file."""
        function = self._inference.names.qualify(call.func, place)
        own = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
        name = _last(call.func)
        if function.startswith(".") and name in self._walk.classes:
            scopes = [
                scope for scope in self._walk.functions.get("__init__", ())
                if scope.parent is self._walk.classes[name]
            ]  # fmt: skip
            own = True
        elif function.startswith(".") or own:
            scopes = [
                scope for scope in self._walk.functions.get(name, ()) if own == (scope.owner is not None)
            ]
        else:
            scopes = []
        result: list[_Found] = []
        for scope in scopes[:3]:
            arguments = scope.node.args  # type: ignore[attr-defined]
            named = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
            if keyword is None:
                at = next((n for n, one in enumerate(call.args) if one is current), -1) + own
                parameter = named[at] if 0 <= at < len(named) else ""
            else:
                parameter = keyword
            result += [_Use(*use, state) for use in self._flow.uses(scope, parameter)]
        return result

    def _operated(self, node: ast.BinOp, current: ast.expr, state: _State, place: Place) -> _State | None:
        """Return what an operation makes of the values; None where they are no positions any more."""
        on_left = node.left is current
        other = node.right if on_left else node.left
        if isinstance(node.op, ast.Pow):
            if on_left or not state.linear or not self._is_base(other, current, place):
                return None
            return replace(state, kept=False, linear=False, frequency=True)
        if isinstance(node.op, ast.MatMult | ast.Mult | ast.Div) and self._is_frequency(other, place):
            return replace(state, kept=False, linear=False, frequency=True)
        if not self._is_number(other, place):
            return replace(state, kept=False, linear=False)
        if state.frequency and isinstance(node.op, ast.Add | ast.Sub):
            return replace(state, frequency=False, kept=False, linear=False)
        return replace(state, kept=False)

    def _assigned(
        self, target: ast.expr, place: Place, state: _State, value: ast.expr | None
    ) -> Iterator[_Found]:
        match target:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                taken = elements[state.part : state.part + 1] if state.part >= 0 else elements
                for element in taken:
                    yield from self._assigned(element, place, replace(state, part=-1), value)
            case ast.Starred(value=inner) | ast.Subscript(value=inner):
                yield from self._assigned(inner, place, state, None)
            case ast.Name(id=name):
                if is_position(name):
                    yield True
                    return
                if place.scope.kind == "class":
                    yield from self._kept_as(name, place, state)
                later = self._flow.reached(place, name, value)
                yield from (_Use(*use, state) for use in later)
                if not later:
                    yield _End(place, state)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                yield from self._kept_as(name, place, state)

    def _kept_as(self, name: str, place: Place, state: _State) -> list[_Found]:
        """Follow an attribute of self to where the methods of its class read it."""
        if is_position(name):
            return [True]
        uses = self.reads(name, place)
        if uses or self._flow.is_read_elsewhere(name):
            return [_Use(*use, state) for use in uses]
        return [_End(place, state)]

    def _reads(self, owner: Scope) -> dict[str, list[Use]]:
        if id(owner) not in self._attributes:
            reads: dict[str, list[Use]] = {}
            for statement, place in self._statements.get(id(owner), ()):
                for node, ancestors in within(statement):
                    if (
                        isinstance(node, ast.Attribute)
                        and isinstance(node.ctx, ast.Load)
                        and getattr(node.value, "id", "") == "self"
                    ):
                        reads.setdefault(node.attr, []).append((node, ancestors, place))  # type: ignore[arg-type]
            self._attributes[id(owner)] = reads
        return self._attributes[id(owner)]

    @cached_property
    def _statements(self) -> dict[int, list[tuple[ast.AST, Place]]]:
        """The statements of each class, by its id."""
        statements: dict[int, list[tuple[ast.AST, Place]]] = {}
        for statement, place in self._walk.statements:
            statements.setdefault(id(place.scope.owner), []).append((statement, place))
        return statements

    def _returned(self, place: Place, state: _State) -> Iterator[_Found]:
        """Follow what a function returns to its calls in this file."""
        scope = place.scope
        if is_position(scope.name):
            yield True
            return
        method = scope.parent is not None and scope.parent.kind == "class"
        sites = [
            site
            for site in self._walk.calls.get(scope.name, ())
            if isinstance(getattr(site.node, "func", None), ast.Attribute) == method
        ]
        for site in sites:
            yield _Use(site.node, site.ancestors, site.place, state)
        if not sites and (FORWARD.fullmatch(scope.name) or scope.name in CONSTRUCTORS):
            yield _End(place, state)

    def _is_frequency(self, node: ast.expr, place: Place) -> bool:
        named = any(
            INVERSE_FREQUENCIES.fullmatch(name)
            for name in (_last(inner) for inner in ast.walk(node) if isinstance(inner, ast.expr))
        )
        return named or self._inference.value(node, place).exponent

    def _is_base(self, base: ast.expr, exponent: ast.expr, place: Place) -> bool:
        """Say whether it is a number whose powers can be rounded: whole ones of two never are."""
        if not self._is_number(base, place):
            return False
        constant = self._inference.value(base, place).constant
        exact = constant is not None and abs(math.frexp(constant)[0]) == 0.5
        return not (exact and self._inference.value(exponent, place).whole)

    def _is_number(self, node: ast.expr, place: Place) -> bool:
        """Say whether an operand is, as far as is known, no tensor, or one of a single number."""
        return self._inference.value(node, place).sort != "tensor" or self._flow.is_single(node, place)


def _outermost(scope: Scope) -> Scope | None:
    return ([None] + [around for around in scope.upward() if around.kind == "function"])[-1]


def _in_model(scope: Scope) -> bool:
    """Say whether code is a class's, a forward's, or runs when a model is built."""
    outermost = _outermost(scope)
    if outermost is None or outermost.owner is not None:
        return True
    return FORWARD.fullmatch(outermost.name) is not None or outermost.name in CONSTRUCTORS


def _constructs(scope: Scope) -> bool:
    outermost = _outermost(scope)
    return outermost is None or outermost.name in CONSTRUCTORS


def _last(node: ast.expr) -> str:
    """Return a name, or the last part of a dotted one."""
    return getattr(node, "attr", getattr(node, "id", "")) or ""


@lru_cache(maxsize=4096)
def is_position(name: str) -> bool:
    """Say whether a name speaks of position embeddings, their tables or their inverse frequencies."""
    return POSITIONS.search(words(name)) is not None
