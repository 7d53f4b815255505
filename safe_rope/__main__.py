"""``python -m safe_rope [--strict] [--tables T] [--report FILE] train.py ...``: guard a script as it is.

``python -m safe_rope scan ...`` and the other commands' names do what ``safe-rope scan ...`` does, as do
``--help`` and ``--version``.
"""

from __future__ import annotations

import os
import sys

import click

from safe_rope._base.text import nearest
from safe_rope.cli.main import COMMANDS, main
from safe_rope.cli.run import check_interpreter, python_command

if __name__ == "__main__":
    # A script has a suffix or a folder; one that is called like a command is still reachable as ./scan.
    first = sys.argv[1] if sys.argv[1:] else ""
    if not first or first in (*COMMANDS, "-h", "--help", "--version", "--debug"):
        main(sys.argv[1:])
    if not first.startswith("-") and not os.path.exists(first) and nearest(first, COMMANDS) is not None:
        main(sys.argv[1:])  # which says what was meant
    try:
        check_interpreter(sys.flags)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    main(python_command(sys.orig_argv, sys.argv[1:]))
