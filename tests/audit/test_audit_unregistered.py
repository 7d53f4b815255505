"""Rotary modules that their parent keeps and has not registered are measured, and protected."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope

BF16, DIM = torch.bfloat16, 32


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return (position_ids[..., None].float() * self.inv_freq.float()).cos()


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self.held: Any = None


class Box:
    __slots__ = ("rope",)

    def __init__(self, rope: nn.Module) -> None:
        self.rope = rope


KEPT: dict[str, Callable[[Any], Any]] = {
    "directly": lambda rope: rope,
    "nested": lambda rope: {"text": [(rope,)]},
    "object": Box,
    "objects": lambda rope: [Box(rope)],
    "namespace": lambda rope: types.SimpleNamespace(rope=rope),
    "partial": lambda rope: functools.partial(rope, torch.zeros(1)),
    "method": lambda rope: rope.forward,
    "closure": lambda rope: lambda x: rope(x, torch.arange(4)),
}


@pytest.mark.parametrize("how", KEPT)
def test_what_nobody_has_registered_is_measured_and_protected(how: str) -> None:
    rope, parent = Rotary(), Parent()
    object.__setattr__(parent, "held", KEPT[how](rope))
    model = nn.Sequential(parent)
    assert safe_rope.audit(model).ok
    rope.bfloat16()
    report = safe_rope.audit(model)
    assert [one.verdict for one in report.modules] == ["damaged"]
    assert report.modules[0].path.startswith("0.held")
    safe_rope.protect(model)
    assert torch.equal(rope.inv_freq, Rotary().inv_freq)
    assert safe_rope.audit(model).ok
