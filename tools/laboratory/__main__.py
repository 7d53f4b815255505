"""Measurements and surveys of safe_rope: what `tools/lab` runs in an environment.

Each command is a folder beside this file. Its face has ``LIMIT`` (seconds, None without one), ``arguments``
(which adds its options to a parser) and ``main`` (which returns the exit status); it imports no package that
an environment would have to hold before ``main`` is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from _process import ToolError, exit_on_sigterm, say

COMMANDS = (
    *("autocast-fuzz", "bench", "chart", "deepspeed-tests", "docs", "engines", "gpu", "libraries", "quality"),
    *("scan-eval", "soak", "upstream", "verify-tables", "wheel", "zoo"),
)


def parser(others: Mapping[str, str] | None = None, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        others: commands to list that are not of this package, each with a line of help.
        epilog: below the help of each command.

    """
    form = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="tools/lab",
        description="Measurements and surveys of safe_rope, one command for each.",
        epilog=epilog,
        formatter_class=form,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("demo", *COMMANDS):
        module = importlib.import_module(f"laboratory.{name.replace('-', '_')}")
        text = (module.__doc__ or "").strip()
        # Without help it is not listed: tools/demo is a command of its own.
        shown: dict[str, Any] = (
            {"prog": "tools/demo"} if name == "demo" else {"help": text.partition("\n")[0]}
        )
        one = commands.add_parser(
            name, description=text, epilog=epilog, formatter_class=form, allow_abbrev=False, **shown
        )
        module.arguments(one)
        one.set_defaults(run=module.main, limit=module.LIMIT)
    for name, line in (others or {}).items():
        commands.add_parser(name, help=line)
    return top


def main() -> int:
    exit_on_sigterm()
    options = parser().parse_args()
    try:
        status: int = options.run(options)
    except ToolError as error:
        say(f"error: {error}")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
