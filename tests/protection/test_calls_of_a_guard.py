"""How many Python functions a guard calls for each module of a model, and for each class."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope._base import bytecode
from safe_rope._protection.rewrite import ProtectedModule

pytestmark = pytest.mark.fresh  # other tests leave hooks and modules, which a guard looks at as well


class Rotary(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = positions[:, None] * self.inv_freq
        return phase.cos(), phase.sin()


class Feed(nn.Module):
    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.width = width
        self.up = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rotary = Rotary(8)
        self.layers = nn.ModuleList(Feed(8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, _ = self.rotary(torch.arange(len(x)))
        for layer in self.layers:
            x = layer(x)
        return x * cos[:, :1]


def built(layers: int) -> Model:
    with safe_rope.guard():
        with torch.device("meta"):
            model = Model(layers)
        model.eval()
        model.train()
    return model


def calls(run: Callable[[], Any]) -> int:
    """Return how many Python functions of the library, or called by it, ``run`` calls."""
    count = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("safe_rope.")

    run()
    gc.collect()  # what others have left would be taken away meanwhile, and called for
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_module_more_costs_few_calls() -> None:
    few, many = (calls(lambda layers=layers: built(layers)) for layers in (10, 60))
    assert many - few <= 50 * 150


def test_the_code_of_a_protected_class_is_not_read(monkeypatch: Any) -> None:
    asked: list[type] = []
    inner = bytecode._facts
    monkeypatch.setattr(bytecode, "_facts", lambda cls: asked.append(cls) or inner(cls))
    model = built(2)
    assert isinstance(model.rotary, ProtectedModule)
    assert Feed in asked
    assert not any(issubclass(cls, ProtectedModule) for cls in asked)
