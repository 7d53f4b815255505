"""KeyboardInterrupt and SIGTERM at random moments: everything is put back, and the next guard works.

Half of the moments are places of safe_rope's own code at which Python runs handlers, each as likely as any
other; half are moments in time, whose signal another process sends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

import safe_rope
from laboratory.soak.injection import Injection
from laboratory.soak.surroundings import Unchanged
from laboratory.soak.trial import Trial

# Of tests, on the path that the command gives.
zero_init: Any = importlib.import_module("support.zero_init").zero_init
set_aside: Any = importlib.import_module("support.one_rank").set_aside

TRIES = 250
"""For each way of interrupting."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SENDER = """
import os, sys, time
for line in sys.stdin:
    number, seconds = line.split()
    time.sleep(float(seconds))
    os.kill(os.getppid(), int(number))
    print("sent", flush=True)
"""


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=None,
    )


def llama() -> Any:
    model: Any = transformers.LlamaForCausalLM(config())
    return model.train(False)


class Scenes:
    """What is interrupted: each a call that builds what it needs and keeps nothing."""

    def __init__(self, folder: str) -> None:
        llama().save_pretrained(folder)
        self.folder = folder
        self.model = llama()  # exists before, and is used again and again

    def entering_and_leaving(self) -> None:
        with safe_rope.guard(tables="fp32"), safe_rope.guard():
            pass

    def building(self) -> None:
        with safe_rope.guard():
            llama()

    def building_inside_zero_init(self) -> None:
        inits[:] = [zero_init()]
        with safe_rope.guard(), inits[0]:
            llama()

    def from_pretrained(self) -> None:
        with safe_rope.guard():
            transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)

    def auditing(self) -> None:
        safe_rope.audit(self.model)

    def protecting(self) -> None:
        safe_rope.protect(llama())

    def calling(self) -> None:
        with safe_rope.guard():
            model = llama().to(torch.bfloat16)
        with torch.no_grad():
            model(torch.arange(12)[None])

    def all(self) -> dict[str, Callable[[], None]]:
        names = [name for name in vars(type(self)) if name[0] != "_" and name != "all"]
        return {name.replace("_", " "): getattr(self, name) for name in names}


class Handler:
    """Raises as a training script's handlers do, while there is somebody to catch it."""

    live = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.live:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


handler = Handler()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Handlers as a training script has them; what a callback swallows is not printed."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    for number in SIGNALS:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, theirs in before.items():
            signal.signal(number, theirs)
        sys.unraisablehook = hook


inits: list[Any] = []
"""The zero.Init that was entered last."""


def close_zero_init() -> None:
    """End a zero.Init whose own ``__enter__`` or ``__exit__`` was interrupted: DeepSpeed does not."""
    from deepspeed.runtime.zero import partition_parameters

    entered = inits and torch.tensor is not torch._C._VariableFunctions.tensor
    if entered or partition_parameters.zero_init_context:
        inits[0].patched = True
        inits[0].unpatch_init_and_builtins()
        partition_parameters.zero_init_context = 0
        partition_parameters.top_level_context = None


def interrupted(work: Callable[[], Any]) -> None:
    try:
        handler.live = True
        work()
        handler.live = False
    except (KeyboardInterrupt, SystemExit):
        handler.live = False


def next_guard_works(thorough: bool) -> None:
    with safe_rope.guard(strict=True), zero_init() if thorough else contextlib.nullcontext():
        model = llama()
    inv_freq = model.model.rotary_emb.inv_freq
    true = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert inv_freq.dtype == torch.float32
    assert (inv_freq.double() / true - 1).abs().max() < 1e-6
    assert all(p.dtype == (torch.bfloat16 if thorough else torch.float32) for p in model.parameters())


def check(before: Unchanged, thorough: bool) -> None:
    close_zero_init()
    gc.collect()
    before.check()
    next_guard_works(thorough)
    gc.collect()
    before.check()


def run(trial: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder, quiet():
        scenes = Scenes(folder).all()
        for work in scenes.values():
            work()
            close_zero_init()
        next_guard_works(True)
        set_aside()
        before = Unchanged()
        before.check()
        injected(trial, scenes, before)
        timed(trial, scenes, before)


def injected(trial: Trial, scenes: dict[str, Callable[[], None]], before: Unchanged) -> None:
    points: dict[str, list[list[int]]] = {}
    for name, work in scenes.items():
        counting = Injection()
        counting.run(work)
        points[name] = list(counting.places.values())
        trial.measured[f"places, {name}"] = len(points[name])
    for number in range(trial.count(TRIES)):
        name = list(scenes)[number % len(scenes)]
        sent = SIGNALS[number // len(scenes) % 2]
        place = trial.random.choice(points[name])
        injection = Injection(trial.random.choice(place), sent)
        with trial.of(f"{name}: at a point", _Place(injection, sent)):
            interrupted(lambda: injection.run(scenes[name]))  # noqa: B023
            check(before, thorough=number % 10 == 0)


class _Place:
    def __init__(self, injection: Injection, sent: signal.Signals) -> None:
        self.injection, self.sent = injection, sent

    def __str__(self) -> str:
        return f"{self.sent.name} at {self.injection.where} (point {self.injection.at})"


def timed(trial: Trial, scenes: dict[str, Callable[[], None]], before: Unchanged) -> None:
    # Inside DeepSpeed's own code an interrupt leaves behind what it leaves without a guard.
    scenes = {name: work for name, work in scenes.items() if "zero" not in name}
    seconds = {}
    for name, work in scenes.items():
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        for number in range(trial.count(TRIES)):
            name = list(scenes)[number % len(scenes)]
            sent = SIGNALS[number // len(scenes) % 2]
            after = trial.random.uniform(0, seconds[name])
            with trial.of(f"{name}: after a time", f"{sent.name} after {after:.6f} s"):
                print(int(sent), after, file=sender.stdin, flush=True)
                interrupted(scenes[name])
                sender.stdout.readline()
                check(before, thorough=number % 10 == 0)
        sender.stdin.close()
