"""What mkdocs asks while it builds: the pages that are made from the program, and links out of docs/."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import PurePosixPath
from typing import Any

import click

from safe_rope.cli.main import cli
from safe_rope.scan import RULES

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with what is generated, and with the name of a file where no page can be linked."""
    uri = page.file.src_uri
    for mark, made in (("cli", commands), ("rules", rules)):
        if f"<!-- made: {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- made: {mark} -->", made())

    def inside(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(uri).parent / link[2])
        return f"{link[1]} (`{target.removeprefix('../')}`)" if target.startswith("..") else link[0]

    return _LINK.sub(inside, markdown)


def commands() -> str:
    """Return the help of every command, as it prints it."""
    root = click.Context(cli, info_name="safe-rope")
    parts = []
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        told = command.get_help(click.Context(command, info_name=name, parent=root))
        parts.append(f"## safe-rope {name}\n\n```text\n{told}\n```\n")
    return "\n".join(parts)


def rules() -> str:
    """Return every rule of the scan, with an example of each side."""
    parts = []
    for rule in RULES.values():
        parts.append(f"## {rule.id} {rule.name} ({rule.severity})\n\n{rule.summary}\n")
        parts.append(textwrap.dedent(rule.explanation).strip() + "\n")
        for title, examples in (("Found", rule.INVALID), ("Not found", rule.VALID)):
            if examples:
                parts.append(f"{title}:\n\n```python\n{textwrap.dedent(examples[0]).strip()}\n```\n")
    return "\n".join(parts)
