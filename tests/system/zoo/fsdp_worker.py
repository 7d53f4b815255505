"""One rank of FSDP2 with meta initialisation. Run as ``fsdp_worker.py OUTPUT ARCHITECTURE...`` by torchrun.

Each architecture is built on meta, sharded by layers in BF16, materialised with `to_empty`, given weights
and trained for a step. The file OUTPUT.RANK says what of its tables is not that of a clean FP32 model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from laboratory.zoo.rotated import Recorder, errors
from small_families import FAMILIES, IDS, build, stored
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import safe_rope


def sharded(architecture: str, mesh: Any) -> Any:
    """The architecture as a training script makes it: on meta first, then a shard on every rank."""
    with torch.device("meta"):
        model = build(FAMILIES[architecture])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.use_deterministic_algorithms(True)  # memory that nobody has filled is then NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(torch.randn(local.shape, generator=generator) * 0.05)
    return model


def wrong(model: Any, truth: dict[str, torch.Tensor]) -> list[str]:
    tables = stored(model)
    return [name for name in truth if not _is_there(tables.get(name), truth[name])]


def _is_there(table: torch.Tensor | None, true: torch.Tensor) -> bool:
    # A plain attribute stays on meta: no to_empty concerns it.
    return table is not None and not table.is_meta and torch.equal(table.float(), true)


def measure(architecture: str, mesh: Any) -> dict[str, Any]:
    clean = build(FAMILIES[architecture])
    truth = {name: table.clone() for name, table in stored(clean).items()}
    with Recorder(clean) as expected, torch.no_grad():
        clean(input_ids=IDS)
    stock = wrong(sharded(architecture, mesh), truth)
    with safe_rope.guard(tables="fp32"):
        model = sharded(architecture, mesh)
    before = wrong(model, truth)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model) as recorder:
        loss = model(input_ids=IDS)[0].float().square().mean()
    loss.backward()
    optimizer.step()
    return {
        "stock": stock,
        "before": before,
        "after": wrong(model, truth),
        "loss": float(loss.detach()),
        "error": max(errors(expected.calls, recorder.calls).values()),
    }


def main(output: str, *architectures: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {architecture: measure(architecture, mesh) for architecture in architectures}
    Path(f"{output}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
