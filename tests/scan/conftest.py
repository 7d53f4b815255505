from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from safe_rope.cli.main import cli


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with a cache of its own."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return project


@pytest.fixture
def scan(project: Path) -> Callable[..., Result]:
    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(cli, ["scan", *arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.fixture
def findings(scan: Callable[..., Result]) -> Callable[..., list[dict[str, Any]]]:
    """Return the findings of SR001, as JSON gives them."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        result = scan("--format", "json", "--select", "SR001", *arguments)
        found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
        failing = any(item["severity"] != "note" for item in found)
        assert result.exit_code in (int(failing), 2), result.stderr
        return found

    return run
