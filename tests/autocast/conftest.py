from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from one_rank import environment, set_imports_aside

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A real process group of one, over gloo."""
    import deepspeed

    with environment():
        deepspeed.init_distributed("gloo")
        set_imports_aside()
        yield


@pytest.fixture
def has_autocast() -> bool:
    """Whether the installed DeepSpeed has the section torch_autocast; where not, it must be refused."""
    from safe_rope.autocast import _deepspeed

    return _deepspeed.has_autocast()


@pytest.fixture(autouse=True)
def pytorchs_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 replaces the function for good, also for models outside, by one that adds the bias in FP32."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
