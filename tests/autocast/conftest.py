from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A real process group of one, over gloo."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    import deepspeed

    deepspeed.init_distributed("gloo")
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def has_autocast() -> bool:
    """Whether the installed DeepSpeed has the section torch_autocast; where not, it must be refused."""
    from safe_rope.autocast import hooks

    return hooks.has_autocast()


@pytest.fixture(autouse=True)
def pytorchs_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 replaces the function for good, also for models outside, by one that adds the bias in FP32."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
