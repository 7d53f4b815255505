"""``python -m safe_rope [--strict] [--tables T] [--report FILE] train.py ...``: guard a script as it is."""

from __future__ import annotations

import sys

import click

from safe_rope.cli.main import main
from safe_rope.cli.run import check_interpreter, python_command

if __name__ == "__main__":
    try:
        check_interpreter(sys.flags)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    main(python_command(sys.orig_argv, sys.argv[1:]))
