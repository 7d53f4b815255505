"""What the guard adds to ``from_pretrained`` of a 24-layer model: a process's first load, and later ones.

First loads are each a fork of a process that has everything imported; later ones take turns in one fork.
Loads without the guard are taken twice, as a control of how much the figures mean. Time is the process's own.
The library has its bytecode, as pip leaves it, and a first load imports the modules of the guard.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import safe_rope_patches
import torch
from _process import ToolError
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope
from laboratory.bench.timing import Row
from laboratory.forked import in_child

TARGET = 1.02
FIRST = 7
LATER = 15
FORK_LIMIT = 1800.0
FORK_MEMORY = 1 << 40
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32_000, "num_hidden_layers": 24}
DTYPES = {"as it is": torch.bfloat16, "to FP32": torch.float32}

Context = Callable[[], AbstractContextManager[Any]]
CONTEXTS: list[Context] = [contextlib.nullcontext, safe_rope.guard, contextlib.nullcontext]


def measure(device: str) -> list[Row]:
    """Return rows for each dtype: with the guard against without, and without against itself."""
    if device != "cpu":
        return []
    rows = []
    for package in (safe_rope, safe_rope_patches):
        compileall.compile_dir(Path(str(package.__file__)).parent, quiet=2)
    with tempfile.TemporaryDirectory() as folder:
        model: Any = LlamaForCausalLM(
            LlamaConfig(num_attention_heads=16, num_key_value_heads=16, **SHAPE)  # type: ignore[arg-type]
        )
        size = sum(parameter.numel() for parameter in model.parameters()) // 10**6
        model.to(torch.bfloat16).save_pretrained(folder)
        del model
        _in_fork(partial(_turns, folder, torch.bfloat16, 1))  # the file is in the page cache from here on
        for what, dtype in DTYPES.items():
            first = [_in_fork(partial(_turns, folder, dtype, 1, [c])) for _ in range(FIRST) for c in CONTEXTS]
            stocks, guards, controls = ([t[0][0] for t in first[i::3]] for i in range(3))
            later = _in_fork(partial(_turns, folder, dtype, 1 + LATER))
            for when, (stock, guarded, again) in (
                ("first", (stocks, guards, controls)),
                ("later", [times[1:] for times in later]),
            ):
                for name, times, target in (("guard", guarded, TARGET), ("no guard, again", again, None)):
                    ratio = statistics.median(a / b for a, b in zip(times, stock, strict=True))
                    name = f"{size}M in BF16, {what}, {when} load, {name} (median of pairs {ratio:.3f})"
                    ours, other = statistics.median(times), statistics.median(stock)
                    rows.append(Row(name, "from_pretrained", ours, other, target))
    return rows


def _turns(
    folder: str, dtype: torch.dtype, rounds: int, contexts: list[Context] = CONTEXTS
) -> list[list[float]]:
    """Load ``rounds`` times in each context, in turns; return each one's seconds of CPU time."""
    times: list[list[float]] = [[] for _ in contexts]
    gc.collect()  # a full collection takes 200 ms with transformers, and who allocates next would pay it
    for turn in range(rounds):
        for offset in range(len(contexts)):
            index = (turn + offset) % len(contexts)
            start = time.process_time()
            with contexts[index]():
                model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=dtype)
            times[index].append(time.process_time() - start)
            del model
            gc.collect()
    return times


def _in_fork(work: Callable[[], list[list[float]]]) -> list[list[float]]:
    """Return what ``work`` does in a fork of this process.

    Raises:
        ToolError: it failed there.

    """
    found = in_child(lambda: {"seconds": work()}, FORK_LIMIT, FORK_MEMORY, distributed=False)
    if "seconds" not in found:
        raise ToolError(f"a load failed: {found['reason']}")
    return found["seconds"]  # type: ignore[no-any-return]
