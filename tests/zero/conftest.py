from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def deepspeed_group() -> Iterator[None]:
    """A real process group of one, over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in (*names, "MASTER_PORT")}
    os.environ.update(names, MASTER_PORT=str(port))
    import deepspeed

    deepspeed.init_distributed("gloo")
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
