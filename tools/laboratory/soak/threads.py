"""Several threads at once: each guard protects what its thread builds, and a compiled model stays right."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch

import safe_rope
from laboratory.soak.interrupts import llama, next_guard_works, set_aside
from laboratory.soak.surroundings import Unchanged
from laboratory.soak.trial import Trial

families: Any = importlib.import_module("support.families")

PAIRS, COMPILED, LIMIT = 300, 20, 120.0
LENGTH = 40


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """Run each in a thread, all of them begun together; return what they return, or raise what one raised."""
    barrier, found, errors = threading.Barrier(len(work)), [None] * len(work), list[BaseException]()

    def run(number: int) -> None:
        try:
            barrier.wait(LIMIT)
            found[number] = work[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), f"a thread has not ended after {LIMIT:.0f} s"
    if errors:
        raise errors[0]
    return found


def tables_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from safe_rope.rotation import plain

    cos, sin = model.model.rotary_emb(torch.zeros(1, 1), torch.arange(LENGTH)[None])
    return plain(cos), plain(sin)


def guarded(tables: Any) -> Any:
    with safe_rope.guard(tables=tables) as session:
        model = llama().to(torch.bfloat16)
        model(torch.arange(9)[None])
    assert session.report.tables == tables
    assert len(session.report.protected) == 1, str(session.report)
    assert not session.report.unprotected
    return model


def run(trial: Trial) -> None:
    stock = tables_of(llama())
    phase = torch.arange(LENGTH, dtype=torch.float64)[:, None] * 1e4 ** (
        -torch.arange(0, 16, 2).double() / 16
    )
    true = torch.cat((phase, phase), -1)[None]
    guarded("exact"), guarded("fp32")
    next_guard_works(True)
    set_aside()
    before = Unchanged()
    for number in range(trial.count(PAIRS)):
        with trial.of("two guards with different options", number):
            exact, fp32 = at_once(lambda: guarded("exact"), lambda: guarded("fp32"))
            assert all(torch.equal(one, other) for one, other in zip(tables_of(fp32), stock, strict=True))
            # inv_freq is the checkpoint's, in FP32: a phase is off by its rounding at most.
            assert (tables_of(exact)[0].double() - true.cos()).abs().max() < LENGTH * 2**-24
            del exact, fp32
            before.check()
    for number in range(trial.count(COMPILED)):
        with trial.of("compiled in one thread, built in another", number):
            compiled(number)
            torch.compiler.reset()


def compiled(number: int) -> None:
    ids = torch.randint(3, 31, (1, 12 + number % 5), generator=torch.Generator().manual_seed(number))
    with safe_rope.guard():
        model = llama()

    def compile_and_call() -> torch.Tensor:
        with torch.no_grad():
            faster: Any = torch.compile(model, backend="eager")
            result: torch.Tensor = faster(ids).logits
        return result

    def build() -> Any:
        return [guarded("fp32") for _ in range(5)]

    with torch.no_grad():
        wanted = model(ids).logits
    got, built = at_once(compile_and_call, build)
    assert torch.allclose(got, wanted, atol=1e-5), f"off by {(got - wanted).abs().max()}"
    assert len(built) == 5
    next_guard_works(False)
