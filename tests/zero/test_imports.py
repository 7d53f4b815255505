"""The guard may open before deepspeed and transformers are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_rank import free_port

HERE = Path(__file__).parent


@pytest.mark.slow
def test_libraries_imported_inside_the_guard_are_covered_and_left_as_they_were() -> None:
    surroundings = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, str(HERE / "late_imports.py")]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert max(seen["errors"].values()) <= 1.0
    assert seen["left"] == []
    assert seen["replaced"] == []
