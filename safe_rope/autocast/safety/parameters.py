"""A model's parameters by storage: what is tied, what is partitioned, and how large each is as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

WeakStorage: Any = StorageWeakRef
"""Keeps the key of a storage from being used again, and does not keep its memory; not typed by torch."""


@dataclass(eq=False)
class Shared:
    """The parameters that share memory, and so are safe or not together; mostly one.

    Attributes:
        names: every name under which the model reaches them.
        parameters: the distinct parameter objects.
    """

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


def shared_parameters(model: nn.Module) -> list[Shared]:
    """Return ``model``'s parameters, those together whose memory overlaps, in the model's order."""
    found: dict[int, Shared] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = found.setdefault(id(parameter), Shared(parameters=[parameter]))
        group.names.append(name)
    return _join_overlapping(list(found.values()))


def _join_overlapping(groups: list[Shared]) -> list[Shared]:
    # Two parameter objects can be views of one memory: tied by hand, or cut from a larger one.
    by_storage: dict[int, list[tuple[int, int, Shared]]] = {}
    for group in groups:
        place = memory_range(group.parameters[0])
        if place is not None:
            by_storage.setdefault(place[0], []).append((place[1], place[2], group))
    joined: dict[int, Shared] = {}
    for places in by_storage.values():
        reach, owner = -1, None
        for start, end, group in sorted(places, key=lambda place: place[:2]):
            if owner is not None and start < reach:
                owner.names += group.names
                owner.parameters += group.parameters
                joined[id(group)] = owner
            else:
                owner = group
            reach = max(reach, end)
    return [group for group in groups if id(group) not in joined]


def storage_of(tensor: Tensor) -> Any:
    """Return the tensor's storage, whose ``_cdata`` is its key; None for a wrapper of other tensors."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def memory_range(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the key of the tensor's storage and the first and last byte + 1 in it; None if it has none."""
    storage = storage_of(tensor)
    if storage is None or not tensor.numel():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return storage._cdata, start, start + int(span) * tensor.element_size()


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has taken the parameter apart, so that the local tensor is not the whole."""
    return hasattr(parameter, "ds_id") and tuple(parameter.shape) != full_shape(parameter)


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: Tensor) -> int:
    """Return the number of elements of the whole parameter."""
    return int(torch.Size(full_shape(parameter)).numel())


def device_of(groups: list[Shared]) -> torch.device:
    """Return where a model of these parameters runs; one on meta where an accelerator is, if there is one."""
    for group in groups:
        if not group.parameters[0].is_meta:
            return group.parameters[0].device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
