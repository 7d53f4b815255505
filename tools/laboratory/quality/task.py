"""A task that only positions solve, the smallest Llama that learns it, and how well a model does.

A sequence of 2,048 tokens alternates between content and questions: at every even place stands a random
token out of 32, at the odd place after it a token that names a distance. The answer is the content token that
stands just so many places before its neighbour. Nothing but the position tells which of up to 1,024 tokens
that is: chance is 1/32. Every question is answered in one forward, so that 2,048 tokens hold 1,024 questions.

A long context would take hours on a CPU, so it is thinned out: with a stride of 16, the tokens stand at the
positions 0, 16, 32 ... 32,752, and a question reaches 32 to 20,448 positions back. With a stride of 1 it is a
context of 2,048, and 2 to 1,278 positions. transformers 4.36 knows no positions but those of the places, so
there the stride is 1.

One attention layer is enough: for each question it learns a query that, rotated, fits the key at just that
distance. Nothing else is special to this model: it is transformers' Llama, with head_dim 128.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from laboratory.rotary import rotary_modules, takes_positions

# Any: what transformers' annotations say differs between the versions that this must run with.
transformers: Any = importlib.import_module("transformers")

CONTENT = 32
DISTANCES = (2, 6, 14, 30, 62, 126, 254, 400, 510, 766, 1022, 1278)
"""In places; in positions they are as many times larger as the stride."""
CONTEXT = 2048
PLACE_BINS = (0, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
NO_ANSWER = -100
# (sequence length, sequences a step, steps): the short ones teach the task, the long ones the far places.
SCHEDULE = ((256, 8, 80), (CONTEXT, 1, 220))
LEARNING_RATE = 3e-3

Score = dict[str, Any]


class Batch(NamedTuple):
    """Token ids and positions [count, length]; answers and questions [count, length // 2].

    A question is an index into DISTANCES.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    answers: torch.Tensor
    questions: torch.Tensor


def new_model(seed: int, stride: int) -> Any:
    """A Llama with one layer and one head of 128, in FP32: 130,000 parameters."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONTENT + len(DISTANCES),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=stride * CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def knows_positions(model: Any) -> bool:
    """Whether the model's rotary module takes positions, and not only the sequence's length."""
    return takes_positions(rotary_modules(model)[0])


def sequences(count: int, length: int, stride: int, generator: torch.Generator) -> Batch:
    """Draw ``count`` sequences; a question reaches no further than the beginning.

    Where none does that, the answer is NO_ANSWER.
    """
    half = length // 2
    content = torch.randint(0, CONTENT, (count, half), generator=generator)
    index = torch.arange(half)
    steps = torch.tensor(DISTANCES) // 2
    reachable = (index[:, None] >= steps).sum(1)
    questions = (torch.rand(count, half, generator=generator) * reachable).long()
    source = index - steps[questions]
    answers = content.gather(1, source.clamp(min=0)).masked_fill(source < 0, NO_ANSWER)
    ids = torch.stack([content, questions + CONTENT], -1).reshape(count, length)
    return Batch(ids, (stride * torch.arange(length)).expand(count, -1), answers, questions)


def train(model: Any, seed: int, stride: int, progress: Callable[[int], None]) -> list[tuple[int, float]]:
    """Train in FP32; return the number of each step at 2,048 tokens, and its accuracy before the update."""
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    curve = []
    total = sum(steps for _, _, steps in SCHEDULE)
    for step, (length, count) in enumerate(_steps()):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, (total - step) / (0.3 * total))
        batch = sequences(count, length, stride, generator)
        answers = batch.answers
        logits = ask(model, batch)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), answers.flatten(), ignore_index=NO_ANSWER
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
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


def ask(model: Any, batch: Batch) -> torch.Tensor:
    """Return the logits of every answer, [count, length // 2, vocabulary]."""
    # Without a mask transformers 5 takes every jump of the positions for the beginning of another sequence.
    mask = torch.ones_like(batch.ids)
    logits: torch.Tensor = model(
        input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False
    ).logits
    return logits[:, 1::2]


@torch.no_grad()
def evaluate(model: Any, stride: int, count: int = 16) -> Score:
    """Ask ``model`` the same 16,000 questions at 2,048 tokens whatever it is; a model or a DeepSpeed engine.

    Returns:
        "accuracy" and "perplexity" over all; "by_place": accuracy for each bin of the question's place in the
        sequence, named by its first; "by_distance": accuracy for each distance, in positions.
    """
    generator = torch.Generator().manual_seed(12345)
    model.eval()
    hits, losses, questions, places = [], [], [], []
    for _ in range(count):
        batch = sequences(1, CONTEXT, stride, generator)
        logits, answers = ask(model, batch).float(), batch.answers
        asked = answers != NO_ANSWER
        losses.append(torch.nn.functional.cross_entropy(logits[asked], answers[asked], reduction="none"))
        hits.append((logits.argmax(-1) == answers)[asked].double())
        questions.append(batch.questions[asked])
        places.append((2 * torch.arange(CONTEXT // 2) + 1)[None][asked])
    hit, question, place = torch.cat(hits), torch.cat(questions), torch.cat(places)
    return {
        "accuracy": float(hit.mean()),
        "perplexity": float(torch.cat(losses).double().mean().exp()),
        "by_place": {
            low: float(hit[(place >= low) & (place < high)].mean())
            for low, high in itertools.pairwise(PLACE_BINS)
        },
        "by_distance": {
            stride * distance: float(hit[question == index].mean())
            for index, distance in enumerate(DISTANCES)
        },
    }
