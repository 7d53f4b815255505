"""Gradients and losses of an engine are those of DDP with torch.autocast, at every ZeRO stage.

One pair of processes trains every case, one engine after the other, which also shows that an engine leaves
nothing behind for the next one. A wrong cast shows in the first step, so every day three steps are trained
of the models that differ in kind. ``--all`` trains ten steps of every model, and with SAFE_ROPE_FULL_GRID=1
every combination of the settings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import two_ranks

STAGES_AGREE = 1e-5  # ZeRO 2 with ZeRO 3, relative, in the first step

MODELS = {"dense": ("llama", "llama tied", "gpt2"), "experts": ("mixtral eager", "mixtral batched")}
EVERY_DAY = [
    ("llama", "bfloat16"),
    ("llama tied", "bfloat16"),
    ("mixtral eager", "bfloat16"),
    ("llama", "float16"),
]
WHOLE_GRID = bool(os.environ.get("SAFE_ROPE_FULL_GRID"))
LIMIT = 3600 if WHOLE_GRID else 1200  # seconds


def every_pair() -> dict[str, list[tuple[str, str]]]:
    """Models and dtypes that a pair of processes trains: all in one, but of the whole grid."""
    groups = {
        f"{kind}-{dtype}": [(model, dtype) for model in models]
        for kind, models in MODELS.items()
        for dtype in ("bfloat16", "float16")
    }
    return groups if WHOLE_GRID else {"all": [pair for group in groups.values() for pair in group]}


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_steps_equal_ddp_with_autocast(tmp_path: Path, has_autocast: bool) -> None:
    assert_training_equals_ddp("covering", 3, EVERY_DAY, tmp_path, has_autocast)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize("pairs", [pytest.param(pairs, id=name) for name, pairs in every_pair().items()])
def test_ten_steps_equal_ddp_with_autocast(
    pairs: list[tuple[str, str]], tmp_path: Path, has_autocast: bool
) -> None:
    assert_training_equals_ddp("grid" if WHOLE_GRID else "covering", 10, pairs, tmp_path, has_autocast)


def assert_training_equals_ddp(
    which: str, steps: int, pairs: list[tuple[str, str]], folder: Path, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    arguments = [f"{which}:{steps}", *(word for pair in pairs for word in pair)]
    seen, other = two_ranks.run("autocast/parity_worker.py", arguments, folder, LIMIT)
    wrong = [f"{one['case']}: {said}" for one in seen for said in one["deviations"]]
    assert not wrong, "\n".join(wrong)
    trained = [one for one in seen if "refused" not in one]
    for dtype in {dtype for _, dtype in pairs}:
        assert {one["stage"] for one in trained if one["dtype"] == dtype} >= {2, 3}
    assert [one.get("scales") for one in seen] == [one.get("scales") for one in other]
    assert not (wrong := disagreements(trained)), wrong


def disagreements(seen: list[dict[str, Any]]) -> list[str]:
    """Where ZeRO 2 and ZeRO 3 differ in the first step of the same training."""
    said = []
    for two in (one for one in seen if one["stage"] == 2 and not one["reduce"]):
        for three in (one for one in seen if one["stage"] == 3 and not one["reduce"]):
            if signature(two) == signature(three):
                for a, b in zip(two["first"], three["first"], strict=True):
                    if not abs(a / b - 1) <= STAGES_AGREE:
                        said.append(f"{two['case']} {a}, {three['case']} {b}")
    return said


def signature(one: dict[str, Any]) -> list[str]:
    """Model, dtype and accumulation: clipping and buffers do not change the first loss and norm."""
    words: list[str] = one["case"].split(", ")
    return [*words[:2], words[3]]
