"""A model's parameters by storage: what is tied, what is partitioned, and how large each is as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from safe_rope._base.torch_private import storage_key

WeakStorage: Any = StorageWeakRef
"""Keeps the key of a storage from being used again, and does not keep its memory; not typed by torch."""


@dataclass(eq=False)
class Shared:
    """The parameters that share memory, and so are safe or not together; mostly one."""

    names: list[str] = field(default_factory=list)  # every one under which the model reaches them
    parameters: list[nn.Parameter] = field(default_factory=list)  # the distinct objects


def shared_parameters(model: nn.Module) -> list[Shared]:
    """Return ``model``'s parameters, those together whose memory overlaps, in the model's order."""
    found: dict[int, Shared] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), Shared(parameters=[parameter])).names.append(name)
    groups, joined = list(found.values()), set()
    # Two parameter objects can be views of one memory: tied by hand, or cut from a larger one.
    places = [(memory_range(group.parameters[0]) or (0, 0, 0), index) for index, group in enumerate(groups)]
    owner, last, reach = Shared(), 0, 0
    for (storage, start, end), index in sorted(places):
        if storage == last and start < reach:
            owner.names += groups[index].names
            owner.parameters += groups[index].parameters
            joined.add(index)
            reach = max(reach, end)
        else:
            owner, last, reach = groups[index], storage, end
    return [group for index, group in enumerate(groups) if index not in joined]


def held_by(model: nn.Module) -> dict[int, dict[int, nn.Module]]:
    """Return the modules that hold each parameter of ``model`` themselves, all by their ids."""
    held: dict[int, dict[int, nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():  # a model may have a `parameters` of its own
            if parameter is not None:
                held.setdefault(id(parameter), {})[id(module)] = module
    return held


def storage_of(tensor: Tensor) -> Any:
    """Return the tensor's storage; None for a wrapper of other tensors."""
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
    return storage_key(storage), start, start + int(span) * tensor.element_size()


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has taken the parameter apart, so that the local tensor is not the whole."""
    return hasattr(parameter, "ds_id") and tuple(parameter.shape) != full_shape(parameter)


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def device_of(groups: list[Shared]) -> torch.device:
    """Return where a model of these parameters runs; one on meta where an accelerator is, if there is one."""
    for group in groups:
        if not group.parameters[0].is_meta:
            return group.parameters[0].device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
