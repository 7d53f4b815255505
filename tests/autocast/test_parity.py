"""Gradients and losses of an engine are those of DDP with torch.autocast, at every ZeRO stage.

One pair of processes trains every case of a model, one engine after the other, which also shows that an
engine leaves nothing behind for the next one. ``-m slow`` with SAFE_ROPE_FULL_GRID=1 runs every combination.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import two_ranks

NORM = 1e-3  # relative, at each of ten steps
LOSS = 5e-4
STAGES_AGREE = 1e-5  # ZeRO 2 with ZeRO 3, relative, in the first step
GRADS = {"bfloat16": 5e-3, "float16": 1e-3}  # relative to the whole gradient's norm: the rounding of the sum

MODELS = ("llama", "llama tied", "gpt2", "mixtral eager", "mixtral batched")


def which() -> str:
    return "grid" if os.environ.get("SAFE_ROPE_FULL_GRID") else "covering"


@pytest.mark.slow
@pytest.mark.timeout(3700 if which() == "grid" else 730)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("models", [MODELS[:3], MODELS[3:]], ids=["dense", "experts"])
def test_training_equals_ddp_with_autocast(
    models: tuple[str, ...], dtype: str, tmp_path: Path, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    arguments = [word for model in models for word in (model, dtype)]
    limit = 3600 if which() == "grid" else 700
    seen, other = two_ranks.run("parity_worker.py", [which(), *arguments], tmp_path, limit)
    wrong = [f"{one['case']}: {said}" for one in seen for said in deviations(one, dtype)]
    assert not wrong, "\n".join(wrong)
    trained = [one for one in seen if "refused" not in one]
    assert {one["stage"] for one in trained} >= {2, 3}
    assert [one.get("scales") for one in seen] == [one.get("scales") for one in other]
    assert not (wrong := disagreements(trained)), wrong


def deviations(one: dict[str, Any], dtype: str) -> list[str]:
    """What is wrong with one case; a refusal is never a deviation."""
    if "refused" in one:
        return [] if "DeepSpeed" in one["refused"] else [one["refused"]]
    bounds = {"norm": NORM, "loss": LOSS, "grads": GRADS[dtype]}
    # Summed in FP32, nothing is left but the order of the additions.
    if one["reduce"] == "fp32" and one["stage"] < 3:
        bounds = dict.fromkeys(bounds, 1e-6)
    said = [
        f"{name} is off by {one[name]:.2e}, more than {b:.0e}"
        for name, b in bounds.items()
        if not one[name] <= b
    ]
    if one["missing grads"]:
        said.append(f"no gradient of {one['missing grads']}")
    if one["skipped"] != one["reference skipped"]:
        said.append(f"skipped {one['skipped']}, the reference {one['reference skipped']}")
    return said


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
