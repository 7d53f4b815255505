"""What a process that `two_ranks` starts does before its work."""

from __future__ import annotations

import faulthandler
import os
import warnings

from support.one_rank import set_aside


def join() -> None:
    """Join the process group; say where this rank hangs, should it run past its time."""
    import deepspeed

    faulthandler.dump_traceback_later(float(os.environ["SECONDS_TO_DUMP"]))
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    set_aside()
