"""Analyzes the source of one file: prefilter, one parse, one walk for all rules."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from safe_rope.scan.engine import (
    PINNED,
    Call,
    Diagnostic,
    File,
    Finding,
    Scope,
    Severity,
    Site,
    Source,
    Walk,
    prefilter,
    reader,
)
from safe_rope.scan.engine.callees import Callees
from safe_rope.scan.engine.company import Company, Group
from safe_rope.scan.engine.reach import Reach
from safe_rope.scan.rules import RULES
from safe_rope.scan.rules.rule import Rule

# Below this size a file is always parsed, so that a broken one is told from one without findings.
_SMALL = 512
_SEVERITIES = get_args(Severity)  # the worst first
_GENERATED = re.compile(rb"automatically generated from (\S*modular_\w+\.py)")


class SourceError(Exception):
    """The source cannot be analyzed: a syntax error, an unknown encoding, nesting too deep."""

    def __init__(self, path: str, line: int, column: int, message: str) -> None:
        self.diagnostic = Diagnostic(path, line, column, message)
        super().__init__(str(self.diagnostic))


def analyze(source: bytes, path: str, rules: Iterable[str] | None = None) -> list[Finding]:
    """Return the findings of one file, ordered by position; nothing in it is imported or executed.

    A large file that cannot hold a finding is not parsed, so that an error in its syntax goes unseen.
    One that may have a safe fix is analyzed whole: that rests on what the other functions do.

    Args:
        source: the file as read; edits of fixes count its bytes.
        path: put into findings; conversion and processing scripts are also recognized by it.
        rules: ids of the rules to report, all when None.
    Raises:
        SourceError: the source does not decode or parse.
    """
    chosen = RULES if rules is None else {rule: RULES[rule] for rule in rules}
    collecting = gc.isenabled()
    gc.disable()  # it would traverse every tree and find nothing: half the time of a scan
    file = None
    try:
        file = _file(source, path)
        found = [] if file is None else _run(file, chosen.values())
        if file is not None and file.source.reduced and any(one.fix and one.fix.safe for one in found):
            file.walk.release()
            file = _file(source, path, again=file.source)
            assert file is not None
            found = _run(file, chosen.values())
    except SyntaxError as error:
        message = f"{error.msg or 'invalid syntax'} ({reader()})"
        raise SourceError(path, error.lineno or 1, max(error.offset or 1, 1), message) from error
    except (RecursionError, MemoryError) as error:
        raise SourceError(path, 1, 1, "nested too deeply to analyze") from error
    finally:
        if file is not None:
            file.walk.release()
        del file
        if collecting:
            gc.enable()
    return sorted(found, key=lambda finding: (finding.line, finding.column, finding.rule))


def _file(source: bytes, path: str, *, again: Source | None = None) -> File | None:
    """Return what rules ask about a file, None where it cannot hold a finding; again, of all of it."""
    try:
        if again is not None:
            return File(again, path, Walk(again.parse()))
        text = Source(source)
        hits = prefilter.occurrences(text.text)
        if not hits and len(source) < _SMALL:
            ast.parse(text.text.decode())
        return File(text, path, Walk(text.parse(hits))) if hits else None
    except (ValueError, LookupError) as error:  # null bytes, an unknown encoding, bytes that it does not have
        raise SourceError(path, 1, 1, str(error)) from error


def _run(file: File, rules: Iterable[Rule]) -> list[Finding]:
    by_function: dict[str, list[Rule]] = {}
    for rule in rules:
        for function in rule.functions:
            by_function.setdefault(function, []).append(rule)
    found: list[tuple[Finding, int]] = []
    changed: set[int] = set()  # what a fix gives another dtype than it has in FP32
    reported: dict[tuple[str, Scope], int] = {}
    for site in file.walk.sites:
        name, call = _what(file, site, by_function)
        for rule in by_function.get(name, ()):
            report = rule.check(file, site, call)
            if report is None:
                continue
            cast = report.cast or report.node
            one = file.finding(rule.id, report)
            if one.fix is not None and (_is_shown(site) or _is_late(file, site)):
                one = replace(one, fix=replace(one.fix, safe=False))
            if rule.once_per_class and (owner := site.place.scope.owner) is not None:
                at = reported.setdefault((rule.id, owner), len(found))
                if at < len(found):
                    if _SEVERITIES.index(one.severity) < _SEVERITIES.index(found[at][0].severity):
                        found[at] = one, id(cast)
                    continue
            found.append((one, id(cast)))
            if file.value(cast, site.place).dtype not in {*PINNED, "default", "int"}:
                changed.add(id(cast))
    if not found:
        return []
    callees = Callees(file.walk, file.inference)
    company = Company(file.walk, file.inference, callees)
    # Of a part of a file nothing shows where a value goes.
    reach = None if file.source.reduced else Reach(file.walk, file.inference, callees)
    if reach is None:
        proven = _proven(file, found, company, None)
        if any(one.fix and one.fix.safe for one in proven):
            return proven  # the whole file is analyzed instead
    return _proven(file, _unmixed(company, found, changed), company, reach)


def _is_shown(site: Site) -> bool:
    """Say whether the code itself is shown, as by ``f"{x=}"``."""
    return any(isinstance(node, ast.JoinedStr) for node in site.ancestors)


def _is_late(file: File, site: Site) -> bool:
    """Say whether it runs later than its statement, and reads what is bound anew in between."""
    late = next((one for one in site.ancestors if isinstance(one, ast.Lambda | ast.GeneratorExp)), None)
    names = () if late is None else {one.id for one in ast.walk(late) if isinstance(one, ast.Name)}
    scope = site.place.scope
    return any(
        not {*scope.bindings.get(name, ())} <= {*file.names.bindings(name, site.place)} for name in names
    )


def _unmixed(
    company: Company, found: list[tuple[Finding, int]], changed: Collection[int]
) -> list[tuple[Finding, int]]:
    """Leave out a fix that gives another dtype than what it meets has, where one is taken: it may raise."""
    fixed = {cast for one, cast in found if one.fix is not None}
    unsafe = {cast for one, cast in found if one.fix is not None and not one.fix.safe and cast in changed}
    if not unsafe:
        return found
    groups = company.groups(fixed, of=unsafe)
    mixed = {one for group in groups if not group.only for one in group.members} & unsafe
    return [
        (replace(one, fix=None) if cast in mixed and one.fix and not one.fix.safe else one, cast)
        for one, cast in found
    ]


def _proven(
    file: File, found: list[tuple[Finding, int]], company: Company, reach: Reach | None
) -> list[Finding]:
    """Keep the fixes safe that change all equal lines, and all that an operation takes in one dtype.

    Nothing may be unknown of where the values go. What such an operation takes is one fix. Each finding
    comes with the id of what its fix casts.
    """
    reached = {
        cast: frozenset() if reach is None else reach.operations(cast)
        for one, cast in found if one.fix and one.fix.safe
    }  # fmt: skip
    fixes = {
        number: one.fix
        for number, (one, cast) in enumerate(found)
        if one.fix and one.fix.safe and reached[cast] is not None
    }
    operations = None if reach is None else frozenset().union(*(some for some in reached.values() if some))
    before: set[int] = set()
    groups: list[Group] = []
    while fixes.keys() != before:
        before = {*fixes}
        groups = list(company.groups({found[number][1] for number in fixes}, operations))
        alone = {one for group in groups if not group.only for one in group.members}
        alone |= _astray(groups, reached)
        together = _together(file, [one for one, _ in found], fixes)
        fixes = {number: fixes[number] for number in together if found[number][1] not in alone}
    edits = {found[number][1]: fix.edits for number, fix in fixes.items()}
    for whole in _joined(group.members for group in groups):
        joined = sorted({edit for one in whole for edit in edits[one]}, key=lambda edit: edit.start)
        edits |= dict.fromkeys(whole, tuple(joined))
    return [
        replace(one, fix=replace(one.fix, safe=number in fixes, edits=edits.get(cast, one.fix.edits)))
        if one.fix is not None
        else one
        for number, (one, cast) in enumerate(found)
    ]


def _astray(groups: list[Group], reached: Mapping[int, frozenset[int] | None]) -> set[int]:
    """Return what meets in an operation that it reaches what is not seen to meet it."""
    met: dict[int, set[int]] = {}
    for group in groups:
        for one in group.members:
            met.setdefault(one, set()).add(group.operation)
    return {cast for cast, some in reached.items() if some is not None and not some <= met.get(cast, set())}


def _joined(groups: Iterable[frozenset[int]]) -> Iterable[frozenset[int]]:
    """Return the groups, those that share a member as one."""
    of: dict[int, frozenset[int]] = {}
    for group in groups:
        whole = group.union(*(of.get(one, ()) for one in group))
        of |= dict.fromkeys(whole, whole)
    return set(of.values())


def _together(file: File, found: list[Finding], safe: Collection[int]) -> list[int]:
    """Return which of the safe fixes change all of several equal lines: these are one idiom."""
    lines = file.source.lines if safe else []
    keys = {
        number: (found[number].rule, tuple(lines[found[number].line - 1 : found[number].end_line]))
        for number in safe
    }
    changed = Counter(keys.values())
    at: dict[bytes, list[int]] = {some[0]: [] for _, some in changed}
    for number, line in enumerate(lines):
        if line in at:
            at[line].append(number)
    equal = {
        some: sum(tuple(lines[start : start + len(some)]) == some for start in at[some[0]])
        for some in {some for _, some in changed}
    }
    return [number for number, key in keys.items() if changed[key] >= equal[key[1]]]


def _what(file: File, site: Site, known: dict[str, list[Rule]]) -> tuple[str, Call | None]:
    """Return the last part of the name of what a site calls; "@" for a matrix product, "" else."""
    node = site.node
    if not isinstance(node, ast.Call):
        return ("@" if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) else ""), None
    function = node.func
    # Of attributes, only one of self can stand for a function of another name.
    own = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self"
    if isinstance(function, ast.Attribute) and not own and function.attr not in known:
        return "", None
    method = function.attr if isinstance(function, ast.Attribute) else ""
    name = method if method in known else file.names.called(node, site.place).rpartition(".")[2]
    return (name, file.inference.call(node, site.place)) if name in known else ("", None)


def generated_from(source: bytes) -> str | None:
    """Return the name of the modular file that this file says it is generated from."""
    match = _GENERATED.search(source, 0, 2048)
    return None if match is None else match[1].decode(errors="replace").rpartition("/")[2]
