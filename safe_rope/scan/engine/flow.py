"""Follows an arange to the first operation that gives it a floating dtype, through views and variables."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from safe_rope.scan.engine import prefilter, tensors
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.nodes import within
from safe_rope.scan.engine.scopes import Place, Scope, Site
from safe_rope.scan.engine.source import Source
from safe_rope.scan.engine.values import PINNED, Value
from safe_rope.scan.engine.walk import Walk

_MAX_VARIABLES = 3
_MAX_USES = 400  # of one variable
_MAX_STEPS = 32  # on all ways together
_NUMERIC = tensors.FLOATED - {"mean", "std", "softmax", "log_softmax"}
_EXPONENTIAL = {"exp", "exp2"}
_KEPT = ("einops.rearrange", "einops.repeat", "abs")
_SAME = ast.UnaryOp | ast.Tuple | ast.List | ast.IfExp | ast.NamedExpr
_FUNCTIONS = set(tensors.OPERATORS) - {"matmul"}
# Attributes of self, but for what is assigned to one.
_READ_OF_SELF = re.compile(rb"\bself\.([\w\x80-\xff]+)(?![\w\x80-\xff]|(?:: [^=\n]+)? = )")
# A search ends at the first operation that makes integers floating; at the first that divides, scales or
# raises values, floating or not; only at one that raises a number to them; or where they become a parameter
# that is learned.
Goal = Literal["floating", "scaled", "raised", "learned"]
# What an operation does to the values, and the dtype that it casts to; None where the search goes on.
_Outcome = tuple[Literal["arithmetic", "cast", "pinned", "end"], str] | None
_ARITHMETIC: _Outcome = ("arithmetic", "")
_END: _Outcome = ("end", "")
_CASTS: dict[str, _Outcome] = {
    "float": ("pinned", "float32"),
    "double": ("pinned", "float64"),
    "half": ("cast", "float16"),
    "bfloat16": ("cast", "bfloat16"),
}

Use = tuple[ast.Name, tuple[ast.AST, ...], Place]


class _Bound(NamedTuple):
    """The values that a scope binds to a name, by id, and which of its uses read each.

    ``summed``: those that an augmented assignment makes, which read the name where nothing else shows it.
    """

    values: set[int]
    summed: set[int]
    reads: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """What first makes the values floating: ``operand`` is the expression that holds them until then."""

    how: Literal["arithmetic", "cast", "pinned"]
    node: ast.expr
    operand: ast.expr
    place: Place
    target: str = ""  # of a cast

    @property
    def others(self) -> list[ast.expr]:
        """What the operand meets in an operation."""
        match self.node:
            case ast.BinOp(left=left, right=right):
                sides = [left, right]
            case ast.Call(args=args, keywords=keywords):
                sides = [*args, *(keyword.value for keyword in keywords)]
            case _:
                sides = []
        return [side for side in sides if side is not self.operand]

    @property
    def divides(self) -> bool:
        """Whether it is a division that gives fractions, of whatever numbers."""
        match self.node:
            case ast.BinOp(op=operation):
                return isinstance(operation, ast.Div)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in tensors.OPERATORS:
                return isinstance(tensors.operator(self.node, name), ast.Div)
        return False


class Flow:
    """Follows values in one file."""

    def __init__(self, source: Source, walk: Walk, inference: Inference) -> None:
        self._source = source
        self._walk = walk
        self._inference = inference
        self._by_scope: dict[int, list[tuple[ast.AST, Place]]] | None = None
        self._reads: dict[int, dict[str, list[Use]]] = {}
        self._floating: dict[tuple[int, str], bool] = {}
        self._reached: dict[tuple[int, str], dict[int, list[Use]]] = {}
        self._bindings: dict[tuple[int, str], _Bound] = {}
        self._steps: dict[tuple[int, Goal, int], list[Step]] = {}

    def steps(self, site: Site, goal: Goal = "floating") -> list[Step]:
        """Return the first operations of a kind on each way that the values take."""
        return self._climb(site.node, site.ancestors, site.place, goal, 0)

    def is_exponent(self, site: Site) -> bool:
        """Say whether the values are divided, scaled or raised: frequencies rather than counts."""
        return any(step.how == "arithmetic" for step in self.steps(site, "scaled"))

    def is_raised(self, site: Site) -> bool:
        """Say whether a number is raised to the values, or ``exp`` is taken of them."""
        return bool(self.steps(site, "raised"))

    def is_learned(self, site: Site) -> bool:
        """Say whether the values are where a learned parameter starts: what rounds them rounds no table."""
        # On another way they may become a buffer.
        return {step.how for step in self.steps(site, "learned")} == {"arithmetic"}

    def uses(self, scope: Scope, name: str) -> list[Use]:
        """Return where a scope reads a name; one walk per scope serves every name."""
        if id(scope) not in self._reads:
            if self._by_scope is None:
                self._by_scope = {}
                for statement, place in self._walk.statements:
                    self._by_scope.setdefault(id(place.scope), []).append((statement, place))
            reads: dict[str, list[Use]] = {}
            for statement, place in self._by_scope.get(id(scope), []):
                for node, ancestors in within(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                        reads.setdefault(node.id, []).append((node, ancestors, place))
            self._reads[id(scope)] = reads
        return self._reads[id(scope)].get(name, [])

    def is_read_elsewhere(self, attribute: str) -> bool:
        """Say whether the text reads an attribute of self, perhaps in a method that was passed over."""
        return attribute.encode() in self._read_of_self

    @cached_property
    def _read_of_self(self) -> set[bytes]:
        return set(_READ_OF_SELF.findall(self._source.text))

    def reached(self, place: Place, name: str, value: ast.expr | None) -> list[Use]:
        """Return where a scope reads what a statement has bound to a name, wholly or in part."""
        uses = self.uses(place.scope, name)
        parts = {id(part) for part in ((value, *value.elts) if isinstance(value, ast.Tuple) else (value,))}
        bound = self._bound(place.scope, name)
        if value is not None and not parts.isdisjoint(bound.values):
            read = {number for part in parts | bound.summed for number in bound.reads.get(part, ())}
            uses = [uses[number] for number in sorted(read)]
        return [use for use in uses if use[2].order > place.order or place.path]

    def _bound(self, scope: Scope, name: str) -> _Bound:
        """Return what a scope binds to a name, and where it reads each of these values."""
        key = (id(scope), name)
        if key not in self._bindings:
            uses, bound = self.uses(scope, name), scope.bindings.get(name, [])
            read = {id(use[0]) for use in uses}
            summed = {
                id(one.value) for one in bound
                if isinstance(one.value, ast.BinOp)
                and getattr(one.value.left, "id", "") == name
                and id(one.value.left) not in read
            }  # fmt: skip
            reads: dict[int, list[int]] = {}
            for number, use in enumerate(uses):
                for part in {id(one.value) for one in self._inference.names.bindings(name, use[2])}:
                    reads.setdefault(part, []).append(number)
            self._bindings[key] = _Bound({id(one.value) for one in bound}, summed, reads)
        return self._bindings[key]

    def _climb(
        self, current: ast.expr, ancestors: tuple[ast.AST, ...], place: Place, goal: Goal, variables: int
    ) -> list[Step]:
        """Return the steps from an expression upwards, that is reached through some number of variables."""
        key = (id(current), goal, variables)
        if key not in self._steps:
            self._steps[key] = self._climbed(current, ancestors, place, goal, variables)
        return self._steps[key]

    def _climbed(
        self, current: ast.expr, ancestors: tuple[ast.AST, ...], place: Place, goal: Goal, variables: int
    ) -> list[Step]:
        found: dict[tuple[int, int], Step] = {}
        above = list(ancestors)
        while above:
            parent = above.pop()
            if isinstance(parent, ast.Attribute) and above and parent is getattr(above[-1], "func", None):
                parent = above.pop()
            if isinstance(parent, ast.keyword):
                continue
            if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                self._follow(parent, current, place, goal, variables, found)
            if not isinstance(parent, ast.expr):
                break
            outcome = self._outcome(parent, current, place, goal)
            if outcome is not None:
                how, target = outcome
                if how != "end":
                    found[id(parent), id(current)] = Step(how, parent, current, place, target)
                break
            current = parent
        return list(found.values())

    def _outcome(self, parent: ast.expr, current: ast.expr, place: Place, goal: Goal) -> _Outcome:
        """Return what the expression right around the values does to them."""
        if goal == "learned" and isinstance(parent, ast.BinOp):
            return None
        if goal == "learned" and isinstance(parent, ast.Call):
            if getattr(parent.func, "attr", "") == "register_buffer":
                return "pinned", ""
            if not self._inference.call(parent, place).function.endswith(".Parameter"):
                return None
            return _END if any(word.arg == "requires_grad" for word in parent.keywords) else _ARITHMETIC
        match parent:
            case ast.Call():
                return self._call(parent, current, place, goal)
            case ast.BinOp():
                left = parent.left is current
                return self._arithmetic(
                    parent.op, parent.right if left else parent.left, place, goal, on_left=left
                )
            case ast.Attribute():
                return None if parent.attr in ("T", "mT", "data") else _END
            case ast.Subscript():
                return None if parent.value is current else _END
        return None if isinstance(parent, _SAME) else _END

    def _call(self, node: ast.Call, current: ast.expr, place: Place, goal: Goal) -> _Outcome:
        """Return what a method of the values, or a function of them, does."""
        function = node.func
        if isinstance(function, ast.Attribute) and function.value is current:
            name, operands = function.attr, [current, *tensors.operands(node)]
            operations = set(tensors.OPERATORS)
            if name in ("to", "type", "type_as"):
                target = tensors.cast_target(self._inference, self._inference.call(node, place))
                if target is None or goal != "floating":
                    return None
                return "pinned" if target.dtype in PINNED or target.is_int else "cast", target.dtype
            if name in _CASTS:
                return _CASTS[name] if goal == "floating" else None
            kept = name in tensors.KEPT or name in ("long", "int", "round", "floor")
        elif any(argument is current for argument in tensors.operands(node)):
            full = self._inference.call(node, place).function
            module, _, name = full.rpartition(".")
            if module != "torch":
                return None if full in _KEPT else _END
            operands, operations = tensors.operands(node), _FUNCTIONS
            kept = name in tensors.KEPT or name in tensors.JOINED
        else:
            return _END
        if name in _NUMERIC and (goal != "raised" or name in _EXPONENTIAL):
            return _ARITHMETIC
        if name in operations and len(operands) == 2:
            left = operands[0] is current
            operation = tensors.operator(node, name)
            return self._arithmetic(operation, operands[left], place, goal, on_left=left)
        return None if kept else _END

    def _arithmetic(
        self, operation: ast.operator, other_node: ast.expr, place: Place, goal: Goal, *, on_left: bool
    ) -> _Outcome:
        """Return what an operation with another operand does to the values on its left or right."""
        other = self._inference.value(other_node, place)
        raised = isinstance(operation, ast.Pow) and not on_left
        if goal in ("raised", "scaled") and raised and other.constant in (1, -1):
            return _END  # signs, which no dtype rounds
        if goal == "raised":
            return _ARITHMETIC if raised else None
        if goal == "scaled":
            by_fraction = other.is_float or (other.sort == "number" and not other.whole)
            scaled = isinstance(operation, ast.Div | ast.Pow) or (
                isinstance(operation, ast.Mult) and by_fraction
            )
            return _ARITHMETIC if scaled else None
        unknown_divisor = isinstance(operation, ast.Div) and not other.dtype  # lengths, as often as not
        if other.sort == "tensor" and not other.is_int and not unknown_divisor:
            # The other tensor's dtype decides. Where that is the default one, a grid is reported for itself.
            made = self.is_single(other_node, place) or not (other.grid or other.exponent)
            return _ARITHMETIC if other.dtype == "default" and made else _END
        return _ARITHMETIC if _makes_float(operation, other) else None

    def is_single(self, node: ast.expr, place: Place, depth: int = 0) -> bool:
        """Say whether it is one number in a tensor, or what a function makes of that."""
        match node:
            case ast.UnaryOp(operand=operand):
                return self.is_single(operand, place, depth)
            case ast.BinOp(left=left, right=right):
                made = [side for side in (left, right) if self._inference.value(side, place).sort == "tensor"]
                return bool(made) and all(self.is_single(side, place, depth) for side in made)
            case ast.Name(id=name) if depth < _MAX_VARIABLES:
                values = self._inference.names.values(name, place)
                return len(values) == 1 and self.is_single(*values[0], depth + 1)
            case ast.Call(args=[argument, *_]):
                module, _, function = self._inference.call(node, place).function.rpartition(".")
                if module == "torch" and function == "full":
                    return isinstance(argument, ast.Tuple | ast.List) and not argument.elts
                if module == "torch" and function in ("tensor", "as_tensor"):
                    return self._inference.value(argument, place).sort == "number"
                return module == "torch" and function in _NUMERIC and self.is_single(argument, place, depth)
        return False

    def _follow(
        self,
        assign: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr,
        value: ast.expr,
        place: Place,
        goal: Goal,
        variables: int,
        found: dict[tuple[int, int], Step],
    ) -> None:
        """Add the steps from where a variable is read that the values are assigned to."""
        targets = assign.targets if isinstance(assign, ast.Assign) else [assign.target]
        target = targets[0]
        if variables >= _MAX_VARIABLES or len(targets) != 1 or not isinstance(target, ast.Name):
            return
        if goal != "learned" and not self._may_become_float(place.scope, target.id):
            return
        for name, ancestors, where in self._uses_of(place.scope, target.id, value)[:_MAX_USES]:
            if len(found) >= _MAX_STEPS:
                return
            if where.order > place.order:
                for step in self._climb(name, ancestors, where, goal, variables + 1):
                    found.setdefault((id(step.node), id(step.operand)), step)

    def _uses_of(self, scope: Scope, name: str, value: ast.expr) -> list[Use]:
        """Return where a scope reads a value that it has bound to a name."""
        key = (id(scope), name)
        if key not in self._reached:
            reached: dict[int, list[Use]] = {}
            for use in self.uses(scope, name):
                values = [one.value for one in self._inference.names.bindings(name, use[2])]
                # Of an augmented assignment, what is written on the right reaches the name too.
                values += [value.right for value in values if isinstance(value, ast.BinOp)]
                for bound in {id(value) for value in values}:
                    reached.setdefault(bound, []).append(use)
            self._reached[key] = reached
        return self._reached[key].get(id(value), [])

    def _may_become_float(self, scope: Scope, name: str) -> bool:
        """Ask the text first: most counts only index, and a walk costs more than a search."""
        key = (id(scope), name)
        if id(scope) in self._reads and name not in self._reads[id(scope)]:
            return False
        if key not in self._floating:
            first, last = (getattr(scope.node, at, None) for at in ("lineno", "end_lineno"))
            start = self._source.offset(first, 0) if first else 0
            text = self._source.text[start : self._source.offset(last + 1, 0) if last else None]
            self._floating[key] = prefilter.may_become_float(text, name.encode())
        return self._floating[key]


def _makes_float(operation: ast.operator, other: Value) -> bool:
    """Say whether an operation of integers with a number gives the default dtype."""
    kinds = (ast.Mult, ast.Add, ast.Sub, ast.Mod, ast.FloorDiv, ast.Pow)
    return isinstance(operation, ast.Div) or (isinstance(operation, kinds) and other.is_float)
