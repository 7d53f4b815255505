"""All that a rule can ask about one file."""

from __future__ import annotations

import ast
import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from safe_rope.scan.engine import places, tensors
from safe_rope.scan.engine.call_sites import CallSites
from safe_rope.scan.engine.finding import Finding, Fix, Severity
from safe_rope.scan.engine.flow import Flow
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.names import Argument, Call, Names
from safe_rope.scan.engine.purpose import Purpose
from safe_rope.scan.engine.scopes import Kind, Place, Site
from safe_rope.scan.engine.source import Source
from safe_rope.scan.engine.values import Value
from safe_rope.scan.engine.walk import Walk

# One for each beginning: what begins in one way is found six times as fast.
_CHANGES_DEFAULT = [re.compile(rb"set_default_['\"]")] + [
    re.compile(begins + rb"(?:default_)?(?:\w+_)?(?:dtype|tensor_type)\b")
    for begins in (rb"set_", rb"local_", rb"with_")
]
_REPLACED = {"to", "__defaults__", "__kwdefaults__", "__code__"}
_HOOKS = {"__torch_function__", "__torch_dispatch__"}


@dataclass(frozen=True, slots=True)
class Report:
    """What a rule says about a node; the engine adds the rule and the place."""

    node: ast.expr
    severity: Severity
    message: str
    fix: Fix | None = None
    cast: ast.expr | None = None  # what the fix makes float32 or float64, if that is not the node


class File:
    """The analysis of one file."""

    def __init__(self, source: Source, path: str, walk: Walk) -> None:
        self.source = source
        self.path = path
        self.walk = walk
        self.names = Names(walk)
        self.inference = Inference(walk, self.names, CallSites(walk, self.names, whole=not source.reduced))
        self.flow = Flow(source, walk, self.inference)
        self.held: dict[tuple[int, str], bool] = {}  # by scope and variable: whether it is used as an index
        # By scope, variable and depth of the search: the last statement that uses it as an index.
        self.indexed: dict[tuple[int, str, int], int] = {}
        self.purpose = Purpose(walk, self.inference, self.flow, PurePath(path).stem)
        # Where it replaces a tensor's casts, sees torch's calls, or hides which they are, a fix may matter.
        # So it may where a function is given other defaults or another body.
        replaced = not _REPLACED.isdisjoint(walk.written)
        self.intercepts = replaced or walk.obscured or not _HOOKS.isdisjoint(walk.functions)
        self._main = b"__main__" in source.text
        self._script = self._main and b"argparse" in source.text

    @cached_property
    def changes_default(self) -> bool:
        """Whether the file changes the default dtype: then nothing is known of what follows it."""
        return any(pattern.search(self.source.text) for pattern in _CHANGES_DEFAULT)

    def value(self, node: ast.expr, place: Place) -> Value:
        """Return what is known of an expression."""
        return self.inference.value(node, place)

    def of(self, argument: Argument) -> Value:
        """Return what is known of a call's argument."""
        return self.inference.of(argument)

    def dtype(self, call: Call) -> Value | None:
        """Return what is known of a call's ``dtype=``; None where there is none, or where it is None."""
        return tensors.given_dtype(self.inference, call)

    def severity(
        self,
        base: Severity,
        site: Site,
        *,
        follows_activations: bool = False,
        shown: bool = False,
    ) -> Severity:
        """Return a hazard's severity where it stands.

        Args:
            base: what it is in a constructor or rotary helper.
            site: the place.
            follows_activations: its dtype is that of other tensors, so that forward lowers it as well.
            shown: it is known that they are positions or frequencies of a model.
        """
        where = self.kind(site)
        exposed = where == "constructor" or (where != "script" and follows_activations)
        exposed = exposed and not self.flow.is_learned(site) and not self._is_power_of_two(site)
        return base if exposed and (shown or self.is_shown(site)) else "note"

    def _is_power_of_two(self, site: Site) -> bool:
        """Say whether a count is only the exponent of a power of two: exact wherever FP32 holds it."""
        for step in self.flow.steps(site, "raised"):
            match step.node:
                case ast.BinOp(left=base) | ast.Call(args=[base, _]):
                    constant = self.value(base, step.place).constant
                case _:
                    return False
            at = next((n for n, node in enumerate(site.ancestors) if node is step.node), None)
            between = () if at is None else site.ancestors[at + 1 :]
            exact = constant is not None and abs(constant) != 1 and abs(math.frexp(constant)[0]) == 0.5
            if at is None or not exact or any(isinstance(node, ast.BinOp) for node in between):
                return False
            return self.value(step.operand, step.place).whole is True
        return False

    def kind(self, site: Site) -> Kind:
        """Return where the code of a site runs."""
        return places.kind(site.place.scope, self.path, self.walk, script=self._script, main=self._main)

    def is_shown(self, site: Site) -> bool:
        """Say whether the values of a call are shown to reach positions or frequencies of a model."""
        assert isinstance(site.node, ast.Call)
        call = self.names.call(site.node, site.place)
        if call.function in ("torch.linspace", "torch.logspace"):
            return self.purpose.shown(site)
        call = self.names.counted(call) or call
        if call.function != "torch.arange":
            return self.purpose.shown(site, count=True)
        values = self.bounds(call)
        start, step = values[0].constant if len(values) > 1 else 0, [value.constant for value in values[2:]]
        return self.purpose.shown(site, count=start in (0, 1) and not step, pairs=step == [2])

    def counted(self, call: Call | None) -> Call | None:
        """Return the arange that a call is, or that gives what its tensor of a ``range`` holds; else None."""
        return None if call is None else self.names.counted(call)

    def bounds(self, call: Call) -> list[Value]:
        """Return what is known of an arange's start, end and step."""
        return tensors.bounds(self.inference, call)

    def largest(self, call: Call) -> float | None:
        """Return what no element of an arange exceeds in magnitude; None if that is not known."""
        values = self.bounds(call)
        limits = [value.bound for value in values[:2] if value.bound is not None]
        if not call.complete or not limits or len(limits) < min(len(values), 2):
            return None
        match [value.constant for value in values]:
            case [int() | float() as start, int() | float() as end, int() | float() as step] if step:
                count = min(max((float(end) - start) / step, 1), sys.float_info.max)
                last = start + (math.ceil(count) - 1) * float(step)
                return max(abs(start), abs(last if call.function == "torch.arange" else end))
        counts = len(values) == 1 or (len(values) == 2 and values[0].constant == 0 and values[1].whole)
        counts = counts and call.function == "torch.arange"  # torch.range includes its end
        return max(limits[-1] - 1, 0) if counts else max(limits)

    def is_harmless(self, site: Site, call: Call) -> bool:
        """Say whether an arange holds only whole numbers that every floating dtype in use can hold."""
        largest = self.largest(call)
        values = self.bounds(call)
        # The elements are start + i * step: a fraction at the end does not make them fractions.
        whole = all(value.whole for value in (values[:1] + values[2:] if len(values) > 1 else []))
        if largest is None or not whole or largest > 256:
            return False
        # float16 has the powers of two from -14 to 15.
        return not self.flow.is_exponent(site) or (largest <= 14 and self._is_power_of_two(site))

    def finding(self, rule: str, report: Report) -> Finding:
        """Give a report its position."""
        start = self.source.position(self.source.start(report.node))
        end = self.source.position(self.source.end(report.node))
        fix = report.fix if self.source.editable else None
        return Finding(rule, report.severity, self.path, *start, *end, report.message, fix)
