"""How often each rule finds something, and which findings are the same code in several files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from safe_rope.scan.engine import Hit
from safe_rope.scan.formats.plain import printable
from safe_rope.scan.rules import RULES


def table(hits: Iterable[Hit]) -> str:
    """Return a table of rules with their counts, each followed by its groups of identical code."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    files: dict[tuple[str, str], set[str]] = defaultdict(set)
    severities: dict[str, Counter[str]] = defaultdict(Counter)
    for hit in hits:
        finding = hit.finding
        groups[finding.rule][hit.snippet] += 1
        files[finding.rule, hit.snippet].add(finding.path)
        severities[finding.rule][finding.severity] += 1
    lines = []
    for rule, counts in sorted(groups.items(), key=lambda item: (-item[1].total(), item[0])):
        kinds = ", ".join(f"{severities[rule][kind]} {kind}" for kind in _KINDS if severities[rule][kind])
        summary = RULES[rule].summary if rule in RULES else ""
        lines.append(f"{counts.total():6}  {rule}  {summary} ({kinds})")
        for snippet, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            where = sorted(files[rule, snippet])
            place = printable(where[0]) if len(where) == 1 else f"{len(where)} files"
            lines.append(f"{count:10}  {printable(snippet)[:_WIDTH]}  [{place}]")
    return "".join(line + "\n" for line in lines)


_KINDS = ("error", "warning", "note")
_WIDTH = 120
