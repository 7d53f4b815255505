"""What is no positions costs a forward that keeps it no memory, of whatever size it is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import safe_rope
from safe_rope._recognition.waves import are_counted_out


class Grows(nn.Module):
    """An attention that keeps keys, and whose frequencies are its own."""

    was_kept = True

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("keys", torch.zeros(4, 0, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = weakref.ref(self.keys)
        self.keys = torch.cat([self.keys, self.mix(x).detach()], dim=1)
        self.was_kept = before() is not None
        return x + self.keys.mean(1, keepdim=True) * self.inv_freq.cos().repeat(2)


def test_a_cache_that_is_made_longer_leaves_its_memory_at_once() -> None:
    with safe_rope.guard():
        model = nn.Sequential(Grows())
    for _ in range(3):
        model(torch.randn(4, 3, 8))
        assert not model[0].was_kept


class Largest(TorchDispatchMode):
    """Remember how many bytes the largest tensor has that was made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize(
    ("shape", "counted"),
    [((4, 8, 4096, 64), False), ((4, 2**23), False), ((2**23, 4), False), ((2**17, 64), True)],
)
def test_phases_are_told_from_a_cache_without_a_copy_of_it(shape: tuple[int, ...], counted: bool) -> None:
    kept = torch.randn(shape)
    if counted:
        kept = torch.arange(1.0 * shape[0])[:, None] * kept[0]
    with Largest() as made:
        assert are_counted_out(kept) == counted
    assert made.nbytes < kept.nbytes / 8
