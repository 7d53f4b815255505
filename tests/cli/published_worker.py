"""Measures one published config after the other, as the process of `safe-rope audit` does each.

Run as ``python published_worker.py FOLDER CONFIG [...]``; prints a JSON line for each: the report, or the
error. Importing torch and transformers takes most of the time of an audit, and is done once here.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from safe_rope._audit.command import worker
from safe_rope._audit.command.job import Job, choose_dtype, load_model_config
from safe_rope.errors import SafeRopeError


def audited(file: Path, folder: Path) -> dict[str, Any]:
    """Return the report of the config in ``file``."""
    model = load_model_config(str(file))
    job = Job(name=file.stem, model=model, deepspeed=None, dtype=choose_dtype(None, model, None))
    folder.mkdir()
    try:
        return worker._audit(job, folder, io.BytesIO()).to_dict()
    except SafeRopeError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    os.dup2(os.pipe()[0], 0)  # an audit gives up when its stdin ends
    for name in sys.argv[2:]:
        file = Path(name)
        print(json.dumps({"config": file.stem, **audited(file, Path(sys.argv[1]) / file.stem)}), flush=True)
