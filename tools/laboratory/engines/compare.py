"""What a Llama of transformers gives its attention, with each option of the guard, beside an engine's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import safe_rope
from laboratory.engines.engine import HEAD_DIM, LONGEST, Engine

_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_HEADS = 4


def table(engines: list[Engine], tokens: int, seed: int) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row for each trainer, a column for each engine.

    A cell has what is largest among the kinds of frequencies.
    """
    random = torch.Generator().manual_seed(seed)
    positions = torch.randint(LONGEST, (tokens,), generator=random).sort().values
    cells: dict[str, list[_Apart]] = {}
    for rope in _ROPES.values():
        rotations = [engine.rotation(rope) for engine in engines]
        for name, model in _trainers(rope, seed):
            before, after = _rotated(model, positions)
            row = [_apart(rotate(positions, before.clone()), after) for rotate in rotations]
            known = cells.get(name, row)
            cells[name] = [_Apart(*map(max, one, other)) for one, other in zip(known, row, strict=True)]
    yield f"| trainer in BF16 | {' | '.join(engine.name for engine in engines)} |"
    yield "|---" * (len(engines) + 1) + "|"
    for name, row in cells.items():
        yield f"| {name} | {' | '.join(map(str, row))} |"


class _Apart(NamedTuple):
    """The share of elements that differ, and the largest difference as a share of the largest element."""

    share: float
    largest: float

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} %, {self.largest:.1e}" if self.share else "the same bits"


def _apart(one: Tensor, other: Tensor) -> _Apart:
    difference = (one.float() - other.float()).abs()
    share = (difference > 0).float().mean()
    return _Apart(share.item(), (difference.max() / other.abs().max()).item())


def _trainers(rope: dict[str, Any], seed: int) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=_HEADS * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        vocab_size=97,
        max_position_embeddings=LONGEST,
        rope_parameters=dict(rope),
    )
    model: Any = LlamaForCausalLM(config)
    damaged = copy.deepcopy(model).to(torch.bfloat16)
    yield "stock, after `.to(torch.bfloat16)`", damaged
    right = copy.deepcopy(damaged)
    right.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    yield "stock, frequencies in FP32", right
    for tables in ("exact", "fp32"):
        for apply in ("fp32", "stock"):
            guarded = copy.deepcopy(model)
            safe_rope.protect(guarded, tables=tables, apply=apply)
            yield f'`tables="{tables}", apply="{apply}"`', guarded.to(torch.bfloat16)


@torch.no_grad()
def _rotated(model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the q that the model's layer projects, and the one that its attention gets.

    Each is [tokens, heads, head_dim].
    """
    seen = {}

    def attention(
        _: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, **others: Any
    ) -> tuple[Tensor, None]:
        seen["after"] = q[0].transpose(0, 1).clone()
        return v.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("safe_rope_lab", attention)
    model.config._attn_implementation = "safe_rope_lab"
    layer = model.model.layers[0].self_attn
    hook = layer.q_proj.register_forward_hook(lambda module, inputs, q: seen.update(before=q[0].clone()))
    random = torch.Generator().manual_seed(0)
    words = torch.randint(model.config.vocab_size, (1, len(positions)), generator=random)
    try:
        model(words, position_ids=positions[None], use_cache=False)
    finally:
        hook.remove()
    return seen["before"].view(seen["after"].shape), seen["after"]
