from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from _process import free_port
from running import DS_CONFIG, HERE
from support.children import surroundings


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    return free_port()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a run: this interpreter's programs and sys.path, nothing of safe_rope's."""
    return surroundings() | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    """A ZeRO-3 bf16 config as people have them."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with head_dim 128 and 4,096 positions, written by transformers."""
    from support import families

    folder = tmp_path_factory.mktemp("llama")
    families.build("llama", seed=1, layers=2).save_pretrained(folder)
    return folder
