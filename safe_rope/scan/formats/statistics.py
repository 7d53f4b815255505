"""How often each rule finds something, and which findings are the same code in several files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from safe_rope.scan.engine import Hit, Severity
from safe_rope.scan.formats.plain import printable
from safe_rope.scan.rules import RULES


def table(hits: Iterable[Hit]) -> str:
    """Return a table of rules with their counts, each followed by its groups of identical code."""
    rules: dict[str, list[Hit]] = defaultdict(list)
    for hit in hits:
        rules[hit.finding.rule].append(hit)
    lines = []
    for rule, found in sorted(rules.items(), key=lambda item: (-len(item[1]), item[0])):
        severities = Counter(hit.finding.severity for hit in found)
        kinds = ", ".join(f"{severities[kind]} {kind}" for kind in _KINDS if severities[kind])
        lines.append(f"{len(found):6}  {rule}  {RULES[rule].summary} ({kinds})")
        counts = Counter(hit.snippet for hit in found)
        for snippet, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            where = {hit.finding.path for hit in found if hit.snippet == snippet}
            place = printable(min(where)) if len(where) == 1 else f"{len(where)} files"
            lines.append(f"{count:10}  {printable(snippet)[:_WIDTH]}  [{place}]")
    return "".join(line + "\n" for line in lines)


_KINDS: tuple[Severity, ...] = ("error", "warning", "note")
_WIDTH = 120
