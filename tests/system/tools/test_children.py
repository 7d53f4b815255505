"""What the tools start ends when it should, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _process import end_running, run
from laboratory.forked import in_child, one_rank
from laboratory.ranks import own_port

pytestmark = pytest.mark.fresh

SHARED_MEMORY = Path("/dev/shm")
RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")


def buffer(port: int | str) -> Path:
    """What DeepSpeed calls the file of a group's first rank."""
    return SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_0"


def test_only_what_appeared_for_the_port_is_removed() -> None:
    with own_port() as other:
        buffer(other).touch()
        with own_port() as port:
            assert port != other
            buffer(port).touch()
        assert not buffer(port).exists()
        assert buffer(other).exists(), "it belongs to another group"
    assert not buffer(other).exists()


@pytest.mark.slow
def test_a_forked_childs_shared_memory_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "")  # what one_rank sets is put back with them

    def work() -> dict[str, Any]:
        return {"port": os.environ["MASTER_PORT"], "made": buffer(os.environ["MASTER_PORT"]).exists()}

    one_rank()
    found = in_child(work, 300, 1 << 40)
    assert found["made"], "DeepSpeed calls its file otherwise"
    assert not buffer(found["port"]).exists()


def test_what_a_forked_child_has_started_ends_with_it(tmp_path: Path) -> None:
    """It gets the time to end it: its own ports are given back, its folders removed."""
    note = tmp_path / "left"
    importlib.import_module("torch")  # so that the child, which needs it, begins at once

    def work() -> dict[str, Any]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            time.sleep(600)
        finally:
            note.touch()
        return {}

    found = in_child(work, 3.0, 1 << 40, distributed=False)
    assert found["status"] == "timeout"
    assert note.exists()


def test_a_program_that_runs_too_long_is_ended() -> None:
    assert run([sys.executable, "-c", "import time; time.sleep(600)"], limit=0.5) == 124


def test_a_program_that_is_ended_can_end_its_own_children(tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    program = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
try:
    print(child.pid, file=open({str(note)!r}, "w"), flush=True)
    time.sleep(600)
finally:
    child.kill()
    child.wait()
"""
    with ThreadPoolExecutor() as pool:
        status = pool.submit(run, [sys.executable, "-c", program], limit=120)
        while not (note.exists() and note.read_text().endswith("\n")):
            assert not status.done()
            time.sleep(0.05)
        end_running()
        assert status.result() == 3
    done = subprocess.run(["ps", "-p", note.read_text().strip()], capture_output=True)
    assert done.returncode == 1, "the grandchild still runs"
