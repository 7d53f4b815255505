"""Follows an arange to the first operation that gives it a floating dtype, through views and variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from safe_rope.scan.engine import prefilter, tensors
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.scopes import Place, Scope, Site, Walk, children
from safe_rope.scan.engine.source import Source
from safe_rope.scan.engine.values import PINNED, Value

_MAX_VARIABLES = 3
_NUMERIC = tensors.FLOATED - {"mean", "std", "softmax", "log_softmax"}
_EXPONENTIAL = {"exp", "exp2"}
_EINOPS = ("einops.rearrange", "einops.repeat")
# A search ends at the first operation that makes integers floating; at the first that divides, scales or
# raises values, floating or not; or only at one that raises a number to them.
Goal = Literal["floating", "scaled", "raised"]


Use = tuple[ast.Name, tuple[ast.AST, ...], Place]


@dataclass(frozen=True, slots=True)
class Step:
    """What first makes the values floating: ``operand`` is the expression that holds them until then."""

    how: Literal["arithmetic", "cast", "pinned"]
    node: ast.expr
    operand: ast.expr
    place: Place
    same_statement: bool
    target: str = ""  # of a cast


class Flow:
    """Follows values in one file."""

    def __init__(self, source: Source, walk: Walk, inference: Inference) -> None:
        self._source = source
        self._walk = walk
        self._inference = inference
        self._by_scope: dict[int, list[tuple[ast.AST, Place]]] | None = None
        self._reads: dict[int, dict[str, list[Use]]] = {}

    def steps(self, site: Site, goal: Goal = "floating") -> Iterator[Step]:
        """Yield the first operations of a kind on each way that the values take."""
        yield from self._climb(site.node, site.ancestors, site.place, goal, 0)

    def is_exponent(self, site: Site) -> bool:
        """Say whether the values are divided, scaled or raised: frequencies rather than counts."""
        return any(step.how == "arithmetic" for step in self.steps(site, "scaled"))

    def is_raised(self, site: Site) -> bool:
        """Say whether a number is raised to the values, or ``exp`` is taken of them."""
        return any(True for _ in self.steps(site, "raised"))

    def uses(self, scope: Scope, name: str) -> list[Use]:
        """Return where a scope reads a name; one walk per scope serves every name."""
        if id(scope) not in self._reads:
            if self._by_scope is None:
                self._by_scope = {}
                for statement, place in self._walk.statements:
                    self._by_scope.setdefault(id(place.scope), []).append((statement, place))
            reads: dict[str, list[Use]] = {}
            for statement, place in self._by_scope.get(id(scope), []):
                for node, ancestors in _names_in(statement):
                    reads.setdefault(node.id, []).append((node, ancestors, place))
            self._reads[id(scope)] = reads
        return self._reads[id(scope)].get(name, [])

    def _climb(
        self, node: ast.expr, ancestors: tuple[ast.AST, ...], place: Place, goal: Goal, variables: int
    ) -> Iterator[Step]:
        current = node
        index = len(ancestors) - 1
        while index >= 0:
            parent = ancestors[index]
            if isinstance(parent, ast.Attribute) and index > 0:
                call = ancestors[index - 1]
                if isinstance(call, ast.Call) and call.func is parent:
                    step = self._method(call, parent, current, place, goal, variables)
                    if step is not None:
                        if isinstance(step, Step):
                            yield step
                        return
                    current = call
                    index -= 2
                    continue
                if parent.attr not in ("T", "mT", "data"):
                    return
            elif isinstance(parent, ast.Call):
                step = self._function(parent, current, place, goal, variables)
                if isinstance(step, Step):
                    yield step
                if step is not None:
                    return
            elif isinstance(parent, ast.BinOp):
                step = self._operation(parent, current, place, goal, variables)
                if isinstance(step, Step):
                    yield step
                if step is not None:
                    return
            elif isinstance(parent, ast.Subscript):
                if parent.value is not current:
                    return
            elif isinstance(parent, ast.Assign):
                yield from self._follow(parent, current, place, goal, variables)
                return
            elif not isinstance(parent, ast.UnaryOp | ast.Tuple | ast.List | ast.IfExp):
                return
            if not isinstance(parent, ast.expr):
                return
            current = parent
            index -= 1

    def _method(
        self,
        call: ast.Call,
        function: ast.Attribute,
        current: ast.expr,
        place: Place,
        goal: Goal,
        variables: int,
    ) -> Step | bool | None:
        """Return the step that a method is, True if the trail ends there, None if it goes on."""
        name = function.attr
        if name in ("to", "type", "type_as"):
            target = tensors.cast_target(self._inference, self._inference.call(call, place))
            if target is None or goal != "floating":
                return None
            if target.dtype in PINNED or target.is_int:
                return Step("pinned", call, current, place, variables == 0)
            return Step("cast", call, current, place, variables == 0, target.dtype)
        if name in ("float", "double", "half", "bfloat16"):
            if goal != "floating":
                return None
            how: Literal["cast", "pinned"] = "pinned" if name in ("float", "double") else "cast"
            return Step(how, call, current, place, variables == 0, {"half": "float16"}.get(name, name))
        if name in _NUMERIC and (goal != "raised" or name in _EXPONENTIAL):
            return Step("arithmetic", call, current, place, variables == 0)
        if name in tensors.OPERATORS and len(call.args) == 1:
            operation = tensors.OPERATORS[name]
            return self._arithmetic(
                operation, call, current, call.args[0], place, goal, variables, on_left=True
            )
        return None if name in tensors.KEPT or name in ("long", "int", "round", "floor") else True

    def _function(
        self, call: ast.Call, current: ast.expr, place: Place, goal: Goal, variables: int
    ) -> Step | bool | None:
        if not any(argument is current for argument in call.args):
            return True
        function = self._inference.call(call, place).function
        if function in _EINOPS:
            return None
        module, _, name = function.rpartition(".")
        if module != "torch":
            return True
        if name in _NUMERIC and (goal != "raised" or name in _EXPONENTIAL):
            return Step("arithmetic", call, current, place, variables == 0)
        if (
            name in ("pow", "div", "mul", "true_divide")
            and len(call.args) == 2
            and "rounding_mode" not in [keyword.arg for keyword in call.keywords]
        ):
            other = call.args[1] if call.args[0] is current else call.args[0]
            left = call.args[0] is current
            return self._arithmetic(
                tensors.OPERATORS[name], call, current, other, place, goal, variables, left
            )
        return None if name in tensors.KEPT or name in tensors.JOINED else True

    def _operation(
        self, node: ast.BinOp, current: ast.expr, place: Place, goal: Goal, variables: int
    ) -> Step | bool | None:
        left = node.left is current
        other = node.right if left else node.left
        return self._arithmetic(node.op, node, current, other, place, goal, variables, left)

    def _arithmetic(
        self, operation: ast.operator, node: ast.expr, current: ast.expr, other_node: ast.expr, place: Place,
        goal: Goal, variables: int, on_left: bool,
    ) -> Step | bool | None:  # fmt: skip
        if goal == "raised":
            raised = isinstance(operation, ast.Pow) and not on_left
            return Step("arithmetic", node, current, place, variables == 0) if raised else None
        other = self._inference.value(other_node, place)
        if goal == "scaled":
            scaled = isinstance(operation, ast.Div | ast.Pow) or (isinstance(operation, ast.Mult) and (
                other.is_float or (other.sort == "number" and not other.whole)
            ))  # fmt: skip
            return Step("arithmetic", node, current, place, variables == 0) if scaled else None
        unknown_divisor = isinstance(operation, ast.Div) and not other.dtype  # lengths, as often as not
        if other.sort == "tensor" and not other.is_int and not unknown_divisor:
            return True  # the other tensor's dtype decides
        if _makes_float(operation, other, on_left):
            return Step("arithmetic", node, current, place, variables == 0)
        return None

    def _follow(
        self, assign: ast.Assign, value: ast.expr, place: Place, goal: Goal, variables: int
    ) -> Iterator[Step]:
        target = assign.targets[0]
        if variables >= _MAX_VARIABLES or len(assign.targets) != 1 or not isinstance(target, ast.Name):
            return
        if not self._may_become_float(place.scope, assign, target.id):
            return
        for name, ancestors, where in self.uses(place.scope, target.id):
            if where.order <= place.order:
                continue
            reaching = self._inference.names.bindings(target.id, where)
            if any(binding.value is value for binding in reaching):
                yield from self._climb(name, ancestors, where, goal, variables + 1)

    def _may_become_float(self, scope: Scope, assign: ast.Assign, name: str) -> bool:
        """Ask the text first: most counts only index, and a walk costs more than a search."""
        end = getattr(scope.node, "end_lineno", None)
        start = self._source.offset(assign.lineno, 0)
        text = self._source.text[start : None if end is None else self._source.offset(end + 1, 0)]
        return prefilter.may_become_float(text, name.encode())


def _makes_float(operation: ast.operator, other: Value, on_left: bool) -> bool:
    """Say whether an operation of integers with a number gives the default dtype."""
    if isinstance(operation, ast.Div):
        return True
    if isinstance(operation, ast.Mult | ast.Add | ast.Sub | ast.Mod | ast.FloorDiv | ast.Pow):
        return other.is_float
    return False


def _names_in(statement: ast.AST) -> Iterator[tuple[ast.Name, tuple[ast.AST, ...]]]:
    stack: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(statement, ())]
    while stack:
        node, ancestors = stack.pop()
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                yield node, ancestors
            continue
        below = (*ancestors, node)
        stack += [(child, below) for child in children(node)]
