"""Inputs to trace a model with: given ones, the first batch of the training data, or the model's own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from safe_rope.autocast._model_inputs import described_inputs
from safe_rope.autocast._trial import runs
from safe_rope.errors import ConfigError

logger = logging.getLogger(__name__)

_SAMPLES = 2


@dataclass(frozen=True)
class ExampleInputs:
    """Arguments of a model's forward, and where they come from."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: Literal["example_inputs", "training_data", "model"] = "example_inputs"


def find_example_inputs(
    model: nn.Module,
    example_inputs: Any = None,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> ExampleInputs | None:
    """Return inputs for ``model``'s forward, from the first source that there is.

    Args:
        model: the model; its forward's signature tells how a batch is passed.
        example_inputs: a mapping of keyword arguments, a tuple or list of positional ones, or the only one.
        training_data: a dataset. Its first samples are read; an iterator, which can be read once
            only, is left alone.
        collate_fn: makes a batch of samples, as in a DataLoader.

    Returns:
        ExampleInputs; None where nothing is given and the model does not say what it takes.

    Raises:
        ConfigError: example_inputs do not fit the signature of the model's forward.

    """
    if example_inputs is not None:
        args, kwargs = _as_arguments(example_inputs)
        misfit = _misfit(model, args, kwargs)
        if misfit:
            raise ConfigError(
                f"expected example_inputs that {type(model).__name__}.forward takes (a mapping of keyword "
                f"arguments, or a tuple of positional ones), got {_kinds(example_inputs)}: {misfit}"
            )
        return ExampleInputs(args, kwargs, "example_inputs")
    batch = _first_batch(training_data, collate_fn) if training_data is not None else None
    if batch is not None:
        for args, kwargs in _readings(batch):
            if not _misfit(model, args, kwargs) and runs(model, args, kwargs):
                return ExampleInputs(args, kwargs, "training_data")
    for own in described_inputs(model):
        if not _misfit(model, (), own) and runs(model, (), own):
            return ExampleInputs((), own, "model")
    return None


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
    from torch.utils.data import default_collate

    if isinstance(data, Iterator):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return (collate_fn or default_collate)(_first_samples(data))
    except Exception:  # a dataset may do anything; the model's own description is next
        logger.info("the first batch of training_data cannot be used to trace the model", exc_info=True)
        return None


def _first_samples(data: Any) -> list[Any]:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return [data[index] for index in range(min(_SAMPLES, len(data)))]
    return [sample for sample, _ in zip(iter(data), range(_SAMPLES), strict=False)]


def _misfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
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
