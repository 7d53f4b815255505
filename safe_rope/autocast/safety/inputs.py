"""Inputs to trace a model with: given ones, the first batch of the training data, or the model's own."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from safe_rope._base.functions import signature_of
from safe_rope.autocast.safety.contents import contents_kept, random_state_kept, reached
from safe_rope.errors import ConfigError

logger = logging.getLogger(__name__)

_SAMPLES = 2  # of the training data
# Of the inputs made from what a transformers model says about itself.
_BATCH, _LENGTH = 2, 8
_IMAGE = 224
_PARTS = {"pixel_values": "vision_config", "input_ids": "text_config", "input_features": "audio_config"}
_WAVE = 4000  # a quarter of a second of speech, more than any feature encoder's stride


@dataclass(frozen=True)
class ExampleInputs:
    """Arguments of a model's forward, and where they come from."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    taken_from: Literal["example_inputs", "training_data", "model"] = "example_inputs"


def example_inputs(
    model: nn.Module,
    given: Any = None,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Iterator[ExampleInputs]:
    """Yield inputs that the signature of ``model``'s forward accepts, the likeliest ones first.

    What is ``given`` (a mapping of keyword arguments, a tuple or list of positional ones, or the only one) is
    all there is. Else come the first samples of ``training_data``, a dataset with indices, made a batch by
    ``collate_fn`` as in a DataLoader. A stream, which may be read once only, is left alone, as is a dataset
    that holds one.

    Raises:
        ConfigError: ``given`` does not fit the signature of the model's forward.

    """
    if given is not None:
        args, kwargs = _as_arguments(given)
        misfit = _misfit(model, args, kwargs)
        if misfit:
            raise ConfigError(
                f"expected example_inputs that {type(model).__name__}.forward takes (a mapping of keyword "
                f"arguments, or a tuple of positional ones), got {_kinds(given)}: {misfit}"
            )
        yield ExampleInputs(args, kwargs, "example_inputs")
        return
    batch = _first_batch(training_data, collate_fn) if training_data is not None else None
    for args, kwargs in _readings(batch) if batch is not None else ():
        if not _misfit(model, args, kwargs):
            yield ExampleInputs(args, kwargs, "training_data")
    for own in _described(model):
        if not _misfit(model, (), own):
            yield ExampleInputs((), own, "model")


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def _readings(batch: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the ways to pass a batch: as it is, and without the targets that a loss takes outside."""
    args, kwargs = _as_arguments(batch)
    yield args, kwargs
    for count in range(len(args) - 1, 0, -1):
        yield args[:count], {}
    if isinstance(batch, tuple | list) and args and isinstance(args[0], Mapping):
        yield (), dict(args[0])


def _first_batch(data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """Read the first samples and leave no trace; None where they can be read once only."""
    from torch.utils.data import default_collate

    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    try:
        held = [data, collate_fn]
        if any(isinstance(one, Iterator) and not isinstance(one, io.IOBase) for one in reached(held)):
            return None
        cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with random_state_kept(cuda), contents_kept(held):
            samples = [data[index] for index in range(min(_SAMPLES, len(data)))]
            return (collate_fn or default_collate)(samples)
    except Exception:  # a dataset may do anything; the model's own description is next
        logger.info("the first batch of training_data cannot be used to trace the model", exc_info=True)
        return None


def _misfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        signature_of(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a forward without a readable signature
        pass
    return ""


def _kinds(value: Any) -> str:
    if isinstance(value, Mapping):
        return "the keys " + ", ".join(map(str, value))
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return type(value).__name__


# ---- what a transformers model says about its inputs: its main input's name, its config, its signature ----


def _described(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments that ``model``'s forward may accept, the most complete ones first."""
    config = getattr(model, "config", None)
    if config is None:
        return
    parameters = _parameter_names(model)
    main = getattr(model, "main_input_name", "input_ids")
    built: dict[str, Any] = {}
    for name in [main] if isinstance(main, str) else list(main):
        built |= _input(name, config)
    extra: dict[str, Any] = {}
    for name, part in _PARTS.items():
        if name in parameters and name not in built and getattr(config, part, None) is not None:
            extra |= _input(name, config)
    decoder = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        decoder = {"decoder_input_ids": _token_ids(config)}
    if built:
        together = ({**built, **extra, **decoder}, {**built, **decoder}, {**built, **extra}, built)
        yield from {frozenset(inputs): inputs for inputs in together}.values()
    own = getattr(model, "dummy_inputs", None)
    if isinstance(own, dict):
        yield dict(own)


def _parameter_names(model: nn.Module) -> set[str]:
    try:
        return set(signature_of(model.forward).parameters)
    except ValueError:
        return set()


def _input(name: str, config: Any) -> dict[str, Any]:
    if name == "input_ids":
        return {name: _token_ids(config)}
    if name == "pixel_values":
        return {name: torch.randn(_BATCH, *_image_shape(config))}
    if name == "pixel_values_videos":
        frames = int(_find(config, "frames_per_clip", "num_frames", default=2))
        return {name: torch.randn(_BATCH, frames, *_image_shape(config))}
    if name == "input_values":
        bins, length = _find(config, "num_mel_bins"), _find(config, "max_length")
        return {name: torch.randn(_BATCH, length, bins) if bins and length else torch.randn(_BATCH, _WAVE)}
    return {name: _spectrogram(config)} if name == "input_features" else {}


def _token_ids(config: Any) -> Tensor:
    vocabulary = int(_find(config, "vocab_size", default=2))
    # Different small ids: special tokens (padding, images) mostly lie elsewhere or do not matter.
    return torch.arange(_BATCH * _LENGTH).reshape(_BATCH, _LENGTH) % max(vocabulary - 3, 1) + min(
        2, vocabulary - 1
    )


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = _find(config, "image_size", "input_size", default=_IMAGE)
    if isinstance(size, dict):
        size = [size.get("height", _IMAGE), size.get("width", _IMAGE)]
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return int(_find(config, "num_channels", "in_channels", "in_chans", default=3)), int(height), int(width)


def _spectrogram(config: Any) -> Tensor:
    positions = _find(config, "max_source_positions")
    bins = _find(config, "num_mel_bins")
    if bins and positions and _find(config, "input_feat_per_channel") is None:
        return torch.randn(_BATCH, int(bins), 2 * int(positions))  # Whisper: bins before time
    return torch.randn(_BATCH, 16 * _LENGTH, int(bins or _find(config, "input_feat_per_channel", default=80)))


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of the attributes that the config, or one of its parts, has."""
    for part in (config, *(getattr(config, part, None) for part in _PARTS.values())):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default
