"""The code blocks of a Markdown file, and what is said about them.

A block that cannot be run here has a comment on the line before it, with the reason:

    <!-- not run: needs two GPUs -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)\s*$")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: the file it stands in.
        line: the number of its first line of content.
        language: what its fence says, "" where it says nothing.
        text: its content.
        not_run: why it is not run; None where it is.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of ``page`` in order."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    before, number = "", 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            before = lines[number] if lines[number].strip() else before
            number += 1
            continue
        indent, ticks, language = fence.groups()
        end = number + 1
        while lines[end].strip() != ticks:
            end += 1
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        mark = _NOT_RUN.search(before)
        found.append(Block(page, number + 2, language, text, mark.group(1) if mark else None))
        before, number = "", end + 1
    return found


def links(page: Path) -> list[str]:
    """Return the targets of the page's links to files, relative to it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]
