"""Sequences of what people do with guards, zero.Init, foreign replacements and models, as tests/system."""

from __future__ import annotations

import importlib
from typing import Any

import hypothesis

from laboratory.soak.trial import Trial

SEQUENCES, BATCH = 2_000, 50


def run(trial: Trial) -> None:
    test: Any = importlib.import_module("system.soak.test_orders")
    for number in range(trial.count(SEQUENCES // BATCH)):
        seed = trial.random.getrandbits(32)
        hypothesis.seed(seed)(test.Orders)
        with trial.of("sequences", f"batch {number}, hypothesis seed {seed}"):
            test.run_sequences(BATCH)
            trial.passed("sequences", BATCH - 1)
