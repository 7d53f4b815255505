"""One part of the experiment of _quality.py, in a process of its own.

Usage: _quality_worker.py train SEED TABLES|none FOLDER
       _quality_worker.py load PATH stock|guarded CHECKPOINT FOLDER
       _quality_worker.py score CHECKPOINT FOLDER

``train`` writes FOLDER/checkpoint, ``train`` and ``load`` FOLDER/tables.pt (what the rotary module hands
out), and each FOLDER/result.json. ``score`` evaluates a checkpoint in FP32 with right tables.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _quality_task import CONTEXT, evaluate, gap_of, new_model, train, transformers

Tables = dict[str, torch.Tensor]


def rotary_modules(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]


def by_length(module: Any) -> bool:
    return "seq_len" in inspect.signature(module.forward).parameters


@torch.no_grad()
def tables_of(model: Any) -> Tables:
    """Return what the model's attention gets: cos and sin, FP32, [4096, head_dim].

    The rows are the first 2,048 positions, and those after the gap.
    """
    module, x, gap = rotary_modules(model)[0], torch.zeros(1, 1, CONTEXT, 128), gap_of(model)
    if by_length(module):
        tables = [table.reshape(CONTEXT, -1).repeat(2, 1) for table in module(x, seq_len=CONTEXT)]
    else:
        positions = torch.cat([torch.arange(CONTEXT), gap + torch.arange(CONTEXT)])
        tables = [table.reshape(2 * CONTEXT, -1) for table in module(x, positions.unsqueeze(0))]
    cos, sin = (getattr(table, "table", table).float().clone() for table in tables)
    return {"cos": cos, "sin": sin}


def use_tables(model: Any, tables: Tables) -> None:
    """Let the model's attention have these tables, and nothing else of whatever made them."""
    cos, sin = tables["cos"], tables["sin"]
    gap = gap_of(model)

    def by_position(
        x: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = position_ids - (gap - CONTEXT) * (position_ids >= gap)
        return cos[rows], sin[rows]

    for module in rotary_modules(model):
        if by_length(module):
            module.forward = lambda x, seq_len=None: (cos[:seq_len], sin[:seq_len])
        else:
            module.forward = by_position


def run_train(seed: str, tables: str, folder: Path) -> dict[str, Any]:
    model = new_model(int(seed))
    gap = gap_of(model)
    if tables != "none":
        use_tables(model, torch.load(tables))
    curve = train(model, int(seed), lambda step: print(step, flush=True))
    torch.save(tables_of(model), folder / "tables.pt")
    result = {"curve": curve, "as_trained": evaluate(model, gap)}
    model.save_pretrained(folder / "checkpoint")
    return result


def run_score(checkpoint: str, folder: Path) -> dict[str, Any]:
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    return evaluate(model, gap_of(model))


def run_load(path: str, kind: str, checkpoint: str, folder: Path) -> dict[str, Any]:
    import deepspeed
    from _demo_worker import DEEPSPEED_CONFIG, PATHS

    guard: Any = contextlib.nullcontext
    if kind == "guarded":
        import safe_rope

        guard = safe_rope.guard
    deepspeed.init_distributed("gloo", verbose=False)
    _, load, initializes = PATHS[path]
    model = load(Path(checkpoint), guard)
    gap = gap_of(model)
    if initializes:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    result = evaluate(model, gap)
    torch.save(tables_of(model), folder / "tables.pt")
    return result


def main(task: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    run: Any = {"train": run_train, "load": run_load, "score": run_score}[task]
    result = run(*arguments[:-1], folder)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
