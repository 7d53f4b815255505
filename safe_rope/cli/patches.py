"""`safe-rope patches`: which architectures are protected, how, and with which versions that is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from safe_rope import registry
from safe_rope._base.files import write_atomically
from safe_rope._base.text import aligned
from safe_rope.cli import _patch_releases
from safe_rope.errors import ConfigError

_HEADER = ("family", "classes", "applied in FP32 by", "tested with transformers")
_BEGIN, _END = "<!-- safe-rope patches: begin -->", "<!-- safe-rope patches: end -->"
_NAMED = 3


@click.command("patches")
@click.option(
    "--format", "style", type=click.Choice(("text", "json", "markdown")), default="text", show_default=True
)
@click.option(
    "--update",
    type=click.Path(exists=True),
    metavar="FILE",
    help=f"Write the table into FILE, between its marks ({_BEGIN} …).",
)
@click.option("--record", is_flag=True, help="Add the installed versions to the tested ones.")
def command(style: str, update: str | None, record: bool) -> None:
    """List the architectures that a patch protects: safe_rope's, and those of packages that add one."""
    patches = registry.supported()
    if record:
        _patch_releases.record(patches)
    entries = [_entry(patch) for patch in patches]
    pairs = _patch_releases.read()["pairs"]
    if update is not None:
        _update(Path(update), _markdown(entries, pairs))
    elif style == "json":
        click.echo(json.dumps({"patches": entries, "tested": pairs}, indent=2))
    elif style == "markdown":
        click.echo(_markdown(entries, pairs), nl=False)
    else:
        rows = [(e["family"], _classes(e), e["applied"], ", ".join(e["tested"]) or "-") for e in entries]
        click.echo("\n".join(aligned(rows, _HEADER)))


def _entry(patch: registry.RopePatch) -> dict[str, Any]:
    families = _patch_releases.read()["families"]
    names = [*patch.applications, *(f"its own {name}" for name in patch.methods)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return {
        "family": patch.family,
        "modules": list(patch.modules),
        "classes": list(patch.rotary_classes),
        "layout": patch.layout,
        "applications": list(patch.applications),
        "methods": list(patch.methods),
        "applied": f"{names[0]}{more}" if names else "-",
        "tested": [release for release, names in families.items() if patch.family in names],
    }


def _classes(entry: dict[str, Any], quote: str = "") -> str:
    names = [f"{quote}{name}{quote}" for name in entry["classes"][:_NAMED]]
    more = len(entry["classes"]) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _markdown(entries: list[dict[str, Any]], pairs: list[dict[str, str]]) -> str:
    lines = ["| family | classes | applied in FP32 by | tested with transformers |", "|---|---|---|---|"]
    for entry in entries:
        tested = ", ".join(entry["tested"]) or "-"
        lines.append(f"| {entry['family']} | {_classes(entry, '`')} | {entry['applied']} | {tested} |")
    lines += ["", "Tested on CPU with gloo against the real libraries, on every change:", ""]
    lines += ["| transformers | deepspeed | torch |", "|---|---|---|"]
    lines += [f"| {pair['transformers']} | {pair['deepspeed']} | {pair['torch']} |" for pair in pairs]
    return "\n".join(lines) + "\n"


def _update(file: Path, table: str) -> None:
    content = file.read_text(encoding="utf-8")
    before, begin, rest = content.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ConfigError(
            f"{file} has no lines {_BEGIN} and {_END}, between which the table belongs; add them"
        )
    write_atomically(str(file), f"{before}{begin}\n{table}{end}{after}".encode())
