"""The plot of an audit: phase error against position on log axes, stock and guarded."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from safe_rope._audit.command.outcome import Outcome, Side
from safe_rope._audit.report import BAD_RADIANS
from safe_rope._base.files import write_atomically
from safe_rope.errors import UnsupportedModelError

_FLOOR = 1e-9
"""Radians; what is exact is drawn here, because a log axis has no zero."""
_COLOURS = ("#c0392b", "#d68910", "#7d3c98", "#2471a3")
_GUARDED = "#1e8449"


def draw(outcome: Outcome, target: Path) -> None:
    """Write the plot to ``target``, at once or not at all, in the format of its suffix; needs matplotlib.

    Raises:
        UnsupportedModelError: nothing was measured.
    """
    if not any(entry.stock.module.rows or entry.guarded.module.rows for entry in outcome.entries):
        raise UnsupportedModelError(f"{target} is not written: nothing was measured that could be drawn")
    with tempfile.TemporaryDirectory(prefix="safe-rope-") as cache:
        os.environ.setdefault("MPLCONFIGDIR", cache)
        write_atomically(str(target), _draw(outcome, target.suffix[1:]))


def _draw(outcome: Outcome, style: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    paths = dict.fromkeys(entry.path for entry in outcome.entries)
    stock = [_line([e.stock for e in outcome.entries if e.path == path]) for path in paths]
    guarded = [_line([e.guarded for e in outcome.entries if e.path == path]) for path in paths]
    alike = all(line == guarded[0] for line in guarded)
    for index, path in enumerate(paths):
        colour = _COLOURS[index % len(_COLOURS)]
        # Lines of two paths can lie on each other: a wider one shows under a narrower one.
        width = max(3.4 - 0.9 * index, 1.0)
        axes.plot(*stock[index], color=colour, label=f"stock: {path}", linewidth=width, alpha=0.9)
        label = f"guarded: {path}" if not alike else "guarded, every path" if index == 0 else None
        axes.plot(
            *guarded[index], color=_GUARDED if alike else colour, linestyle="--", label=label, linewidth=1.6
        )
    axes.axhline(BAD_RADIANS, color="0.45", linewidth=0.9, linestyle=":")
    axes.annotate("0.1 rad", (1.0, BAD_RADIANS), color="0.35", fontsize=8, va="bottom")
    announced = outcome.announced
    axes.axvline(announced, color="0.45", linewidth=0.9, linestyle=":")
    note = {"color": "0.35", "fontsize": 8}
    axes.annotate("max_position_embeddings", (announced, 1e-6), rotation=90, ha="right", **note)
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="largest phase error (rad)")
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.set_title(f"{outcome.job.name} ({outcome.job.dtype})\n{outcome.environment}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=style)
    return drawn.getvalue()


def _line(sides: list[Side]) -> tuple[list[int], list[float]]:
    """The worst error of all modules at each position; position 0, which is never wrong, has no place."""
    measured = [side.errors() for side in sides]
    positions = sorted({position for errors in measured for position in errors} - {0})
    return positions, [max(_FLOOR, *(e.get(position, _FLOOR) for e in measured)) for position in positions]
