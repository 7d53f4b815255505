"""What several commands print and keep: versions, tables, progress, lines of JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def versions() -> dict[str, str]:
    """Return the version of each package that the load paths depend on."""
    import safe_rope

    names = ("transformers", "deepspeed", "torch")
    return {name: importlib.metadata.version(name) for name in names} | {"safe-rope": safe_rope.__version__}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, none where there is no file."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            rows.append(json.loads(line))
    return rows


def wide_console() -> Console:
    """Return a console that is not narrower than the tables where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Yield ``advance(count, description, line="")``: it moves a bar on stderr and prints a line above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)

        def advance(count: int, description: str, line: str = "") -> None:
            progress.update(task, advance=count, description=description)
            if line:
                console.print(line)

        yield advance
