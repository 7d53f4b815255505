"""One rank of `test_ranks`: train a ZeRO-3 model under the guard, say what was seen as JSON.

Run as ``python rank_worker.py RESULT_FILE FAMILY`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(result: Path, family: str) -> None:
    import deepspeed
    from support import families
    from support.load_paths import PATHS, train
    from support.one_rank import set_aside

    import safe_rope

    families.model_class(family)  # torch._dynamo, which this imports, cannot be imported inside zero.Init
    deepspeed.init_distributed("gloo")
    set_aside()
    with safe_rope.guard():
        engine = PATHS["zero.Init + initialize"](family, Path())
    losses = train(engine, steps=2)
    truth = families.reference(family)
    errors = [
        families.ulps(families.read_tables(module), truth)
        for module in families.rotary_modules(engine).values()
    ]
    shares = [p.ds_tensor.numel() / p.ds_numel for p in engine.module.parameters()]
    seen = {"losses": losses, "ulps": max(errors), "share": max(shares)}
    result.write_text(json.dumps(seen), encoding="utf-8")
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
