"""Does a guarded model still run, with the stock results, and rotate in FP32?

Asked of every model that takes a simple input.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from laboratory.zoo.bodies import body_of
from laboratory.zoo.rotated import Recorder, errors
from laboratory.zoo.shrink import build


def compare(cls: type[Any], config: Any) -> dict[str, Any]:
    """Run the stock and the guarded model on the same input.

    Returns:
        fp32: whether FP32 results are the same to the bit with ``tables="fp32"``; bf16: whether both run
        after ``.to(bfloat16)`` and give the same dtypes. None where the stock model cannot be run so.
        rotation: for each body of a function that rotates the guarded model's q and k in BF16, how far it is
        from float64, in units of the last place; 0.5 is one rounding. Or why that could not be measured.

    """
    import safe_rope

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = build(cls, config).eval()
        inputs = _inputs(plain)
        if inputs is None:
            return {"fp32": None, "bf16": None}
        with safe_rope.guard(tables="fp32"):
            guarded = build(cls, config).eval()
        # Not what has run: such a model may hold tables of its own making, which no cast reaches.
        low_plain, low_guarded = build(cls, config).eval(), copy.deepcopy(guarded)
        result: dict[str, Any] = {"fp32": _same(plain, guarded, inputs, _identical)}
        with Recorder(plain) as clean:
            _run(plain, inputs)
        plain, guarded = low_plain.to(torch.bfloat16), low_guarded.to(torch.bfloat16)
        low = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        result["bf16"] = _same(plain, guarded, low, _alike)
        if clean.calls and result["bf16"] is not None:
            result["rotation"] = _rotation(clean, guarded, low)
    return result


def _rotation(clean: Recorder, guarded: Any, inputs: dict[str, Any]) -> dict[str, float] | str:
    try:
        with Recorder(guarded) as measured:
            _run(guarded, inputs)
        found = errors(clean.calls, measured.calls)
    except Exception as error:
        return f"not measured: {type(error).__name__}: {str(error)[:200]}"
    worst: dict[str, float] = {}
    for function, distance in found.items():
        body = body_of(function)
        worst[body] = max(round(distance, 4), worst.get(body, 0.0))
    return worst


def _same(plain: Any, guarded: Any, inputs: dict[str, Any], judge: Callable[..., str]) -> str | None:
    try:
        expected = _run(plain, inputs)
    except Exception:
        return None
    try:
        return judge(expected, _run(guarded, inputs))
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:200]}"


def _run(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**inputs)
    values = output.to_tuple() if hasattr(output, "to_tuple") else (output,)
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _identical(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str:
    if len(expected) != len(actual):
        return f"differs: {len(actual)} results instead of {len(expected)}"
    for one, other in zip(expected, actual, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"differs: {other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            return f"differs by {float((one - other).abs().nan_to_num().max()):.2g}"
    return "same"


def _alike(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str:
    mine, theirs = [v.dtype for v in actual], [v.dtype for v in expected]
    return "same" if mine == theirs else f"differs: {mine} instead of {theirs}"


def _inputs(model: Any) -> dict[str, Any] | None:
    """Return an input that the stock model takes."""
    for inputs in _candidates(model):
        with contextlib.suppress(Exception):
            _run(model, inputs)
            return inputs
    return None


def _candidates(model: Any) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    if {"grid_thw", "image_grid_thw"} & inspect.signature(type(model).forward).parameters.keys():
        with contextlib.suppress(AttributeError, TypeError, StopIteration):
            yield _patches(model, generator)
    ids = torch.randint(5, 100, (1, 12), generator=generator)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        for part in (model.config, getattr(model.config, "vision_config", None)):
            size = getattr(part, "image_size", None) or 64
            size = size if isinstance(size, int) else size[0]
            channels = getattr(part, "num_channels", None) or 3
            yield {"pixel_values": torch.rand(1, channels, size, size, generator=generator)}
    elif name == "input_values":
        yield {"input_values": torch.rand(1, 4000, generator=generator)}
    elif name == "input_features":
        for width in ("num_mel_bins", "feature_size", "input_feat_per_channel", "hidden_size"):
            bins = getattr(model.config, width, 80)
            yield {"input_features": torch.rand(1, 40, bins, generator=generator)}
            yield {"input_features": torch.rand(1, bins, 40, generator=generator)}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "position_ids": torch.arange(12).expand(3, 1, 12)}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"input_ids": ids, "bbox": torch.randint(0, 100, (1, 12, 4), generator=generator)}
    yield {"input_ids": ids, "bbox": torch.rand(1, 12, 8, generator=generator)}


def _patches(model: Any, generator: torch.Generator) -> dict[str, Any]:
    """Pictures cut into patches, as vision towers that take a grid want them."""
    config, names = model.config, inspect.signature(type(model).forward).parameters
    channels = next(n for name in ("in_channels", "num_channels") if (n := getattr(config, name, None)))
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    first = next(name for name in names if name != "self")
    grid = "grid_thw" if "grid_thw" in names else "image_grid_thw"
    return {first: torch.rand(16, width, generator=generator), grid: torch.tensor([[1, 4, 4]])}
