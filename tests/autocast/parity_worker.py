"""One rank of `test_parity`: train every case, say how far each is from the reference, as JSON.

Run as ``python parity_worker.py RESULT_FILE WHICH MODEL DTYPE [...]`` with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set; WHICH is covering or grid, ten steps of each, or covering:3 for three steps. One process
trains every case, engine after engine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from rank import join


def main(result: Path, which: str, pairs: list[tuple[str, str]]) -> None:
    import parity
    import tiny_models
    import torch

    from safe_rope.errors import ConfigError

    which, _, steps = which.partition(":")
    parity.STEPS = int(steps or parity.STEPS)
    join()
    seen: list[dict[str, Any]] = []
    for model, dtype in (pair for pair in pairs if pair[0] in tiny_models.MODELS):
        references: dict[Any, parity.Run] = {}
        for case in getattr(parity, which)(model, dtype):
            started = time.monotonic()
            key = case.accumulation, case.clip, case.weights, case.weights == "low" and case.stage > 0
            if key not in references:
                references[key] = parity.reference(case)
            one: dict[str, Any] = {
                "case": case.name,
                "dtype": dtype,
                "stage": case.stage,
                "reduce": case.reduce,
                "deviations": [],
            }
            try:
                one |= parity.compare(parity.train(case), references[key])
            except ConfigError as error:
                one["refused"] = str(error)
                one["deviations"] = [] if "DeepSpeed" in str(error) else [str(error)]
            else:
                one["deviations"] = parity.deviations(one, case)
            one["seconds"] = time.monotonic() - started
            seen.append(one)
            gc.collect()
            if torch.distributed.get_rank() == 0:
                result.write_text(json.dumps(seen), encoding="utf-8")
    result.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    arguments = sys.argv[3:]
    main(Path(sys.argv[1]), sys.argv[2], list(zip(arguments[::2], arguments[1::2], strict=True)))
