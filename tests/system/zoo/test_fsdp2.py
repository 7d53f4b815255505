"""FSDP2 with meta initialisation on two ranks: every table is true, and q and k are rotated in FP32."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from _process import free_port
from support.children import launch, with_our_modules

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no FSDP2", allow_module_level=True)

SECONDS = 400
# Before transformers 5, GPT-J keeps its scale in a tensor that nothing brings back from meta.
ARCHITECTURES = ("phi", "gptj") if transformers.__version__ >= "5" else ("phi",)

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks says."""
    output = tmp_path_factory.mktemp("fsdp") / "rank"
    worker = Path(__file__).with_name("fsdp_worker.py")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(worker), str(output), *ARCHITECTURES]
    status, said = launch(command, with_our_modules(), output.with_suffix(".log"), SECONDS)
    assert status == 0, said[-6000:]
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tables_survive_meta_sharding_and_a_step(architecture: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank[architecture] for rank in ranks):
        assert found["before"] == found["after"] == []
        assert math.isfinite(found["loss"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sharded_layers_rotate_in_fp32(architecture: str, ranks: list[dict[str, Any]]) -> None:
    assert max(rank[architecture]["error"] for rank in ranks) <= 0.501


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_asked_means_something(architecture: str, ranks: list[dict[str, Any]]) -> None:
    """Without the guard, what `to_empty` leaves is whatever was in memory."""
    assert all(rank[architecture]["stock"] for rank in ranks)
