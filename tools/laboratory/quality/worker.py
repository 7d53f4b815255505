"""One part of the experiment of tools/lab quality, in a process of its own.

Usage: python -m laboratory.quality.worker train SEED TABLES|none STRIDE FOLDER
       python -m laboratory.quality.worker load PATH stock|guarded CHECKPOINT STRIDE FOLDER
       python -m laboratory.quality.worker score CHECKPOINT STRIDE FOLDER

``train`` writes FOLDER/checkpoint, ``train`` and ``load`` FOLDER/tables.pt (what the rotary module hands
out), and each FOLDER/result.json. ``score`` evaluates a checkpoint in FP32 with correct tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from laboratory.quality.task import CONTEXT, evaluate, knows_positions, new_model, train, transformers
from laboratory.rotary import cos_sin, rotary_modules

Tables = dict[str, torch.Tensor]


def tables_of(model: Any, stride: int) -> Tables:
    """Return what the model's attention gets: cos and sin, FP32, [2048, head_dim], one row for each place."""
    tables = cos_sin(rotary_modules(model)[0], stride * torch.arange(CONTEXT))
    return {name: table.float().clone() for name, table in zip(("cos", "sin"), tables, strict=True)}


def use_tables(model: Any, tables: Tables, stride: int) -> None:
    """Let the model's attention have these tables, and nothing else of whatever made them."""
    cos, sin = tables["cos"], tables["sin"]
    by_positions = knows_positions(model)
    for module in rotary_modules(model):
        if by_positions:
            module.forward = lambda x, position_ids, **_: (
                cos[position_ids // stride],
                sin[position_ids // stride],
            )
        else:
            module.forward = lambda x, seq_len=None: (cos[:seq_len], sin[:seq_len])


def run_train(seed: str, tables: str, stride: int, folder: Path) -> dict[str, Any]:
    model = new_model(int(seed), stride)
    if not knows_positions(model) and stride != 1:
        raise SystemExit("this transformers knows no positions but those of the places; use a stride of 1")
    if tables != "none":
        use_tables(model, torch.load(tables), stride)
    curve = train(model, int(seed), stride, lambda step: print(step, flush=True))
    torch.save(tables_of(model, stride), folder / "tables.pt")
    result = {"curve": curve, "as_trained": evaluate(model, stride)}
    model.save_pretrained(folder / "checkpoint")
    return result


def run_score(checkpoint: str, stride: int, folder: Path) -> dict[str, Any]:
    return evaluate(transformers.LlamaForCausalLM.from_pretrained(checkpoint), stride)


def run_load(path: str, kind: str, checkpoint: str, stride: int, folder: Path) -> dict[str, Any]:
    import deepspeed

    from laboratory.demo.worker import DEEPSPEED_CONFIG, PATHS, guard_of

    deepspeed.init_distributed("gloo", verbose=False)
    _, load, initializes = PATHS[path]
    model = load(Path(checkpoint), guard_of(kind))
    if initializes:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    result = evaluate(model, stride)
    torch.save(tables_of(model, stride), folder / "tables.pt")
    return result


def main(task: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    run: Any = {"train": run_train, "load": run_load, "score": run_score}[task]
    result = run(*arguments[:-2], int(arguments[-2]), folder)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
