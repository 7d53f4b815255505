"""Two processes, ZeRO-3, bfloat16: every rank has true tables, and the ranks agree."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_rank import free_port

HERE = Path(__file__).parent
SECONDS = 400


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
def test_two_ranks_train_with_true_tables_and_equal_losses(tmp_path: Path) -> None:
    surroundings = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)]),
    }
    results = [tmp_path / f"{rank}.json" for rank in range(2)]
    ranks = []
    try:
        for rank, result in enumerate(results):
            command = [sys.executable, str(HERE / "rank_worker.py"), "llama", str(result)]
            log = (tmp_path / f"{rank}.log").open("wb")
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen(command, env=surroundings | ids, stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()
        for process in ranks:
            process.wait(timeout=SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((tmp_path / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(2))
    assert [process.returncode for process in ranks] == [0, 0], logs
    seen = [json.loads(result.read_text(encoding="utf-8")) for result in results]
    assert all(math.isfinite(loss) for loss in seen[0]["losses"])
    assert seen[0]["losses"] == seen[1]["losses"]
    for one in seen:
        assert one["ulps"] <= 1.0
        assert one["share"] < 1.0  # the parameters really are partitioned
