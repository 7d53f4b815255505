"""Private names of torch: in one file, and a torch without one of them is refused by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import safe_rope

ROOT = Path(safe_rope.__file__).parent
ELSEWHERE = {"scan"}  # it reads source code, and never imports torch


def private_names(path: Path) -> Iterator[str]:
    """Yield each private name of torch that the file mentions, dotted."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            private = any(part.startswith("_") and not part.endswith("__") for part in rest)
            if (first == "torch" and private) or rest[-1:] == ["_cdata"]:
                yield name


def test_private_names_stand_in_one_file() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(set(private_names(path)))
        for path in ROOT.rglob("*.py")
        if path.name != "torch_private.py" and path.relative_to(ROOT).parts[0] not in ELSEWHERE
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("owner", "name"),
    [("torch.utils._device", "_device_constructors"), ("torch.library", "custom_op")],
)
def test_a_torch_that_lacks_a_name_is_refused_with_its_version(owner: str, name: str) -> None:
    code = f"""
import importlib, torch
delattr(importlib.import_module({owner!r}), {name!r})
import safe_rope

try:
    import safe_rope.tables
except safe_rope.IncompatibleVersionError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert f"torch {torch.__version__} lacks" in run.stdout, run.stderr
    assert "install torch 2.4 or newer" in run.stdout
    assert name in run.stdout
