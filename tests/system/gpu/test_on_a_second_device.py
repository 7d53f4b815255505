"""What tests ask of a GPU, on a second device that every machine has: in a process of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.children import launch, with_our_modules
from support.devices import ASKED_FOR

HERE = Path(__file__).parent
STYLES = HERE.parent / "zoo" / "test_styles_on_cuda.py"


@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        (HERE / "test_copies.py", ""),
        pytest.param(HERE / "test_longrope.py", "", marks=pytest.mark.slow),
        pytest.param(STYLES, "moved-and-cast or built-there-then-cast", marks=pytest.mark.slow),
        pytest.param(STYLES, "autocast or meta", marks=pytest.mark.slow),
    ],
    ids=["copies", "longrope", "cast", "autocast and meta"],
)
def test_what_a_gpu_is_asked(tests: Path, chosen: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(tests)]
    environment = with_our_modules() | {ASKED_FOR: "1", "DS_ACCELERATOR": "cpu"}
    status, output = launch([*command, "-k", chosen], environment, tmp_path / "log", 500)
    assert status == 0, output[-4000:]
    assert re.search(r"[1-9]\d* passed", output)
    assert "skipped" not in output
