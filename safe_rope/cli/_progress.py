"""Progress on stderr for what takes more than two seconds; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PATIENCE = 2.0


@contextlib.contextmanager
def following(quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a listener for messages with ``doing`` and, where it is known, ``done`` and ``of``."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda message: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("starting", total=None)
    # The first message can be the only one for longer than that.
    late = threading.Timer(_PATIENCE, progress.start)
    late.daemon = True
    late.start()

    def listen(message: dict[str, Any]) -> None:
        done, total = message.get("done", 0), message.get("of")
        progress.update(task, description=message["doing"], completed=done, total=total)

    try:
        yield listen
    finally:
        late.cancel()
        progress.stop()
