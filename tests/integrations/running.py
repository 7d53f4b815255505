"""What a run needs: the command, and a DeepSpeed config as people have them."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 100_000,
        "stage3_prefetch_bucket_size": 100_000,
        "stage3_param_persistence_threshold": 0,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

SAFE_ROPE = (sys.executable, "-c", "from safe_rope.cli.main import main; main()")
"""The command `safe-rope` of the code that is tested, installed or not."""
