from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_rank import environment, set_imports_aside

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what watches the application functions come and go with their models.

    DeepSpeed keeps the model of a ZeRO-3 engine alive after destroy(), and with it those functions.
    """
    items.sort(key=lambda item: item.path.name != "test_restoration.py")


@pytest.fixture(scope="session")
def deepspeed_group() -> Iterator[None]:
    """A real process group of one, over gloo."""
    import deepspeed
    import families

    with environment():
        for family in families.FAMILIES:
            families.stock_tables(family)
        deepspeed.init_distributed("gloo")
        set_imports_aside()
        yield


@pytest.fixture
def everything_is_put_back(deepspeed_group: None) -> Iterator[None]:
    """Every global that a guard may replace is after the test the object that it was before."""
    from zero_init import assert_unchanged, replaceable, zero_init

    with zero_init():
        pass  # DeepSpeed itself leaves an attribute behind on the first use
    before = replaceable()
    yield
    assert_unchanged(before)


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
