"""One rank of `test_two_ranks`: every part that it is asked for, one after the other, as JSON.

Run as ``python ranks_worker.py RESULT_FILE PARTS`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
PARTS is JSON: for each module beside this one the arguments of its ``run``. One process builds every engine,
one after the other, which also shows that an engine leaves nothing behind for the next one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from rank import join


def main(result: Path, parts: dict[str, dict[str, Any]]) -> None:
    join()
    seen: dict[str, Any] = {}
    for name, arguments in parts.items():
        started = time.process_time()
        seen[name] = importlib.import_module(name).run(**arguments)
        print(f"{name}: {time.process_time() - started:.1f} s", flush=True)
    result.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
