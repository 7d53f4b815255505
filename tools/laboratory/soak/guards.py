"""Guards opened and closed again and again: memory and the number of objects stay flat."""

from __future__ import annotations

import contextlib
import importlib

import safe_rope
from laboratory.soak.interrupts import llama, set_aside, zero_init
from laboratory.soak.memory import Growth
from laboratory.soak.surroundings import Unchanged
from laboratory.soak.trial import Trial

GUARDS = {"nothing built": 10_000, "a model built": 500, "a model built inside zero.Init": 300}
SAMPLES = 40
MB, OBJECTS = 4.0, 50
"""What the second half may add."""


def run(trial: Trial) -> None:
    importlib.import_module("deepspeed")
    for inside in (False, True):
        once("a model built inside zero.Init" if inside else "a model built")
    set_aside()
    before = Unchanged()
    for kind, usual in GUARDS.items():
        count, growth = trial.count(usual), Growth()
        for number in range(count):
            with trial.of(f"opened and closed, {kind}", number):
                once(kind)
            if number % max(1, count // SAMPLES) == 0:
                growth.sample()
        trial.measured[f"MB more after {count // 2:,} guards, {kind}"] = round(growth.of_bytes(), 2)
        trial.measured[f"objects more after {count // 2:,} guards, {kind}"] = growth.of_objects()
        with trial.of("memory, objects and globals are as before", kind):
            before.check()
            assert growth.of_bytes() < MB, f"{growth.of_bytes():.1f} MB"
            assert growth.of_objects() <= OBJECTS, f"{growth.of_objects()} objects"


def once(kind: str) -> None:
    with safe_rope.guard(), zero_init() if "zero" in kind else contextlib.nullcontext():
        if "model" in kind:
            llama()
