"""How many Python functions of the library a step of decoding calls for each layer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from support import small_models

import safe_rope

_KNOWN = 6
"""Steps after which nothing of a model is found out any more."""
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))


def _calls(model: Any, steps: int = 8) -> float:
    """Return how many of the library's functions a step calls."""
    count = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("safe_rope.")

    with torch.no_grad():
        for step in range(_KNOWN + steps):
            given = {"input_ids": torch.ones(1, 1, dtype=torch.long), "position_ids": torch.tensor([[step]])}
            sys.setprofile(note if step >= _KNOWN else None)
            try:
                model(**given)
            finally:
                sys.setprofile(None)
    return count / steps


@pytest.mark.fresh
@pytest.mark.skipif(RELEASE < (4, 48), reason="each layer of earlier models makes tables")
@pytest.mark.parametrize(("kind", "most"), [("gptj", 42), ("llama", 14)])
def test_a_layer_calls_few_functions(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (2, 6):
        monkeypatch.setattr(small_models, "LAYERS", layers)
        with safe_rope.guard():
            model = small_models.build(kind)
        counts.append(_calls(model.bfloat16()))
    few, many = counts
    assert few
    assert (many - few) / 4 <= most
