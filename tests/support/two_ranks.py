"""Run a worker script on two ranks over gloo, with a time limit, and read what each rank wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _process import free_port

from support.children import with_our_modules

TESTS = Path(__file__).parents[1]
RANKS = 2


def run(script: str, arguments: list[str], folder: Path, seconds: float) -> list[Any]:
    """Return what each rank wrote to the result file that is its first argument.

    Args:
        script: its path in tests/; the folders of ``sys.path`` are its too.
        arguments: more of its arguments.
        folder: where the results and the logs go.
        seconds: the time limit.

    Raises:
        AssertionError: a rank failed or ran past the limit; the message holds the end of both logs.

    """
    surroundings = with_our_modules() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "SECONDS_TO_DUMP": str(seconds - 10),  # where a rank hangs, its log says in which line
    }
    results = [folder / f"{rank}.json" for rank in range(RANKS)]
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    ranks: list[subprocess.Popen[bytes]] = []
    late = False
    try:
        for rank in range(RANKS):
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(TESTS / script), str(results[rank]), *arguments]
            with logs[rank].open("wb") as log:
                ranks.append(
                    subprocess.Popen(command, env=surroundings | ids, stdout=log, stderr=subprocess.STDOUT)
                )
        for process in ranks:
            process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    ends = "\n".join(f"rank {r}:\n" + log.read_text(errors="replace")[-3000:] for r, log in enumerate(logs))
    assert not late, f"not done in {seconds} s\n{ends}"
    assert [process.returncode for process in ranks] == [0] * RANKS, ends
    return [json.loads(result.read_text(encoding="utf-8")) for result in results]
