"""On a rank: each traces inputs of its own, which lead through the model in other ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from safe_rope.errors import ConfigError, PrecisionWarning


class ByLength(nn.Module):
    """Reads a weight in FP32 where the input is long."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steady, self.varying = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=x.shape[-2] <= 8):
            x = self.varying(x)
        return self.steady(x).float().square().mean()


def sample(rank: int) -> Tensor:
    return torch.randn(10 if rank else 6, 16, generator=torch.Generator().manual_seed(rank))


def build(inputs: Any, data: Any = None) -> Any:
    import safe_rope

    model = ByLength()
    return safe_rope.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        example_inputs=inputs,
        training_data=data,
    )[0]


def trained(rank: int, *sources: Any) -> dict[str, Any]:
    """The safe parameters, what was warned of, and the weights after two steps."""
    from safe_rope.autocast import full_precision

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        engine = build(*sources)
    said = [str(one.message) for one in caught if "disagree" in str(one.message)]
    for _ in range(2):
        engine.backward(engine(sample(rank)))
        engine.step()
    full_precision(engine)
    weights = [p.detach().double().sum().item() for p in engine.module.parameters()]
    safe = sorted(engine.safety_report.safe)
    engine.destroy()
    return {"safe": safe, "warning": "".join(said), "weights": weights}


def run() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    own = sample(rank)
    seen: dict[str, Any] = {
        "inputs": trained(rank, own),
        "data": trained(rank, None, TensorDataset(own.expand(4, -1, -1).clone())),
        "inputs or none": trained(rank, own if rank else None),
    }
    try:
        build({"wrong": own} if rank else own)
    except ConfigError as error:
        seen["failing"] = str(error)
    return seen
