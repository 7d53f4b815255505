"""A task that only positions solve, the smallest Llama that learns it, and how well a model does.

A sequence alternates between content and questions: at every even position stands a random token out of 32,
at the odd position after it a token that names a distance d. The answer is the content token that stands d
positions before its neighbour. Nothing but the position tells which of up to 1,024 tokens that is: chance is
1/32. Every question is answered in one forward, so that 2,048 tokens hold 1,024 questions.

One attention layer is enough: for each of the 14 distances it learns a query that, rotated, fits the key
at just that distance. Nothing else is special to this model: it is transformers' Llama, with head_dim 64.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Any: what transformers' annotations say differs between the versions that this must run with.
transformers: Any = importlib.import_module("transformers")

CONTENT = 32
DISTANCES = (2, 6, 14, 30, 62, 126, 254, 400, 510, 766, 1022, 1278, 1534, 1790)
CONTEXT = 2048
POSITION_BINS = (0, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
NO_ANSWER = -100
# (sequence length, sequences a step, steps): the short ones teach the task, the long ones the far distances.
SCHEDULE = ((256, 8, 80), (CONTEXT, 1, 220))
LEARNING_RATE = 3e-3

_DISTANCES = torch.tensor(DISTANCES)
Score = dict[str, Any]


def new_model(seed: int) -> Any:
    """A Llama with one layer and two heads of 64, in FP32: 120,000 parameters."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONTENT + len(DISTANCES),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def sequences(
    count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [count, length], and answers and distances, each [count, length // 2].

    The distance is drawn from those that reach no further than the sequence's beginning; where there is none
    the answer is NO_ANSWER.
    """
    half = length // 2
    content = torch.randint(0, CONTENT, (count, half), generator=generator)
    index = torch.arange(half)
    reachable = (index[:, None] >= _DISTANCES // 2).sum(1)
    choice = (torch.rand(count, half, generator=generator) * reachable).long()
    source = index - _DISTANCES[choice] // 2
    answers = content.gather(1, source.clamp(min=0)).masked_fill(source < 0, NO_ANSWER)
    ids = torch.stack([content, choice + CONTENT], -1).reshape(count, length)
    return ids, answers, _DISTANCES[choice]


def train(model: Any, seed: int, progress: Callable[[int], None]) -> list[tuple[int, float]]:
    """Train in FP32; return the number of each step at 2,048 tokens, and its accuracy before the update."""
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    curve = []
    total = sum(steps for _, _, steps in SCHEDULE)
    for step, (length, count) in enumerate(_steps()):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, (total - step) / (0.3 * total))
        ids, answers, _ = sequences(count, length, generator)
        logits = model(input_ids=ids, use_cache=False).logits[:, 1::2]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), answers.flatten(), ignore_index=NO_ANSWER
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if length == CONTEXT:
            asked = answers != NO_ANSWER
            curve.append((step, float((logits.argmax(-1) == answers)[asked].float().mean())))
        progress(step + 1)
    return curve


def _steps() -> Iterator[tuple[int, int]]:
    for length, count, steps in SCHEDULE:
        for _ in range(steps):
            yield length, count


@torch.no_grad()
def evaluate(model: Any, count: int = 16) -> Score:
    """Ask ``model`` the same 16,000 questions at 2,048 tokens whatever it is; a model or a DeepSpeed engine.

    Returns:
        "accuracy" and "perplexity" over all; "by_position" and "by_distance" hold the accuracy for each bin
        of the question's position, named by its first, and for each distance.
    """
    generator = torch.Generator().manual_seed(12345)
    model.eval()
    hits, losses, distances, positions = [], [], [], []
    for _ in range(count):
        ids, answers, distance = sequences(1, CONTEXT, generator)
        logits = model(input_ids=ids, use_cache=False).logits[:, 1::2].float()
        asked = answers != NO_ANSWER
        losses.append(torch.nn.functional.cross_entropy(logits[asked], answers[asked], reduction="none"))
        hits.append((logits.argmax(-1) == answers)[asked].double())
        distances.append(distance[asked])
        positions.append((2 * torch.arange(CONTEXT // 2) + 1)[None][asked])
    hit, loss = torch.cat(hits), torch.cat(losses)
    far, place = torch.cat(distances), torch.cat(positions)
    bins = itertools.pairwise(POSITION_BINS)
    return {
        "accuracy": float(hit.mean()),
        "perplexity": float(loss.double().mean().exp()),
        "by_position": {low: float(hit[(place >= low) & (place < high)].mean()) for low, high in bins},
        "by_distance": {distance: float(hit[far == distance].mean()) for distance in DISTANCES},
    }
