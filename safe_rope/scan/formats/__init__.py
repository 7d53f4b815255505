"""The output formats of `safe-rope scan`, one file each; every one returns text for stdout."""

from collections.abc import Callable, Sequence

from safe_rope.scan.engine import Diagnostic, Hit
from safe_rope.scan.formats import github, gitlab, json, junit, sarif, text
from safe_rope.scan.formats.plain import printable
from safe_rope.scan.formats.statistics import table

FORMATS: dict[str, Callable[[Sequence[Hit], Sequence[Diagnostic]], str]] = {
    "text": text.for_stdout,
    "concise": text.concise,
    "json": json.render,
    "sarif": sarif.render,
    "github": github.render,
    "gitlab": gitlab.render,
    "junit": junit.render,
}

__all__ = ["FORMATS", "printable", "table"]
