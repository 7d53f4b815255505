"""What the guard adds to ``from_pretrained`` of a 24-layer model, each load the first of its process.

Every load runs in a fork of a process that has everything imported, so that what the library makes once per
process counts each time. Loads with and without the guard take turns; those without are taken twice, as a
control of how much the figures mean.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from _bench_rope import Row
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope

TARGET = 1.02
ROUNDS = 15
SHAPES: dict[str, dict[str, Any]] = {
    "24 layers, 373 million parameters": {"hidden_size": 1024, "intermediate_size": 2816},
    "24 layers, 76 million parameters": {"hidden_size": 384, "intermediate_size": 1056},
}


def measure(device: str) -> list[Row]:
    """Return two rows for each shape: with the guard against without, and without against itself."""
    if device != "cpu":
        return []
    rows = []
    for what, shape in SHAPES.items():
        config = LlamaConfig(
            num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16, vocab_size=32_000, **shape
        )
        with tempfile.TemporaryDirectory() as folder:
            model: Any = LlamaForCausalLM(config)
            model.to(torch.bfloat16).save_pretrained(folder)
            del model
            stock, guarded, again = _take_turns(
                folder, [contextlib.nullcontext, safe_rope.guard, contextlib.nullcontext]
            )
        for name, times, target in (("the guard", guarded, TARGET), ("no guard, again", again, None)):
            ratio = statistics.median(a / b for a, b in zip(times, stock, strict=True))
            rows.append(
                Row(
                    f"{what}: {name} (median of {ROUNDS} pairs {ratio:.3f})",
                    "from_pretrained in BF16",
                    min(times),
                    min(stock),
                    target,
                )
            )
    return rows


def _take_turns(folder: str, contexts: list[Callable[[], AbstractContextManager[Any]]]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in contexts]
    for context in contexts:  # the file is in the page cache from here on
        _first_load(folder, context)
    for turn in range(ROUNDS):
        for offset in range(len(contexts)):
            index = (turn + offset) % len(contexts)
            times[index].append(_first_load(folder, contexts[index]))
    return times


def _first_load(folder: str, context: Callable[[], AbstractContextManager[Any]]) -> float:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # made anew after a fork: a race, once there are threads
            os.environ["TQDM_DISABLE"] = "1"
            start = time.perf_counter()
            with context():
                LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
            os.write(writer, repr(time.perf_counter() - start).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a load failed; see its traceback above")
    return float(text)
