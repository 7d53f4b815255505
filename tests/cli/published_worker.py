"""Measures one published config after the other, as the process of `safe-rope audit` does each.

Run as ``python published_worker.py FOLDER DEEPSPEED CONFIG [...]``, with "-" for no DeepSpeed config; prints
a JSON line for each: the report, or the error; under DeepSpeed with what the survey's own comparison finds
lost. Importing torch and transformers takes most of the time of an audit, and is done once here.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safe_rope._audit.command import worker
from safe_rope._audit.command.job import Job, choose_dtype, load_deepspeed_config, load_model_config
from safe_rope.errors import SafeRopeError


def audited(file: Path, deepspeed: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return the report of the config in ``file``."""
    model = load_model_config(str(file))
    dtype = choose_dtype(None, model, deepspeed)
    job = Job(name=file.stem, model=model, deepspeed=deepspeed, dtype=dtype)
    folder.mkdir()
    try:
        report = worker._audit(job, folder, io.BytesIO()).to_dict()
    except SafeRopeError as error:
        return {"error": str(error)}
    if deepspeed is None:
        return report
    paths = list(dict.fromkeys(entry["path"] for entry in report["paths"]))
    return report | {"lost": lost(job, folder / "again", paths)}


def lost(job: Job, folder: Path, paths: list[str]) -> dict[str, dict[str, str]]:
    """Return what of the stock model's tables is lost on each load path, told without the audit."""
    from safe_rope._audit.command.paths import Material

    material = Material.prepare(job, folder)
    found = {}
    for path in paths:
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_send_lost, args=(sender, material, path))
        process.start()
        sender.close()
        found[path] = receiver.recv()
        process.join()
    return found


def _send_lost(sender: Connection, material: Any, path: str) -> None:
    import torch
    from laboratory.zoo.tables import damage, forward_tables, position_tables, stored

    from safe_rope._audit.command.paths import implied, start_deepspeed

    torch.set_num_threads(1)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(material.skeleton.build())
    tables = position_tables(*made) | forward_tables(made[0])
    if material.deepspeed is not None:
        start_deepspeed()
    *_, (_, model) = implied(material)[path](material)
    model = getattr(model, "module", model)
    actual = stored(model) | {p: t.values for p, t in forward_tables(model, every_form=True).items()}
    sender.send(damage(tables, actual))


if __name__ == "__main__":
    os.dup2(os.pipe()[0], 0)  # an audit gives up when its stdin ends
    config = None if sys.argv[2] == "-" else load_deepspeed_config(sys.argv[2])
    for name in sys.argv[3:]:
        file = Path(name)
        report = audited(file, config, Path(sys.argv[1]) / file.stem)
        print(json.dumps({"config": file.stem, **report}), flush=True)
