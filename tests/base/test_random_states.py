"""Random states are kept wherever numbers may be drawn."""

from __future__ import annotations

import pytest
import torch

from safe_rope._base.random_states import random_states_kept

pytestmark = [pytest.mark.torch, pytest.mark.contract]


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_a_device_that_is_not_there_has_no_state(device: str | None) -> None:
    # Fake tensors of CUDA run on machines without a GPU.
    before = torch.get_rng_state()
    with random_states_kept(device):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
