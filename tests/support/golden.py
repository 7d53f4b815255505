"""What tests/data/golden_tables.json holds: SHA-256 of frequencies and of table blocks, for a list of specs.

Any CPU, GPU or instruction set must reproduce the file. To write it anew after a deliberate change:

    PYTHONPATH=. python tests/support/golden.py > tests/data/golden_tables.json
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safe_rope.frequencies import RopeSpec
from safe_rope.tables import RotaryTable

FILE = Path(__file__).resolve().parents[1] / "data" / "golden_tables.json"

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SHORT = tuple(1.0 + 0.013 * i for i in range(48))
_LONG = tuple(1.08 + 63.7 * i / 48 for i in range(48))
SPECS: dict[str, tuple[dict[str, Any], int | None]] = {
    "theta 1e4, 64": ({"rope_theta": 1e4, "rotary_dim": 64}, None),
    "theta 1e4, 128": ({"rope_theta": 1e4, "rotary_dim": 128}, None),
    "theta 5e5, 128": ({"rope_theta": 5e5, "rotary_dim": 128}, None),
    "theta 1e6, 128": ({"rope_theta": 1e6, "rotary_dim": 128}, None),
    "theta 1e4, 24": ({"rope_theta": 1e4, "rotary_dim": 24}, None),
    "theta 150000, 64": ({"rope_theta": 150000.0, "rotary_dim": 64}, None),
    "theta 1e7, 256": ({"rope_theta": 1e7, "rotary_dim": 256}, None),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "rotary_dim": 128, "factor": 4.0}, None),
    "dynamic": (
        {"rope_type": "dynamic", "rope_theta": 1e4, "rotary_dim": 128, "factor": 2.0,
         "max_position_embeddings": 4096},
        9000,
    ),
    "llama3": (
        {"rope_type": "llama3", "rope_theta": 5e5, "rotary_dim": 128, **_LLAMA3,
         "original_max_position_embeddings": 8192},
        None,
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 1e6, "rotary_dim": 128, "factor": 4.0,
         "original_max_position_embeddings": 32768},
        None,
    ),
    "longrope": (
        {"rope_type": "longrope", "rope_theta": 1e4, "rotary_dim": 96, "factor": 32.0, "short_factor": _SHORT,
         "long_factor": _LONG, "original_max_position_embeddings": 4096},
        5000,
    ),
}  # fmt: skip
"""Name: the fields of a RopeSpec (head_dim is rotary_dim, rope_type default), and a sequence length."""

BLOCKS = ((0, 600), (3968, 300), (131_000, 200), (1_000_000, 200), (9_999_800, 200), (2**31 - 100, 100))
"""First position and count; they cross the limits of the tables' levels."""


def spec_of(name: str) -> RopeSpec:
    """Return a spec of the list."""
    fields, _ = SPECS[name]
    return RopeSpec(**{"rope_type": "default", "head_dim": fields["rotary_dim"], **fields})


def table_of(name: str) -> RotaryTable:
    """Return the table of a spec's checkpoint frequencies."""
    spec = spec_of(name)
    return RotaryTable(spec.inv_freq(SPECS[name][1]), spec.attention_scaling)


def positions() -> dict[str, Tensor]:
    """Return int64 positions by name: every block, and all of them shuffled."""
    blocks = {f"{first}+{count}": torch.arange(first, first + count) for first, count in BLOCKS}
    joined = torch.cat(list(blocks.values()))
    shuffled = joined[torch.arange(len(joined)) * 7919 % len(joined)]
    return {**blocks, "shuffled": shuffled}


def sha256(*tensors: Tensor) -> str:
    """Return the digest of the tensors' bytes, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digests(name: str, device: str = "cpu") -> dict[str, str]:
    """Return the digests of one spec: its frequencies, and cos and sin of every block on ``device``."""
    spec, length = spec_of(name), SPECS[name][1]
    found = {f"inv_freq {bits}": sha256(spec.inv_freq(length, bits)) for bits in ("checkpoint", "exact")}
    table = table_of(name)
    for block, ids in positions().items():
        found[f"fp32 {block}"] = sha256(*table.lookup(ids.to(device)))
    ids = positions()["shuffled"].to(device)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        found[str(dtype).removeprefix("torch.")] = sha256(*table.lookup(ids, dtype))
    return found


def stock_tables(device: str, length: int = 8192) -> tuple[Tensor, Tensor, Tensor]:
    """Return inv_freq, cos and sin of the stock Llama module, all of them made on ``device``, FP32 on CPU."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options = {"rope_theta": 1e6, "max_position_embeddings": length}
    with torch.device(device), torch.no_grad():
        x = torch.zeros(1)
        if "config" in inspect.signature(LlamaRotaryEmbedding.__init__).parameters:
            module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=2, **options))
            cos, sin = (table[0] for table in module(x, torch.arange(length)[None]))
        else:
            module = LlamaRotaryEmbedding(128, max_position_embeddings=length, base=1e6)
            cos, sin = module(x, seq_len=length)
    return module.inv_freq.cpu(), cos.cpu(), sin.cpu()


def main() -> None:
    """Print the digests, or with --stock the digest of the stock tables, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.stock:
        capability = torch.backends.cpu.get_cpu_capability()
        print(json.dumps({"capability": capability, "stock": sha256(*stock_tables(options.device))}))
    else:
        print(json.dumps({name: digests(name, options.device) for name in SPECS}, indent=1))


if __name__ == "__main__":
    main()
