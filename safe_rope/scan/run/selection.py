"""Which of the hits count: by rule, comment, baseline, and once for a file and what is generated from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from safe_rope.scan.engine import Diagnostic, FileResult, Hit
from safe_rope.scan.run import suppressions
from safe_rope.scan.run.baseline import Baseline
from safe_rope.scan.run.settings import Settings


class Selection:
    """Decides about hits, knowing the settings of every file and what else was scanned."""

    def __init__(
        self, settings: Mapping[str, Settings], results: Mapping[str, FileResult], baseline: Baseline | None
    ) -> None:
        self._settings = settings
        self._results = results
        self._baseline = baseline

    def active(self, result: FileResult) -> list[Hit]:
        """Return the hits of enabled rules that no comment silences and no baseline holds."""
        if not result.hits:
            return []
        rules = self._settings[result.path].rules_for(result.path)
        hits = [hit for hit in result.hits if hit.finding.rule in rules and not hit.silenced_by]
        return hits if self._baseline is None else self._baseline.new(hits)

    def shown(self, result: FileResult) -> list[Hit]:
        """Return the active hits, less those that are reported at the file that this one is generated from.

        What the generator took from elsewhere (a class that the source only inherits) stays reported here.
        """
        source = self.source_of(result)
        if source is None:
            return self.active(result)
        at_source = _keys(source.hits)
        return [hit for hit in self.active(result) if _key(hit) not in at_source]

    def fixable(self, result: FileResult) -> list[Hit]:
        """Return the active hits, less those silenced at the source: a generated copy is fixed like it."""
        source = self.source_of(result)
        silenced = set() if source is None else _keys(source.hits) - _keys(self.active(source))
        rules = self._settings[result.path].fixable
        return [hit for hit in self.active(result) if hit.finding.rule in rules and _key(hit) not in silenced]

    def source_of(self, result: FileResult) -> FileResult | None:
        """Return the scanned file that this one says it is generated from."""
        if result.generated_from is None:
            return None
        name = os.path.basename(result.generated_from.replace("\\", "/"))
        path = os.path.join(os.path.dirname(result.path), name)
        return None if path == result.path else self._results.get(path)

    def problems(self) -> list[Diagnostic]:
        """Return what is wrong with the suppressions of all files."""
        found = []
        for path, result in self._results.items():
            if result.suppressions:
                used = {(index, hit.finding.rule) for hit in result.hits for index in hit.silenced_by}
                rules = self._settings[path].rules_for(path)
                for comment, text in suppressions.problems(result.suppressions, used, rules):
                    found.append(Diagnostic(path, comment.line, comment.column, text))
        return found


def _key(hit: Hit) -> tuple[str, str]:
    return hit.finding.rule, hit.snippet


def _keys(hits: Iterable[Hit]) -> set[tuple[str, str]]:
    return {_key(hit) for hit in hits}
