"""What the guard adds to ``from_pretrained`` of a 24-layer model: a process's first load, and later ones.

Every process is a fork of one that has everything imported. Loads with and without the guard take turns;
those without are taken twice, as a control of how much the figures mean. Time is the process's own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from _bench_rope import Row
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope

TARGET = 1.02
ROUNDS = 7
LATER = 3
SHAPES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "373 million parameters": ({"hidden_size": 1024, "intermediate_size": 2816}, torch.bfloat16),
    "76 million parameters, to FP32": ({"hidden_size": 384, "intermediate_size": 1056}, torch.float32),
}


class Times(NamedTuple):
    """Seconds of CPU time of one process: its first load, and the shortest of some more."""

    first: float
    later: float


def measure(device: str) -> list[Row]:
    """Return rows for each shape: with the guard against without, and without against itself."""
    if device != "cpu":
        return []
    rows = []
    for what, (shape, dtype) in SHAPES.items():
        heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32_000}
        with tempfile.TemporaryDirectory() as folder:
            model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=24, **heads, **shape))
            model.to(torch.bfloat16).save_pretrained(folder)
            del model
            stock, guarded, again = _take_turns(
                folder, dtype, [contextlib.nullcontext, safe_rope.guard, contextlib.nullcontext]
            )
        for when in Times._fields:
            for name, times, target in (("guard", guarded, TARGET), ("no guard, again", again, None)):
                ours, other = ([getattr(t, when) for t in ts] for ts in (times, stock))
                ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
                name = f"{what}, {when} load, {name} (median of {ROUNDS} pairs {ratio:.3f})"
                rows.append(Row(name, "from_pretrained", min(ours), min(other), target))
    return rows


def _take_turns(
    folder: str, dtype: torch.dtype, contexts: list[Callable[[], AbstractContextManager[Any]]]
) -> list[list[Times]]:
    times: list[list[Times]] = [[] for _ in contexts]
    for context in contexts:  # the file is in the page cache from here on
        _loads(folder, dtype, context)
    for turn in range(ROUNDS):
        for offset in range(len(contexts)):
            index = (turn + offset) % len(contexts)
            times[index].append(_loads(folder, dtype, contexts[index]))
    return times


def _loads(folder: str, dtype: torch.dtype, context: Callable[[], AbstractContextManager[Any]]) -> Times:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # made anew after a fork: a race, once there are threads
            silence = os.open(os.devnull, os.O_WRONLY)  # no progress bars
            os.dup2(silence, 2)
            times = []
            for _ in range(1 + LATER):
                start = time.process_time()
                with context():
                    LlamaForCausalLM.from_pretrained(folder, torch_dtype=dtype)
                times.append(time.process_time() - start)
            os.write(writer, f"{times[0]} {min(times[1:])}".encode())
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a load failed; see its traceback above")
    return Times(*map(float, text.split()))
