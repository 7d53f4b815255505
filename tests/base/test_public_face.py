"""What somebody sees who looks at the package before reading anything."""

from __future__ import annotations

import json
import pydoc
import subprocess
import sys

import pytest

import safe_rope

MODULES = (
    "autocast",
    "constructors",
    "frequencies",
    "integrations",
    "registry",
    "rotation",
    "scan",
    "tables",
)


def test_dir_has_the_public_names_and_no_others() -> None:
    names = [name for name in dir(safe_rope) if not name.startswith("_")]
    assert sorted(names) == sorted([*safe_rope.__all__, *MODULES])
    assert safe_rope.__version__


def test_help_begins_with_every_public_name() -> None:
    begin = pydoc.plain(pydoc.render_doc(safe_rope)).split("PACKAGE CONTENTS")[0]
    assert [name for name in (*safe_rope.__all__, *MODULES) if name not in begin] == []


@pytest.mark.slow
def test_env_says_what_runs_where() -> None:
    source = "from safe_rope.cli.main import main; main(['env', '--format', 'json'])"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    assert sys.executable in told["python"]
    assert "CPU only" in told["torch build"] or "devices: " in told["torch build"]
    assert told["transformers version"]
    plain = subprocess.run(
        [sys.executable, "-c", source.replace("json", "text")], capture_output=True, text=True, timeout=100
    )
    assert [line for line in plain.stdout.splitlines() if line.startswith("torch version")]
