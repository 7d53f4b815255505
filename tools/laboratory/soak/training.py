"""Save and resume on two ranks at ZeRO 1, 2 and 3: with the guard, without, from one to the other."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from laboratory.ranks import run_ranks
from laboratory.soak.trial import Trial

LIMIT = 3000.0


def run(trial: Trial) -> None:
    importlib.import_module("deepspeed")
    with tempfile.TemporaryDirectory() as folder:
        worker: list[str | Path] = ["-m", "laboratory.soak.training_rank", str(trial.seed), str(trial.scale)]

        def command(rank: int) -> list[str | Path]:
            return [*worker, folder]

        run_ranks(command, ranks=2, limit=LIMIT)
        found: list[dict[str, Any]] = [
            json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)
        ]
    # Both ranks do the same; what one of them saw fail has failed.
    trial.kinds = {
        kind: max((seen["kinds"][kind] for seen in found), key=lambda entry: int(entry["failed"]))
        for kind in found[0]["kinds"]
    }
