"""What the environment asks for: SAFE_ROPE, and SAFE_ROPE_ with TABLES, STRICT, AUTOCAST, REPORT.

SAFE_ROPE_RUN is set by `safe-rope run` alone: it ties the processes of one run together in its report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safe_rope._base.text import nearest
from safe_rope.errors import ConfigError

STARTUP = Path(__file__).parent / "startup"
"""The folder that makes every Python whose PYTHONPATH starts with it guard itself."""

TABLES = ("exact", "fp32")

_PREFIX = "SAFE_ROPE_"
_OURS = ("TABLES", "STRICT", "AUTOCAST", "REPORT", "RUN")
_TOOLS = ("VENV", "FULL_GRID")  # of the commands in tools/ and of the tests

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Options:
    """How a process guards itself.

    Attributes:
        tables: as for `safe_rope.guard`.
        strict: as for `safe_rope.guard`.
        autocast: whether deepspeed.initialize is safe_rope.initialize.
        report: where rank 0 writes its report as JSON; an absolute path.
        run: what the processes of one `safe-rope run` have in common.
    """

    tables: str = "exact"
    strict: bool = False
    autocast: bool = False
    report: str | None = None
    run: str | None = None

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make a Python, and every Python that it starts, guard itself.

        Args:
            before: the environment that they will be added to.

        Raises:
            ConfigError: the path of this package cannot stand in PYTHONPATH.
        """
        if os.pathsep in str(STARTUP):
            raise ConfigError(
                f"PYTHONPATH cannot hold {STARTUP}, which has a {os.pathsep!r} in it; "
                "install safe_rope elsewhere"
            )
        rest = [part for part in before.get("PYTHONPATH", "").split(os.pathsep) if part]
        rest = [part for part in rest if Path(part) != STARTUP]
        variables = {
            "SAFE_ROPE": "1",
            "SAFE_ROPE_TABLES": self.tables,
            "SAFE_ROPE_STRICT": "1" if self.strict else "0",
            "SAFE_ROPE_AUTOCAST": "1" if self.autocast else "0",
            "PYTHONPATH": os.pathsep.join([str(STARTUP), *rest]),
        }
        if self.report is not None:
            variables["SAFE_ROPE_REPORT"] = self.report
        if self.run is not None:
            variables["SAFE_ROPE_RUN"] = self.run
        return variables


def read(environment: Mapping[str, str]) -> Options:
    """Read the options from the environment.

    Raises:
        ConfigError: a variable has a value that means nothing, or begins with SAFE_ROPE_ and is none of ours.
    """
    for name in environment:
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in (*_OURS, *_TOOLS):
            near = nearest(name.removeprefix(_PREFIX), _OURS)
            remedy = f"did you mean {_PREFIX}{near}?" if near else f"there are {_PREFIX}{', _'.join(_OURS)}"
            raise ConfigError(f"{name} is no variable of safe-rope; {remedy}")
    _switch(environment, "SAFE_ROPE")
    tables = environment.get("SAFE_ROPE_TABLES") or "exact"
    if tables not in TABLES:
        raise ConfigError(f"SAFE_ROPE_TABLES must be exact or fp32, got {tables!r}")
    report = environment.get("SAFE_ROPE_REPORT") or None
    return Options(
        tables=tables,
        strict=_switch(environment, "SAFE_ROPE_STRICT"),
        autocast=_switch(environment, "SAFE_ROPE_AUTOCAST"),
        report=os.path.abspath(report) if report else None,
        run=environment.get("SAFE_ROPE_RUN") or None,
    )


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "").lower()
    if value not in (*_ON, *_OFF):
        raise ConfigError(f"{name} must be 1 or 0, got {environment[name]!r}")
    return value in _ON
