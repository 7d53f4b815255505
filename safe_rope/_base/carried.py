"""Tensors whose values pickle writes itself, so that they are there as soon as their holder is.

A loader fills tensors when everything else is made (`torch.save`'s format from before torch 1.6), or puts
them where ``map_location`` says, on meta with no values at all.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_packed: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()


class Carried:
    """A base of what holds tensors as attributes: pickle gives them back on CPU, with their values."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _pack(value) for name, value in vars(self).items()}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value.tensor if isinstance(value, Packed) else value)  # copied, not pickled


class Packed:
    """A tensor that pickle writes as bytes, once however many hold it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _unpack, (values.reshape(-1).view(torch.uint8).numpy().tobytes(), values.dtype, values.shape)


def _pack(value: Any) -> Any:
    if type(value) is not Tensor or value.is_meta:
        return value
    # A pickler knows an object again that it keeps alive, and a tensor's number is not given to another.
    return _packed.setdefault(id(value), Packed(value))


def _unpack(values: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not values:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)
