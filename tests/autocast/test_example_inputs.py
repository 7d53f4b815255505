"""Where the inputs to trace a model with come from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import architectures
import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from safe_rope.autocast import derive_safe_parameters
from safe_rope.autocast.safety.choose import traced
from safe_rope.autocast.safety.inputs import ExampleInputs
from safe_rope.errors import ConfigError


def find_example_inputs(model: nn.Module, *sources: Any) -> ExampleInputs | None:
    """The inputs that the engine traces ``model`` with."""
    found = traced(model, torch.bfloat16, *sources)
    return found[0] if found is not None else None


class Rows(Dataset[Any]):
    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class OverStream(Stream):
    """Has indices, and reads the next sample whatever the index."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return next(self.samples)


class Noisy(Dataset[Any]):
    """Draws from everything that is random, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"indices": []}
        self.handle: Any = None
        self.own = [
            *(random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1)),
            torch.Generator().manual_seed(1),
        ]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        self.seen["indices"].append(index)
        self.handle = object()
        own = [generator.random() for generator in self.own[:2]] + [self.own[2].rand()]
        own += [random.random(), numpy.random.rand(), float(torch.rand(1, generator=self.own[3]))]
        return torch.rand(4) * sum(own)


@pytest.mark.parametrize(
    "name",
    [
        *architectures.EVERY_DAY,
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in architectures.OTHERS),
    ],
)
def test_a_model_describes_inputs_that_derive_what_real_ones_do(name: str) -> None:
    model = architectures.build(name)
    found = traced(model, torch.bfloat16)
    assert found is not None
    inputs, own = found
    assert inputs.taken_from == "model"
    assert own.safe == derive_safe_parameters(model, **architectures.inputs(model)).safe


def whisper() -> Any:
    sizes = {
        "vocab_size": 97,
        "d_model": 32,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "pad_token_id": 0,
    }
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **heads, bos_token_id=1, eos_token_id=2)
    return transformers.WhisperForConditionalGeneration(config)


def clip() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))


def wav2vec2() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    groups = {"num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 8}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes, **convolutions, **groups))


@pytest.mark.parametrize("build", [whisper, clip, wav2vec2])
def test_models_of_sound_and_images_describe_theirs(build: Any) -> None:
    model = build()
    found = find_example_inputs(model)
    assert found is not None
    model(*found.args, **found.kwargs)
    report = derive_safe_parameters(model, *found.args, **found.kwargs)
    assert report.safe_share > 0.5, report


def test_given_inputs_come_first_in_the_form_that_they_have() -> None:
    model, ids = architectures.build("gpt2"), torch.tensor([[1, 2, 3]])
    for given in ({"input_ids": ids}, (ids,), [ids], ids):
        found = find_example_inputs(model, given, Rows({"input_ids": ids[0]}))
        assert found is not None
        assert found.taken_from == "example_inputs"
        assert torch.equal([*found.args, *found.kwargs.values()][0], ids)


def test_inputs_that_the_forward_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected example_inputs .* got the keys wrong"):
        find_example_inputs(nn.Linear(2, 2), {"wrong": torch.ones(2)})


def test_the_first_batch_of_a_dataset_comes_next() -> None:
    data = Rows(*[{"input_ids": torch.tensor([5, 6, 7])}] * 3)
    found = find_example_inputs(architectures.build("gpt2"), None, data)
    assert found is not None
    assert found.taken_from == "training_data"
    assert torch.equal(found.kwargs["input_ids"], torch.tensor([[5, 6, 7]] * 2))


def test_targets_that_the_loss_takes_outside_are_left_out() -> None:
    data = Rows(*[(torch.ones(4), torch.tensor(1))] * 2)
    found = find_example_inputs(nn.Linear(4, 2), None, data)
    assert found is not None
    (batch,) = found.args
    assert batch.shape == (2, 4)


def test_the_collate_function_makes_the_batch() -> None:
    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        return {"input": torch.stack(samples) * 3}

    found = find_example_inputs(nn.Linear(4, 2), None, Rows(torch.ones(4), torch.ones(4)), collate)
    assert found is not None
    assert torch.equal(found.kwargs["input"], torch.full((2, 4), 3.0))


def test_what_can_be_read_once_is_not_used_up() -> None:
    samples = iter([torch.ones(4)] * 3)
    for data in (samples, Stream(samples), OverStream(samples)):
        assert find_example_inputs(nn.Linear(4, 2), None, data) is None
    assert len(list(samples)) == 3


def draw(data: Noisy) -> list[float]:
    """What data draw from every random state that it has or shares."""
    return [float(data[0].sum()), random.random(), float(numpy.random.rand()), float(torch.rand(1))]


def test_reading_a_dataset_leaves_no_trace() -> None:
    drawn, model = [], nn.Linear(4, 2)
    for read in (False, True):
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        data = Noisy()
        if read:
            found = find_example_inputs(model, None, data)
            assert found is not None
            assert found.taken_from == "training_data"
        assert data.seen == {"indices": []}
        assert data.handle is None
        drawn.append(draw(data))
    assert drawn[0] == drawn[1]


def test_a_broken_dataset_is_passed_over() -> None:
    found = find_example_inputs(architectures.build("gpt2"), None, Rows())
    assert found is not None
    assert found.taken_from == "model"


def test_a_model_that_says_nothing_has_none() -> None:
    assert find_example_inputs(nn.Linear(4, 2)) is None
