"""What docs/security.md promises: nothing that is scanned or audited is run, no pickle of others is read."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.children import surroundings

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 200
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
MARK = "import os; open(os.environ['MARK'], 'a').write(__name__ + '\\n')\n"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "trust_remote_code": True,
    "auto_map": {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
    },
}
NAMES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "json",
    "sitecustomize",
    "usercustomize",
    "conftest",
)


class Evil:
    """Its pickle writes the mark when it is read."""

    def __reduce__(self) -> Any:
        return exec, (MARK,)


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """The command as it is installed: a script in a folder that holds nothing else."""
    file = tmp_path / "bin" / "safe-rope"
    file.parent.mkdir()
    file.write_text("from safe_rope.cli.main import main\nmain()\n", encoding="utf-8")
    return file


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A checkpoint's folder in which every file writes the mark when it is run, imported or unpickled."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in (*NAMES, "modeling_evil", "configuration_evil", "setup"):
        (folder / f"{name}.py").write_text(MARK, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for name in ("pytorch_model.bin", "tables.safetensors", ".safe-rope-baseline.json"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    cell = {"cell_type": "code", "source": [MARK, "%run setup.py\n"], "metadata": {}, "outputs": []}
    notebook = {
        "cells": [{**cell, "execution_count": None}],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / "evil.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return folder


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder of installed packages, one of which has an entry point that fails."""
    folder = tmp_path / "packages"
    (folder / "evil-1.0.dist-info").mkdir(parents=True)
    (folder / "evil-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
    )
    points = "[safe_rope.patches]\nevil = evil_patches:PATCH\n"
    (folder / "evil-1.0.dist-info" / "entry_points.txt").write_text(points)
    (folder / "evil_patches.py").write_text("raise RuntimeError('evil')\n", encoding="utf-8")
    return folder


def call(command: Path, *arguments: str, cwd: Path, path: Path | None = None) -> Any:
    paths = [str(path)] * (path is not None) + list(filter(None, sys.path))
    env = surroundings() | {"PYTHONPATH": os.pathsep.join(paths), "MARK": str(cwd.parent / "mark")}
    done = subprocess.run(
        [sys.executable, str(command), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    mark = cwd.parent / "mark"
    assert not mark.exists(), f"run: {mark.read_text()}"
    return done


def test_nothing_that_is_scanned_is_run(command: Path, downloaded: Path, plugin: Path) -> None:
    for more in ((), ("--fix", "--unsafe-fixes"), ("-j", "2"), ("--baseline", ".safe-rope-baseline.json")):
        done = call(command, "scan", "--no-cache", *more, ".", cwd=downloaded, path=plugin)
        assert "Traceback" not in done.stderr
        assert "evil" not in done.stderr.replace("evil.ipynb", "")
        assert (done.returncode == 2) == ("--baseline" in more), done.stderr


@pytest.mark.slow
def test_nothing_of_what_is_audited_is_run(command: Path, downloaded: Path, plugin: Path) -> None:
    done = call(command, "audit", "--path", "from_pretrained", ".", cwd=downloaded, path=plugin)
    assert done.returncode in (0, 1), done.stderr
    assert "float32" in done.stdout or "bfloat16" in done.stdout


def header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


MALFORMED = {
    "empty": b"",
    "a pickle": pickle.dumps(Evil()),
    "cut off": header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}') + b"\0" * 7,
    "a header without an end": struct.pack("<Q", 2**62) + b"{",
    "no JSON": header(b"{nonsense"),
    "another's": header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') + b"\0" * 4,
    "bad notes": header(
        b'{"__metadata__":{"format":"safe_rope.tables/1","environment":"{"},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + b"\0" * 4,
}


def test_a_malformed_dump_is_one_line(tmp_path: Path, capsys: Any) -> None:
    from safe_rope._audit.command.dump import load
    from safe_rope.errors import ConfigError

    for name, content in MALFORMED.items():
        file = tmp_path / "dump.safetensors"
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load(file)
        assert "\n" not in str(caught.value), name
        assert str(file) in str(caught.value), name


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return found


def test_only_the_two_ends_of_one_pipe_know_pickle_and_nobody_the_network() -> None:
    library = ROOT / "safe_rope"
    reading = {str(file.relative_to(library)) for file in library.rglob("*.py") if imports(file) & PICKLES}
    assert reading == {"_audit/command/process.py", "_audit/command/worker.py"}
    networked = [file.name for file in library.rglob("*.py") if imports(file) & NETWORK]
    assert networked == ["process_guard.py"]  # the host's name, for the report
    text = "".join(file.read_text(encoding="utf-8") for file in library.rglob("*.py"))
    assert "torch.load(" not in text
    assert "trust_remote_code=True" not in text


PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NETWORK = {"socket", "urllib.request", "http.client", "requests", "httpx", "ftplib", "smtplib"}


def test_the_folder_on_pythonpath_holds_the_one_file() -> None:
    from safe_rope.integrations.options import STARTUP

    assert {path.name for path in STARTUP.iterdir()} - {"__pycache__"} == {"sitecustomize.py"}


def test_temporary_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_rope._audit.command import process
    from safe_rope._audit.command.job import Job

    seen = {}

    def look(*arguments: Any, cwd: Path, **options: Any) -> Any:
        seen["folder"] = stat.S_IMODE(cwd.stat().st_mode)
        raise OSError("enough")

    monkeypatch.setattr(process.subprocess, "Popen", look)
    before = os.umask(0)
    try:
        with pytest.raises(OSError, match="enough"):
            process.measure(Job("name", CONFIG, None, "float32"), lambda _: None)
    finally:
        os.umask(before)
    assert seen == {"folder": 0o700}


def test_the_page_names_what_a_child_inherits(tmp_path: Path) -> None:
    from safe_rope.integrations.options import Options

    given = Options(report=str(tmp_path / "report"), run="1").environment({})
    assert all(f"`{name}`" in PAGE for name in given)
