"""A lookup of exact tables against the installed transformers' rotary forward, for the same positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from laboratory.bench.timing import Row, best_times
from safe_rope.frequencies import RopeSpec
from safe_rope.tables import RotaryTable
from safe_rope.tables import _double_double as dd
from safe_rope.tables._levels import combine

TARGET = 0.45
THETA = 1e4


def positions(count: int) -> dict[str, tuple[Tensor, float | None]]:
    """Return ``[1, count]`` positions of several kinds, with the ratio that is asked of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 1000, (count // 100,), generator=generator).tolist()
    packed = torch.cat([torch.arange(length) for length in lengths])[:count]
    return {
        "contiguous": (torch.arange(count)[None], TARGET),
        "contiguous from 777,777": (torch.arange(777_777, 777_777 + count)[None], TARGET),
        "packed": (packed[None], TARGET),
        "random": (torch.randint(0, count, (1, count), generator=generator), None),
        "random below 10M": (torch.randint(0, 10_000_000, (1, count), generator=generator), None),
    }


def _stock_forward(dim: int, device: str) -> Callable[[Tensor], Any]:
    if "config" not in inspect.signature(LlamaRotaryEmbedding.__init__).parameters:
        raise SystemExit("error: this transformers' rotary forward takes no positions; use 4.43 or later")
    shape: dict[str, Any] = {"hidden_size": 2 * dim, "num_attention_heads": 2, "rope_theta": THETA}
    config = LlamaConfig(**shape)
    module, x = LlamaRotaryEmbedding(config).to(device), torch.zeros(1, device=device)
    return lambda ids: module(x, ids)


def measure(device: str) -> list[Row]:
    """Return a row for each kind, number of positions and rotary_dim, then what correct rounding costs."""
    rows = []
    with torch.no_grad():
        for dim in (64, 128):
            stock = _stock_forward(dim, device)
            table = RotaryTable(RopeSpec("default", THETA, dim, dim).inv_freq())
            kinds = [(4096, *kind) for kind in positions(4096).items()]
            kinds += [(32768, *kind) for kind in positions(32768).items()]
            kinds += [(1, "position 100", (torch.tensor([[100]]), None))]
            kinds += [(1, "position 5,000", (torch.tensor([[5000]]), None))]
            for count, name, (ids, target) in kinds:
                ids = ids.to(device)
                calls: list[Callable[[], Any]] = [partial(table.lookup, ids), partial(stock, ids)]
                ours, other = best_times(calls, device, 0.3 if device.startswith("cuda") else 1.5)
                what = f"rotary_dim {dim}, {count:,} positions, {name}"
                rows.append(Row(what, "transformers' rotary forward", ours, other, target))
        rows.append(_correct_rounding())
    return rows


def _correct_rounding() -> Row:
    """Time the addition of angles in double-double, which would round every entry rightly, on CPU."""
    planes = torch.rand(8, 256, 64, dtype=torch.float64)
    high, low = planes[:4], planes[4:] * 2.0**-54
    a = torch.stack((high[0], low[0], high[1], low[1]))
    b = torch.stack((high[2], low[2], high[3], low[3]))
    ours, other = best_times([lambda: dd.rotate(a, b), lambda: combine(high[:2], high[2:])], "cpu", 0.5)
    return Row("combining 256 rows of 64 in double-double", "the same in float64", ours, other)
