"""The tensors in a value, an operator's arguments or a result, and whether they share memory or have none."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, cuda, nn, strided, view_as_real

from safe_rope._base.torch_private import pytree

_LEAVES = frozenset({Tensor, type(None), bool, int, float, str})


def tensors(value: Any, *, everywhere: bool = True) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, however deeply tuples, lists and dicts hold them, in order.

    ``everywhere``: look into sets and dataclasses, too.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry, everywhere=everywhere)
    elif isinstance(value, list | tuple) or (everywhere and isinstance(value, set | frozenset)):
        for entry in value:
            yield from tensors(entry, everywhere=everywhere)
    elif everywhere and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name, None))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a torch function mode sees.

    The memo of ``Tensor.__deepcopy__`` holds objects of any kind, which are not looked into.
    """
    return tensors(value, everywhere=False)


def in_real_numbers(tensor: Tensor) -> Tensor:
    """Return a complex tensor [...] as real and imaginary parts [..., 2], and any other as it is."""
    return view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_shared(one: Any, other: Tensor) -> bool:
    """Whether ``one`` is a plain tensor or a parameter with values, in the memory of ``other``."""
    if type(one) not in (Tensor, nn.Parameter) or one.is_meta or one.device != other.device:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured where ``tensor`` is: nothing can be read there."""
    return tensor.is_cuda and cuda.is_current_stream_capturing()


def is_given_back(tensor: Tensor) -> bool:
    """Whether the memory of a tensor has been given back, as FSDP does: reading it would end the process."""
    if tensor.is_meta or tensor.layout is not strided or tensor.numel() == 0:
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return False


def are_leaves(values: Iterable[Any]) -> bool:
    """Whether it is certain that none of ``values`` holds others: a quick look at the commonest types."""
    return _LEAVES.issuperset(map(type, values))


def flattened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves in ``value``, those in dataclasses too, and what puts others in their places.

    A dataclass in which a leaf is another comes back as a copy.
    """
    if type(value) is tuple and are_leaves(value):
        return list(value), tuple
    leaves, structure = pytree.tree_flatten(value)
    inner = {index: flattened(_fields(leaf)) for index, leaf in enumerate(leaves) if _is_dataclass(leaf)}
    if not inner:
        return leaves, lambda others: pytree.tree_unflatten(others, structure)
    found = [inner[index][0] if index in inner else [leaf] for index, leaf in enumerate(leaves)]

    def put_back(others: list[Any]) -> Any:
        rest, whole = iter(others), []
        for index, part in enumerate(found):
            own = [next(rest) for _ in part]
            whole.append(_with_fields(leaves[index], inner[index][1](own)) if index in inner else own[0])
        return pytree.tree_unflatten(whole, structure)

    return [leaf for part in found for leaf in part], put_back


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with what ``function`` makes of every tensor in it, those in dataclasses too."""
    leaves, put_back = flattened(value)
    return put_back([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def arguments_flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves in the arguments of a call."""
    given = (*args, *kwargs.values())
    return list(given) if are_leaves(given) else flattened((args, kwargs))[0]


@contextmanager
def arguments_mapped(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield a call's arguments with what ``function`` makes of every tensor in them.

    What is assigned to the copy of a dataclass meanwhile, or put into that of a list or dictionary, is
    assigned to the original, or put there, afterwards.
    """
    if are_leaves((*args, *kwargs.values())):
        named = mapped(function, tuple(kwargs.values()))
        yield mapped(function, args), dict(zip(kwargs, named, strict=True))
        return
    given = args, kwargs
    changed = mapped(function, given)
    pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(changed), strict=True)
    copies = [(own, other, _fields(other)) for own, other in pairs if _is_dataclass(own) and own is not other]
    places = list(_places(given, changed))
    contents = [(own, other, _content(other)) for own, other in places if type(own) in (list, dict)]
    yield changed
    for own, other, before in copies:
        for name, now in _fields(other).items():
            if now is not before[name]:
                object.__setattr__(own, name, now)
    originals = {id(other): own for own, other in places}
    for own, other, content in contents:
        now = _content(other)
        if len(now) != len(content) or any(map(operator.is_not, now, content)):
            back = [originals.get(id(value), value) for value in now]
            own.clear()
            if type(own) is list:
                own.extend(back)
            else:
                own.update(zip(other, back[len(other) :], strict=True))


def _places(given: Any, changed: Any) -> Iterator[tuple[Any, Any]]:
    """Yield lists, dictionaries, tuples and what is in them, each with what stands in its place."""
    yield given, changed
    if type(given) in (list, tuple, dict):
        inner = (given.values(), changed.values()) if type(given) is dict else (given, changed)
        for own, other in zip(*inner, strict=True):
            yield from _places(own, other)


def _content(value: Any) -> list[Any]:
    return [*value, *value.values()] if type(value) is dict else list(value)


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and not isinstance(value, nn.Module)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name, None) for name in type(value).__dataclass_fields__}


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = {name: new for name, new in fields.items() if new is not getattr(value, name, None)}
    if not changed:
        return value
    duplicate = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(duplicate, name, new)  # it may be frozen
    return duplicate


def in_numbers(tensor: Tensor, rows: int) -> Tensor | None:
    """Return what the first ``rows`` of a quantised tensor stand for, detached, and any other as it is.

    Of a ``DTensor`` this rank's part. None where it does not tell: somebody's class may refuse any operator.
    """
    tensor = local_part(tensor)
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return tensor
    for first in (rows, None):
        with suppress(Exception):  # whatever somebody's class raises
            whole = tensor.detach()
            numbers = (whole if first is None else whole[:first]).dequantize()
            if type(numbers) is Tensor:
                return numbers
    return None


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which this rank has a part, as FSDP's second form makes them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Tensor:
    """Return what this rank has of a ``DTensor``, and any other tensor as it is.

    Operators of a ``DTensor`` talk to the other ranks, or are refused.
    """
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return part


def part_of_rank(values: Tensor, like: Any) -> Tensor | None:
    """Return what of ``values``, which each rank has, is this rank's of the ``DTensor`` ``like``.

    None where it is not made of whole parts of dimensions, each one after the other.
    """
    mesh = like.device_mesh
    for count, rank, placement in zip(mesh.shape, mesh.get_coordinate() or (), like.placements, strict=False):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            return None
        parts = values.chunk(count, placement.dim)
        values = parts[rank] if rank < len(parts) else values.narrow(placement.dim, 0, 0)
    return values if values.shape == like.to_local().shape else None
