"""Let ranks agree on what is safe: each may have traced other inputs, and all must communicate alike.

What one rank's inputs read in FP32 is unsafe on all of them. A rank that fails tells the others, so that none
waits for it. Messages go through the store with which the process group was formed: it needs no device, which
DeepSpeed chooses later, and serves any of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from safe_rope._base.text import counted
from safe_rope._base.torch_private import default_store
from safe_rope.autocast.safety.report import SafetyReport
from safe_rope.errors import ConfigError, PrecisionWarning

Agree = Callable[[SafetyReport], SafetyReport]

_talks: Counter[tuple[int, ...]] = Counter()  # that a rank, the first of these, had with the others


@contextlib.contextmanager
def agreement(ranks: Callable[[bool], tuple[int, list[int]]]) -> Iterator[Agree]:
    """Give what makes of this rank's report the one that all ranks share; each has to call it once.

    If the block ends before that in an error of any kind, SystemExit and KeyboardInterrupt too, this rank
    raises it, and the others raise ConfigError.

    Args:
        ranks: returns this rank and all that take part, itself alone if there is no process group. It forms
            one if it is given True.

    """
    talk: _Talk | None = None

    def agree(report: SafetyReport) -> SafetyReport:
        nonlocal talk
        talk = _Talk(*ranks(True))
        return _agreed(report, talk)

    try:
        yield agree
    except BaseException as error:
        with contextlib.suppress(Exception):  # of the store: the rank's own error is raised
            (talk or _Talk(*ranks(False))).give_up(_described(error))
        raise


def _described(error: BaseException) -> str:
    said = type(error).__name__
    with contextlib.suppress(Exception):  # somebody's own __str__
        said = f"{said}: {error}" if str(error) else said
    return said


class _Talk:
    """One exchange of plain data: the first of the ranks merges what all have said, and tells the result."""

    def __init__(self, own: int, ranks: list[int]) -> None:
        self._store = default_store() if len(ranks) > 1 else None
        talk = own, *ranks
        _talks[talk] += 1
        self._key = f"safe_rope/{hash(tuple(ranks))}/{_talks[talk]}"
        self.own, self._ranks = own, ranks
        self._place: int | str = "all" if own == ranks[0] else own
        self._has_told = False

    def merged(self, said: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Return on every rank what ``merge`` makes of what they ``said``; None for a rank by itself."""
        if self._store is None:  # nobody else, or MPI
            return None
        first = self._ranks[0]
        if self.own != first:
            self._tell(said)
            return self._get("all")
        heard = {first: said} | {rank: self._get(rank) for rank in self._ranks[1:]}
        result = merge(heard)
        self._tell(result)
        return result

    def give_up(self, why: str) -> None:
        """Tell the others that this rank fails, unless they wait for it no more; wait for nobody."""
        if self._store is not None and not self._has_told:
            self._tell({"failed": {self.own: why}})

    def _tell(self, value: Any) -> None:
        assert self._store is not None
        self._store.set(f"{self._key}/{self._place}", zlib.compress(json.dumps(value).encode()))
        self._has_told = True

    def _get(self, who: int | str) -> Any:
        assert self._store is not None
        return json.loads(zlib.decompress(self._store.get(f"{self._key}/{who}")))


def _agreed(report: SafetyReport, talk: _Talk) -> SafetyReport:
    reasons = {entry.name: None if entry.safe else entry.reason for entry in report.parameters}
    result = talk.merged({"reasons": reasons}, _merged) or {}
    if "failed" in result:
        rank, why = next(iter(result["failed"].items()))
        raise ConfigError(f"rank {rank} could not tell which parameters are safe: {why}")
    differing: dict[str, str] = result.get("unsafe", {})
    if not differing:
        return report
    text = (
        f"the ranks' example inputs disagree about {counted(len(differing), 'parameter')}, such as "
        f"{min(differing)} ({differing[min(differing)]}), which is safe with those of other ranks; what is "
        "unsafe on one rank is communicated in its own dtype by all. If what reads a weight depends on the "
        "input, pass example_inputs that take every path"
    )
    warnings.warn(text, PrecisionWarning, stacklevel=5)
    return report.without(differing, text)


def _merged(said: dict[int, Any]) -> dict[str, Any]:
    """Which rank failed; else what is unsafe on one rank and safe on another, and why it is unsafe."""
    failed = {rank: why for one in said.values() for rank, why in one.get("failed", {}).items()}
    if failed:
        return {"failed": failed}
    safe = {name for one in said.values() for name, why in one["reasons"].items() if why is None}
    unsafe: dict[str, str] = {}
    for rank, one in said.items():
        for name, why in one["reasons"].items():
            if why is not None and name in safe:
                unsafe.setdefault(name, f"{why}, on rank {rank}")
    return {"unsafe": unsafe}
