"""One model in four threads gives the bits of one thread, while a fifth builds and drops guarded models."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import families, small_models
from support.covering import in_turn
from torch import nn

import safe_rope

THREADS, ROUNDS = 4, 20
CALLS = 100
"""A round: so often each thread calls a model that nobody has called before. 2,000 calls in all rounds."""
CALLS_OF_ATTENTION = 25
LENGTHS = (3, 7, 12, 20, 8, 31)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Call = Callable[[Any, int], tuple[torch.Tensor, ...]]


def states(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, length, small_models.WIDTH, generator=torch.Generator().manual_seed(length)).to(
        dtype
    )


# ---- one kind of module each: how it is made, and how it is called -------------------------------------


class Frequencies(nn.Module):
    """cos and sin from frequencies of its own, in the dtype of these."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        inv_freq = 1.0 / 1e4 ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        phase = torch.outer(torch.arange(length, device=self.inv_freq.device).float(), self.inv_freq)
        return torch.stack((phase.cos(), phase.sin()))


def llama_rotary() -> nn.Module:
    (module, *_) = families.rotary_modules(families.build("llama")).values()
    return module


def call_llama(module: Any, length: int) -> tuple[torch.Tensor, ...]:
    x = torch.zeros(1, 1, 1, families.HEAD_DIM)
    if "position_ids" in inspect.signature(module.forward).parameters:
        return module(x, torch.arange(length)[None] * 100)
    return module(x, seq_len=length)


def gptj_attention() -> nn.Module:
    """The attention, which holds the table; since transformers 5.24 one module does for all layers."""
    model = small_models.build("gptj").transformer
    return model.rotary_emb if hasattr(model, "rotary_emb") else model.h[0].attn


def call_gptj(module: Any, length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(length)[None]
    if not hasattr(module, "out_proj"):
        return module(states(length, torch.bfloat16), position_ids=ids)
    return (module(states(length, module.out_proj.weight.dtype), position_ids=ids)[0],)


def own() -> nn.Module:
    return small_models.Own(lambda: nn.Linear(small_models.WIDTH, small_models.WIDTH)).positions


def call_table(module: Any, length: int) -> tuple[torch.Tensor, ...]:
    return (module(states(length, module.norm.weight.dtype)),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Call, int]] = {
    "full": (llama_rotary, call_llama, CALLS),
    "pinned frequencies": (Frequencies, lambda module, length: (module(length),), CALLS),
    "pinned finished table": (own, call_table, CALLS),
    "GPT-J attention": (gptj_attention, call_gptj, CALLS_OF_ATTENTION),
}


# ---- threads -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Builder(threading.Thread):
    """Builds and drops guarded models until it is told to stop."""

    def __init__(self, pause: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.pause = pause
        self.stopped = threading.Event()
        self.built = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        makers = (lambda: small_models.build("llama"), gptj_attention, Frequencies)
        try:
            while not self.stopped.wait(self.pause):
                with safe_rope.guard():
                    model = makers[self.built % 3]()
                del model
                if self.built % 8 == 0:
                    gc.collect()
                self.built += 1
        except BaseException as error:
            self.error = error


def guarded(make: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    with safe_rope.guard():
        return nn.Sequential(make()).eval().to(dtype)


def bits(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [getattr(result, "table", result).detach() for result in results]


def wrong_calls(model: Any, call: Call, calls: int, expected: dict[int, list[torch.Tensor]]) -> list[str]:
    """What four threads that call ``model`` all at once get that is not expected."""
    start = threading.Barrier(THREADS)
    found: list[str] = []

    def work(offset: int) -> None:
        start.wait()
        for index in range(calls):
            length = LENGTHS[(index + offset) % len(LENGTHS)]
            try:
                with torch.no_grad():
                    got = bits(call(model[0], length))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                continue
            for result, true in zip(got, expected[length], strict=True):
                if result.dtype != true.dtype:
                    found.append(f"{result.dtype} instead of {true.dtype}")
                elif not torch.equal(result, true):
                    found.append(f"off by {(result.double() - true.double()).abs().max():.1e}")

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), in_turn([(kind,) for kind in KINDS], list(DTYPES)))
def test_four_threads_get_the_bits_of_one(kind: str, dtype: str) -> None:
    make, call, calls = KINDS[kind]
    expected = {}
    for length in LENGTHS:
        alone = guarded(make, DTYPES[dtype])
        with torch.no_grad():
            expected[length] = bits(call(alone[0], length))
    builder = Builder()
    builder.start()
    found: list[str] = []
    try:
        for _ in range(ROUNDS):
            found += wrong_calls(guarded(make, DTYPES[dtype]), call, calls, expected)
    finally:
        builder.stopped.set()
        builder.join(30)
    assert not found, f"{len(found)} of {ROUNDS * THREADS * calls} calls: {sorted(set(found))[:5]}"
    assert builder.error is None
    assert builder.built > 0


@pytest.mark.slow
def test_threads_that_open_guards_and_build_do_not_disturb_each_other() -> None:
    builders = [Builder(pause=0.0) for _ in range(THREADS)]
    for builder in builders:
        builder.start()
    while any(builder.is_alive() and builder.built < 30 for builder in builders):
        builders[0].join(0.05)
    for builder in builders:
        builder.stopped.set()
        builder.join(30)
    assert [repr(builder.error) for builder in builders if builder.error] == []


def test_guards_of_several_threads_end_while_others_are_called() -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            for _ in range(20):
                with safe_rope.guard(), torch.device("meta"):
                    module = Frequencies()
                module.to_empty(device="cpu")
                assert torch.equal(module(600), Frequencies()(600))
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=guarded) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
