"""Which calls count as outside of the model's forward, where weights of the autocast dtype are refused."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from safe_rope.autocast import reads
from safe_rope.errors import PrecisionError

X = torch.ones(2, 4)


class Threaded(nn.Module):
    """A forward that has a thread compute its second part, which is under no autocast there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(self.second, x).result()


def test_what_a_forward_calls_in_a_thread_is_within_it() -> None:
    model = Threaded()
    engine = types.SimpleNamespace(module=model)
    rounded = types.SimpleNamespace(rounded=True, restore=lambda: None, process_groups=[])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        truth = model(X)
        reads.refuse_outside(engine, rounded, torch.bfloat16)
        assert torch.equal(model(X), truth)
    for part in (model, model.second):
        with pytest.raises(PrecisionError, match="without autocast"):
            part(X)
