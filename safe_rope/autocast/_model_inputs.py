"""What a transformers model says about its own inputs: its main input's name, its config, its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH = 2, 8
_IMAGE = 224
_SAMPLES = 4000  # a quarter of a second of speech, more than any feature encoder's stride


def described_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
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
    for name in ("input_ids", "pixel_values", "input_features"):
        if name in parameters and name not in built and _has_part_for(name, config):
            extra |= _input(name, config)
    decoder = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        decoder = {"decoder_input_ids": _token_ids(config)}
    if built:
        yield from ({**built, **extra, **decoder}, {**built, **decoder}, {**built, **extra}, built)
    own = getattr(model, "dummy_inputs", None)
    if isinstance(own, dict):
        yield dict(own)


def _parameter_names(model: nn.Module) -> set[str]:
    try:
        return set(inspect.signature(model.forward).parameters)
    except ValueError:
        return set()


def _has_part_for(name: str, config: Any) -> bool:
    part = {"input_ids": "text_config", "pixel_values": "vision_config", "input_features": "audio_config"}
    return getattr(config, part[name], None) is not None


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
        return {name: torch.randn(_BATCH, length, bins) if bins and length else torch.randn(_BATCH, _SAMPLES)}
    if name == "input_features":
        return {name: _spectrogram(config)}
    return {}


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
    parts = (
        config,
        *(getattr(config, part, None) for part in ("vision_config", "text_config", "audio_config")),
    )
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default
