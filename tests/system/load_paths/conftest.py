from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def stock_tables() -> None:
    """The tables of the stock models are there, made while nothing is intercepted."""
    from support import families

    for family in families.FAMILIES:
        families.stock_tables(family)


@pytest.fixture
def deepspeed_state(deepspeed_group: None, stock_tables: None) -> Iterator[None]:
    """What DeepSpeed and transformers leave behind in the process, put back after the test."""
    import transformers.integrations.deepspeed as hf
    from deepspeed.runtime.zero import partition_parameters

    yield
    hf.unset_hf_deepspeed_config()
    assert partition_parameters.zero_init_context == 0
    assert torch.get_default_dtype() == torch.float32
    gc.collect()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family's tiny model, written by transformers."""
    from support import families

    folders = {family: tmp_path_factory.mktemp(family) for family in families.FAMILIES}
    for family, folder in folders.items():
        families.build(family, seed=1).save_pretrained(folder)
    return folders
