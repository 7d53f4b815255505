"""One rank of `test_audit_wrapped`: shard a model in both forms of FSDP, audit it after a forward.

Run as ``python sharded_worker.py RESULT_FILE`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(result: Path) -> None:
    import torch
    from rotary_models import build
    from torch.distributed import fsdp

    import safe_rope

    torch.distributed.init_process_group("gloo")
    precision = fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    seen: dict[str, Any] = {"ok": {}}
    for kind in ("stock", "guarded"):
        model = build(layers=1)
        whole = sum(p.numel() for p in model.parameters())
        if kind == "guarded":
            safe_rope.protect(model)
        cpu = torch.device("cpu")
        sharded = fsdp.FullyShardedDataParallel(model, mixed_precision=precision, device_id=cpu)
        seen["share"] = sum(p.numel() for p in sharded.parameters()) / whole
        with torch.no_grad():
            sharded(input_ids=torch.arange(8)[None], use_cache=False)
        seen["ok"][f"fsdp {kind}"] = safe_rope.audit(sharded).ok
    model = build(layers=1)
    fsdp.fully_shard(model)
    seen["ok"]["fully_shard stock"] = safe_rope.audit(model).ok
    result.write_text(json.dumps(seen), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
