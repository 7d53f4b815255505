"""The plot of an audit: phase error against position on log axes, stock and guarded."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from safe_rope._audit.command.outcome import BAD_RADIANS, Outcome, Side
from safe_rope.errors import MissingDependencyError

_FLOOR = 1e-9
"""Radians; what is exact is drawn here, because a log axis has no zero."""
_COLOURS = ("#c0392b", "#d68910", "#7d3c98", "#2471a3")
_GUARDED = "#1e8449"


def draw(outcome: Outcome, target: Path) -> None:
    """Write the plot to ``target`` as PNG, at once or not at all.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="safe-rope-") as cache:
            os.environ.setdefault("MPLCONFIGDIR", cache)
            _draw(outcome, target)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise MissingDependencyError(
            "a plot needs matplotlib, which is not installed; "
            'install the extra: pip install "safe-rope[plot]"'
        ) from error


def _draw(outcome: Outcome, target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for index, (path, modules) in enumerate(_by_path(outcome).items()):
        colour = _COLOURS[index % len(_COLOURS)]
        # Lines of two paths can lie on each other: a wider one shows under a narrower one.
        width = 3.4 - 0.9 * index
        style: dict[str, Any] = {"linewidth": max(width, 1.0), "alpha": 0.9}
        positions, errors = _line([stock for stock, _ in modules])
        axes.plot(positions, errors, color=colour, label=f"stock: {path}", **style)
        positions, errors = _line([guarded for _, guarded in modules])
        label = "guarded, every path" if index == 0 and _all_guarded_alike(outcome) else None
        if not _all_guarded_alike(outcome):
            label = f"guarded: {path}"
        line_colour = _GUARDED if _all_guarded_alike(outcome) else colour
        axes.plot(positions, errors, color=line_colour, linestyle="--", label=label, linewidth=1.6)
    axes.axhline(BAD_RADIANS, color="0.45", linewidth=0.9, linestyle=":")
    axes.annotate("0.1 rad", (1.0, BAD_RADIANS), color="0.35", fontsize=8, va="bottom")
    announced = outcome.found["max_position_embeddings"]
    axes.axvline(announced, color="0.45", linewidth=0.9, linestyle=":")
    note = {"color": "0.35", "fontsize": 8}
    axes.annotate("max_position_embeddings", (announced, 1e-6), rotation=90, ha="right", **note)
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="largest phase error (rad)")
    axes.grid(visible=True, which="major", alpha=0.25)
    versions = ", ".join(f"{name} {version}" for name, version in outcome.found["versions"].items())
    axes.set_title(f"{outcome.name} ({outcome.dtype})\n{versions}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    partial = target.with_name(f".{target.name}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _by_path(outcome: Outcome) -> dict[str, list[tuple[Side, Side]]]:
    found: dict[str, list[tuple[Side, Side]]] = {}
    for entry in outcome.entries:
        found.setdefault(entry.path, []).append((entry.stock, entry.guarded))
    return found


def _line(sides: list[Side]) -> tuple[list[int], list[float]]:
    """The worst error of all modules at each position; position 0, which is never wrong, has no place."""
    worst: dict[int, float] = {}
    for side in sides:
        for row in side.rows:
            error = row["phase_error_rad"]
            value = float("inf") if error is None else max(float(error), _FLOOR)
            worst[row["position"]] = max(worst.get(row["position"], _FLOOR), value)
    positions = sorted(worst.keys() - {0})
    return positions, [worst[position] for position in positions]


def _all_guarded_alike(outcome: Outcome) -> bool:
    lines = [_line([guarded for _, guarded in modules]) for modules in _by_path(outcome).values()]
    return all(line == lines[0] for line in lines)
