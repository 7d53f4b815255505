from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def deepspeed_group() -> Iterator[None]:
    """A real process group of one, over gloo."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    names["LOCAL_SIZE"] = "1"  # without it DeepSpeed 0.14 asks the program numactl for the number of devices
    names["MASTER_PORT"] = str(free_port())
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    import deepspeed
    import families

    for family in families.FAMILIES:
        families.stock_tables(family)
    deepspeed.init_distributed("gloo")
    gc.collect()
    gc.freeze()  # tests collect garbage, and DeepSpeed does at every step of setting up an engine
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def deepspeed_state(deepspeed_group: None) -> Iterator[None]:
    """What DeepSpeed and transformers leave behind in the process, put back after the test."""
    import transformers.integrations.deepspeed as hf
    from deepspeed.runtime.zero import partition_parameters

    linear = torch.nn.functional.linear  # ZeRO-3 replaces it for good
    yield
    torch.nn.functional.linear = linear
    hf.unset_hf_deepspeed_config()
    assert partition_parameters.zero_init_context == 0
    assert torch.get_default_dtype() == torch.float32
    gc.collect()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family's tiny model, written by transformers."""
    import families

    folders = {family: tmp_path_factory.mktemp(family) for family in families.FAMILIES}
    for family, folder in folders.items():
        families.build(family, seed=1).save_pretrained(folder)
    return folders
