"""The reference has every public name, every command with its options, and every rule of the scan."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Any

import click
import pytest
from laboratory.docs import hooks
from markdown import ROOT

import safe_rope
from safe_rope.cli.main import cli
from safe_rope.scan import RULES

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
BETWEEN_ROOMS: dict[str, set[str]] = {
    "autocast": {"in_place_of_deepspeeds"},
    "constructors": {"CONSTRUCTORS", "LEFT", "as_imported_from_torch", "has_lowered", "is_lowering"},
    "frequencies": {"Bits"},
    "rotation": {"CosSin", "fp32_application", "is_marked", "marked", "plain", "round_results"},
    "scan": {
        *("DEFAULT_FILE", "FORMATS", "LISTS", "RULES", "Baseline", "Cache", "FileResult", "Hit", "Rule"),
        *("Selection", "UnreadableError", "check_rules", "diff", "fix_source", "limited", "load_settings"),
        *("open_cache", "printable", "scan_files", "scan_source", "session", "table"),
    },
}
"""Names of a face that only other rooms of the library use."""


def documented() -> dict[str, Any]:
    """Return the objects that the page renders, by the path that it gives for each."""
    return {path: resolve(path) for path in re.findall(r"^::: ([\w.]+)$", PAGE, flags=re.M)}


def resolve(path: str) -> Any:
    """Return what a path names; the path if it needs a package that is not installed."""
    if path.startswith("safe_rope.integrations.lightning") and not has_lightning():
        return path
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(path)


def has_lightning() -> bool:
    return any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning"))


def faces() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(safe_rope.__path__))
    return [name for name in names if not name.startswith("_") and name != "cli"]


def exported(face: ModuleType) -> list[str]:
    """Return the names that a module exports: its ``__all__``, or what it defines."""
    if hasattr(face, "__all__"):
        return list(face.__all__)
    own = (name for name, value in vars(face).items() if getattr(value, "__module__", "") == face.__name__)
    return [name for name in own if not name.startswith("_")]


def test_the_reference_has_every_public_name() -> None:
    shown = list(documented().values())
    for module in [value for value in shown if inspect.ismodule(value)]:
        shown += [getattr(module, name) for name in exported(module)]
    missing = [name for name in safe_rope.__all__ if not is_among(getattr(safe_rope, name), shown)]
    for name in faces():
        face = importlib.import_module(f"safe_rope.{name}")
        public = [known for known in exported(face) if known not in BETWEEN_ROOMS.get(name, set())]
        if name == "integrations" and not has_lightning():
            assert any(str(path).endswith("SafeRopeLightningCallback") for path in shown)
            public.remove("SafeRopeLightningCallback")
        missing += [f"{name}.{known}" for known in public if not is_among(getattr(face, known), shown)]
    assert not missing


def is_among(value: Any, shown: list[Any]) -> bool:
    return any(value is known for known in shown)


def test_what_the_reference_shows_has_a_docstring() -> None:
    assert not [path for path, value in documented().items() if callable(value) and not inspect.getdoc(value)]


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_the_reference_has_every_command_with_its_options(name: str) -> None:
    page = hooks.commands()
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert f"## safe-rope {name}\n" in page
    told = page.partition(f"## safe-rope {name}\n")[2].partition("\n## ")[0]
    for option in command.params:
        shown = (
            option.opts if isinstance(option, click.Option) else [option.make_metavar(click.Context(command))]
        )
        hidden = getattr(option, "hidden", False)
        assert hidden or any(known in told for known in shown), option


def test_the_reference_has_every_rule() -> None:
    page = hooks.rules()
    for rule in RULES.values():
        assert f"## {rule.id} {rule.name} ({rule.severity})" in page
        assert rule.summary in page
        assert {bool(rule.INVALID), bool(rule.VALID)} == {True}
    assert page.count("\n## ") + page.startswith("## ") == len(RULES)
