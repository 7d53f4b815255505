"""One part in a process of its own. Usage: python -m laboratory.soak.worker PART SEED SCALE RESULT."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

from laboratory.soak.trial import Trial


def main(part: str, seed: str, scale: str, result: str) -> None:
    started = time.monotonic()
    if seconds := os.environ.get("SECONDS_TO_DUMP"):
        faulthandler.dump_traceback_later(float(seconds))
    warnings.simplefilter("ignore")
    trial = Trial(int(seed), float(scale))
    importlib.import_module(f"laboratory.soak.{part}").run(trial)
    found = trial.result() | {"seconds": round(time.monotonic() - started)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
