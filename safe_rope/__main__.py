"""``python -m safe_rope [--strict] [--tables T] [--report FILE] train.py ...``: guard a script as it is.

``python -m safe_rope scan ...`` and the other commands' names do what ``safe-rope scan ...`` does, as do
``--help`` and ``--version``.
"""

from __future__ import annotations

import sys

import click

from safe_rope.cli.main import COMMANDS, main
from safe_rope.cli.run import check_interpreter, python_command

if __name__ == "__main__":
    # A script has a suffix or a folder; one that is called like a command is still reachable as ./scan.
    if not sys.argv[1:] or sys.argv[1] in (*COMMANDS, "-h", "--help", "--version", "--debug"):
        main(sys.argv[1:])
    try:
        check_interpreter(sys.flags)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    main(python_command(sys.orig_argv, sys.argv[1:]))
