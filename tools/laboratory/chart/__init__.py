"""Draw the README's chart, error against position, from docs/data/error-mistral-7b.json. A moment.

The data is what this printed; two files are written, for light and dark pages:

    safe-rope audit tests/data/configs/mistral-7b.json --deepspeed examples/zero3.json --format json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from _environment import ROOT

LIMIT = 60.0
DATA = ROOT / "docs" / "data" / "error-mistral-7b.json"
WIDTH, HEIGHT = 860, 430
LEFT, RIGHT, TOP, BOTTOM = 78, 190, 52, 58
LOWEST, HIGHEST = 1e-8, 1e3  # radians
FARTHEST = 1e5  # positions
LABELS = {
    "zero.Init, initialize": "built in zero.Init",
    "from_pretrained, .to(bfloat16)": ".to(torch.bfloat16)",
    "ZeRO-3 from_pretrained, initialize": "plain FP32, undamaged",
}


class Theme(NamedTuple):
    """The colours of one of the two files."""

    ink: str
    quiet: str
    grid: str
    lines: tuple[str, str, str]
    guarded: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", ("#cf222e", "#bc4c00", "#59636e"), "#1a7f37"),
    "dark": Theme("#f0f6fc", "#9198a1", "#3d444d", ("#ff7b72", "#ffa657", "#9198a1"), "#3fb950"),
}


def across(position: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(position) / math.log10(FARTHEST)


def up(radians: float) -> float:
    share = math.log10(max(radians, LOWEST) / LOWEST) / math.log10(HIGHEST / LOWEST)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def points(side: dict[str, Any]) -> list[tuple[float, float]]:
    rows = [row for row in side["rows"] if row["position"] > 0]
    return [(across(row["position"]), up(row["phase_error_rad"])) for row in rows]


def text(x: float, y: float, said: str, colour: str, anchor: str = "start", size: int = 14) -> str:
    look = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {look}>{said}</text>'


def line(path: list[tuple[float, float]], colour: str, width: float, dash: str = "") -> str:
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def draw(found: dict[str, Any], theme: Theme) -> str:
    """Return the chart as SVG."""
    end = WIDTH - RIGHT
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [
        text(
            LEFT,
            22,
            "Error of the rotary phase (radians) against position: Mistral-7B, bf16",
            theme.ink,
            size=16,
        ),
        text(LEFT, 40, versions, theme.quiet, size=12),
        text((LEFT + end) / 2, HEIGHT - 14, "position", theme.quiet, "middle"),
    ]
    for power in range(-8, 4, 2):
        y = up(10.0**power)
        parts += [line([(LEFT, y), (end, y)], theme.grid, 1)]
        parts += [text(LEFT - 8, y + 5, f"1e{power}" if power else "1", theme.quiet, "end")]
    for power in range(6):
        x = across(10.0**power)
        parts += [line([(x, TOP), (x, HEIGHT - BOTTOM)], theme.grid, 1)]
        parts += [text(x, HEIGHT - BOTTOM + 20, f"{10**power:,}", theme.quiet, "middle")]
    y = up(math.pi)
    parts += [line([(LEFT, y), (end, y)], theme.quiet, 1.5, "4 4")]
    parts += [text(LEFT + 6, y - 6, "π: a pair of channels points the other way", theme.quiet, size=12)]
    shown = [entry for label in LABELS for entry in found["paths"] if entry["path"] == label]
    for entry, colour in zip(shown, theme.lines, strict=True):
        path = points(entry["stock"])
        parts += [line(path, colour, 2.5)]
        below = 16 if entry["path"].startswith("from_") else 0
        parts += [text(path[-1][0] + 8, path[-1][1] + 5 + below, LABELS[entry["path"]], colour)]
    path = points(shown[0]["guarded"])
    parts += [
        line(path, theme.guarded, 3),
        text(path[-1][0] + 8, path[-1][1] + 5, "guarded, every path", theme.guarded),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, *parts, "</svg>\n"])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where the two files go (docs/)")


def main(options: argparse.Namespace) -> int:
    found = json.loads(DATA.read_text(encoding="utf-8"))
    for name, theme in THEMES.items():
        (options.folder / f"error-{name}.svg").write_text(draw(found, theme), encoding="utf-8")
    return 0
