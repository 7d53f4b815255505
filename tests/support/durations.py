"""How long tests take, in seconds of processor time, which other work on the machine hardly changes."""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).resolve().parents[1] / "durations.json"
LIMIT = 6.0
"""A test whose call takes longer must say so: it is marked ``slow``."""


def used() -> float:
    """Return the seconds of processor time of this process and of its children that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def recorded() -> dict[str, Any]:
    """Return the committed record: the seconds of each file, and what its slowest test took."""
    try:
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record


class Durations:
    """A plugin of pytest that measures every test, and writes the record when it is asked to."""

    def __init__(self, write: bool) -> None:
        self.write = write
        self.seconds: dict[str, dict[str, float]] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        began = used()
        yield
        item.user_properties.append(("setup", used() - began))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began = used()
        yield
        seconds = used() - began
        item.user_properties.append(("call", seconds))
        if seconds > LIMIT and item.get_closest_marker("slow") is None:
            # No failure: nobody knows how fast the machine is.
            item.warn(
                pytest.PytestWarning(
                    f"took {seconds:.1f} s of processor time, more than {LIMIT:.0f}: make it quicker, or "
                    "mark it slow if it takes as long on the machine of tests/durations.json"
                )
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what a test took; under pytest-xdist the reports of all workers come here."""
        if report.when == "teardown":
            file, _, name = report.nodeid.partition("::")
            took = [seconds for phase, seconds in report.user_properties if phase in ("setup", "call")]
            self.seconds[file][name] = sum(map(float, took))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Replace the lines of the files that were run, and drop those of files that are gone."""
        if not self.write or hasattr(session.config, "workerinput"):
            return
        record = {
            file: line for file, line in recorded().items() if (session.config.rootpath / file).exists()
        }
        for file, tests in self.seconds.items():
            slowest = max(tests, key=lambda name: tests[name])
            record[file] = {
                "tests": len(tests),
                "seconds": round(sum(tests.values()), 1),
                "slowest": {slowest: round(tests[slowest], 1)},
            }
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")
