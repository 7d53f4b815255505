"""Where a module keeps its tensors: buffers, attributes, and one level into what it keeps that is no module.

A name with a dot is an entry of a list, tuple, dict or plain object: ``cache.0``, ``tables.cos``. Those
``nn.Module`` neither casts, moves nor saves, but what a constructor puts there is as wrong as its buffers.
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
import types
from collections.abc import Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from safe_rope._base.containers import held_in, length_of
from safe_rope._base.functions import filled_cells

OF_TORCH = frozenset(vars(nn.Module()))
"""Names of the attributes that torch gives each module."""
_PLAIN = frozenset({bool, int, float, str, type(None)})
_KEYS = (str, int, float, enum.Enum)
_KEYS_BESIDE = (tuple, torch.dtype, torch.device)  # of what nothing keeps, such as a cache by (length, dtype)
_LONGEST = 256
_DEEPEST = 1


def entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything that may be a tensor and is no parameter."""
    if module._buffers:
        yield from ((name, value) for name, value in module._buffers.items() if not has_no_shape(value))
    # Another thread may add an attribute. Most have nothing to tell, and each module of a model is asked.
    for name, value in list(vars(module).items()):
        kind = _kind(type(value))  # type: ignore[arg-type]
        if kind is None or name in OF_TORCH:
            continue
        if kind is _Kind.TENSOR:
            if not has_no_shape(value):
                yield name, value
        elif _may_be_looked_into(module, name, value, kind):
            for key, inner in _items(value):
                if issubclass(type(inner), torch.Tensor):  # isinstance asks what a weak proxy stands for
                    yield f"{name}.{key}", inner


def nested(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the tensors in containers inside of containers, where `entries` does not look.

    Those in a closure of a function that the module keeps, among what `functools.partial` has bound there, or
    under a key that is a tuple, are among them.
    """
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType | functools.partial):
            yield from _inside(name, value)
            continue
        kind = _kind(type(value))  # type: ignore[arg-type]
        if kind in (None, _Kind.TENSOR) or name in OF_TORCH:
            continue
        if not _may_be_looked_into(module, name, value, kind):
            continue
        for key, inner in _items(value):
            yield from _inside(f"{name}.{key}", inner)
        if isinstance(value, dict):
            others = {str(key): inner for key, inner in dict.items(value) if isinstance(key, _KEYS_BESIDE)}
            yield from _inside(name, others)


def _inside(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is in a container or in a closure, and in what is in there."""
    cls = type(value)
    held: Iterable[tuple[str, Any]] = ()
    if issubclass(cls, list | tuple | dict) and length_of(value) <= _LONGEST:
        held = _items(value)
    elif cls is types.FunctionType and value.__closure__:
        held = _closed_over(value)
    elif issubclass(cls, functools.partial):
        held = [("func", value.func), *_items(value.args), *_items(value.keywords)]
    for key, inner in held:
        if issubclass(type(inner), torch.Tensor):
            if not has_no_shape(inner):
                yield f"{name}.{key}", inner
        elif depth < _DEEPEST:
            yield from _inside(f"{name}.{key}", inner, depth + 1)


def inside(module: nn.Module, name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return what is in something that a module keeps by that name: a container, an object or a function."""
    cls = type(value)
    if issubclass(cls, functools.partial):
        return [("func", value.func), *_items(value.args), *_items(value.keywords)]
    if cls is types.MethodType:
        return [("self", value.__self__), ("func", value.__func__)]
    if cls is types.FunctionType:
        return _closed_over(value)
    if issubclass(cls, set | frozenset):
        held = held_in(value)
        return [(str(at), one) for at, one in enumerate(held)] if len(held) <= _LONGEST else ()
    kind = _kind(cls)  # type: ignore[arg-type]
    if kind is None or kind is _Kind.TENSOR or not _may_be_looked_into(module, name, value, kind):
        return ()
    return _items(value)


def _closed_over(function: types.FunctionType) -> list[tuple[str, Any]]:
    names = function.__code__.co_freevars
    return [(key, cell.cell_contents) for key, cell in zip(names, filled_cells(function), strict=False)]


def attributes(module: nn.Module) -> list[Any]:
    """Return what a module keeps besides what torch does: parameters, buffers, modules and hooks."""
    return [value for name, value in list(vars(module).items()) if name not in OF_TORCH]


def keeps_nothing(module: nn.Module) -> bool:
    """Whether the types of what a module keeps say that `entries` and `unfilled` are empty."""
    return not module._buffers and keep_nothing(*kept_types(module))


def kept_types(module: nn.Module) -> tuple[Any, tuple[str, ...], tuple[Any, ...]]:
    """Return a module's class, and the names and types of what it keeps."""
    held = vars(module)
    return type(module), tuple(held), tuple(map(type, held.values()))


@functools.lru_cache(maxsize=4096)
def keep_nothing(cls: Any, names: tuple[str, ...], types: tuple[Any, ...]) -> bool:
    """Whether modules without buffers that keep values of these types keep nothing that may be a tensor."""
    kinds = [(name, kind) for name, kind in zip(names, types, strict=False) if name not in OF_TORCH]
    holds = (_kind(kind) is not None and not _is_closed(cls, name, kind) for name, kind in kinds)
    return not any(kind is type(None) for _, kind in kinds) and not any(holds)


def has_no_shape(value: torch.Tensor | None) -> bool:
    """Whether a tensor has no shape yet (`torch.nn.modules.lazy.LazyModuleMixin`): it answers nothing."""
    return value is not None and is_lazy(value)


def unfilled(module: nn.Module) -> list[str]:
    """Names of the buffers and attributes that are None."""
    return [
        name
        for places in (module._buffers, vars(module))
        for name, value in places.items()
        if value is None and name not in OF_TORCH
    ]


def is_inside(name: str) -> bool:
    """Whether ``name`` is of a tensor in a container, which nothing but the module's own code reaches."""
    return "." in name


def get_table(module: nn.Module, name: str) -> Any:
    """Return what `entries` calls ``name``, None where it is no more."""
    # Dynamo before torch 2.5 takes no ``vars`` of a module in a graph, and no buffer needs it.
    direct = module._buffers[name] if name in module._buffers else vars(module).get(name)
    if direct is not None or not is_inside(name):
        return direct
    owner, _, key = name.partition(".")
    return dict(_items(vars(module).get(owner))).get(key)


def set_table(module: nn.Module, name: str, value: Any) -> None:
    """Put a value where `get_table` finds it, past ``__setattr__``."""
    if name in module._buffers:
        module._buffers[name] = value
    elif is_inside(name):
        owner, _, key = name.partition(".")
        _put(module, owner, key, value)
    else:
        vars(module)[name] = value


def twin(module: nn.Module, stock: type[nn.Module], tables: Iterable[str] | None = None) -> nn.Module:
    """Return a ``stock`` with the module's attributes: what is assigned in one is not in the other.

    Args:
        module: any module.
        stock: the class of the twin.
        tables: names of the tables that the twin is to have for itself: only containers that hold those are
            copied, any other is shared. None for all containers.

    """
    other: nn.Module = object.__new__(stock)  # a class's own __new__ may hand out an instance that lives
    attributes = vars(other)
    attributes.update(vars(module))
    for name in tuple(attributes) if tables is None else _owners(tables) & attributes.keys():
        if type(attributes[name]) not in _PLAIN and name not in OF_TORCH:
            attributes[name] = _apart(attributes[name], objects=tables is not None)
    attributes["_buffers"] = module._buffers.copy()
    for name in slots(module):
        object.__setattr__(other, name, getattr(module, name))
    return other


def _owners(tables: Iterable[str]) -> set[str]:
    """Names of the containers that hold any of these tables."""
    owners = set()
    for name in tables:
        if "." in name:
            owners.add(name.partition(".")[0])
    return owners


def slots(owner: Any) -> list[str]:
    """Names of the ``__slots__`` of a module, or of what it keeps, that are filled."""
    cls: Any = type(owner)
    names = _slots(cls)
    return [name for name in names if hasattr(owner, name)] if names else []


def has_slots(cls: Any) -> bool:
    """Whether a class has ``__slots__``, or one of those that it is derived from."""
    return bool(_slots(cls))


@functools.lru_cache(maxsize=4096)
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(
        name
        for base in cls.__mro__
        for name, value in tuple(vars(base).items())  # another thread may add an attribute
        if isinstance(value, types.MemberDescriptorType)
    )


class Held(NamedTuple):
    """What a module holds: attributes, buffers, slots, and by name the containers that hold tables."""

    attributes: dict[str, Any]
    buffers: dict[str, Any]
    slots: dict[str, Any]
    containers: dict[str, Any]


def held_by(module: nn.Module, tables: Iterable[str]) -> Held:
    """Return what a module holds now, with copies of the containers that hold any of these tables."""
    attributes, owners = vars(module).copy(), _owners(tables)
    kind: Any = type(module)
    filled = {name: getattr(module, name) for name in slots(module)} if _slots(kind) else {}
    containers = {name: _apart(attributes.get(name), objects=True) for name in owners} if owners else {}
    return Held(attributes, module._buffers.copy(), filled, containers)


def take_back(module: nn.Module, other: nn.Module, tables: Collection[str], before: Held) -> None:
    """Take over what was assigned or deleted in a twin, which held ``before``, except its tables."""
    kind: Any = type(other)
    held, buffers = vars(other), other._buffers
    attributes, had, filled, containers = before
    if list(held) != list(attributes) or not all(map(operator.is_, held.values(), attributes.values())):
        _take(vars(module), held, attributes, {"_buffers", *tables, *containers})
    if list(buffers) != list(had) or not all(map(operator.is_, buffers.values(), had.values())):
        _take(module._buffers, buffers, had, tables)
    for name, was in containers.items():
        if isinstance(value := held.get(name), torch.Tensor):
            vars(module)[name] = value
        else:
            inside = {n.partition(".")[2] for n in tables if n.partition(".")[0] == name}
            _take_entries(module, name, value, was, inside)
    for name in slots(other) if _slots(kind) else ():
        if filled.get(name, other) is not (value := getattr(other, name)):
            object.__setattr__(module, name, value)


def _take(real: dict[Any, Any], held: dict[Any, Any], before: dict[Any, Any], apart: Collection[str]) -> None:
    """Change a dictionary as another was changed that was as ``before``, except what is ``apart``."""
    for key, value in held.items():
        if str(key) not in apart and before.get(key, held) is not value:
            real[key] = value
    for key in before.keys() - held.keys():
        if str(key) not in apart:
            real.pop(key, None)


def _take_entries(module: nn.Module, name: str, changed: Any, before: Any, tables: set[str]) -> None:
    real: Any = vars(module).get(name)
    kind: Any = type(real)
    if isinstance(real, dict) and isinstance(changed, dict):
        _take(real, changed, before if isinstance(before, dict) else {}, tables)
    elif isinstance(real, list | tuple) and isinstance(changed, list | tuple):
        was = dict(_items(before))
        for key, value in _items(changed):
            if key not in tables and int(key) < len(real) and was.get(key, changed) is not value:
                _put(module, name, key, value)
        if isinstance(real, list):
            real.extend(changed[len(before) :])
    elif isinstance(real, SimpleNamespace) or _kind(kind) is _Kind.OBJECT:
        was = dict(_items(before))
        for key, value in _items(changed):
            if key not in tables and was.get(key, changed) is not value:
                object.__setattr__(real, key, value)


class _Kind(enum.Enum):
    TENSOR = enum.auto()
    CONTAINER = enum.auto()
    NAMESPACE = enum.auto()
    OBJECT = enum.auto()


@functools.lru_cache(maxsize=4096)
def _kind(cls: Any) -> _Kind | None:
    """What a value of that class may hold tensors as; None for one that holds none."""
    # torch.Tensor and configurations answer isinstance slowly.
    if issubclass(cls, torch.Tensor):
        return _Kind.TENSOR
    if issubclass(cls, list | tuple | dict):
        return _Kind.CONTAINER
    if issubclass(cls, SimpleNamespace):
        return _Kind.NAMESPACE
    is_plain = bool(cls.__dictoffset__ or _slots(cls)) and not issubclass(cls, nn.Module | type)
    return _Kind.OBJECT if is_plain else None


def _may_be_looked_into(module: nn.Module, name: str, value: Any, kind: _Kind) -> bool:
    if kind is _Kind.CONTAINER:
        return 0 < length_of(value) <= _LONGEST
    return not _is_closed(type(module), name, type(value))


def _is_closed(holder: Any, name: str, cls: Any) -> bool:
    """Whether an object is none from the same file as its holder, or a configuration."""
    # Engines and wrappers hold whole optimizers.
    return _kind(cls) is _Kind.OBJECT and (name.endswith("config") or cls.__module__ != holder.__module__)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for index, inner in enumerate(held_in(value)):
            yield str(index), inner
    elif isinstance(value, dict):
        for key, inner in dict.items(value):
            if isinstance(key, _KEYS):
                yield str(key), inner
    else:
        yield from getattr(value, "__dict__", {}).items()
        yield from ((name, getattr(value, name)) for name in slots(value) if name != "__dict__")


def _put(module: nn.Module, owner: str, key: str, value: Any) -> None:
    container = vars(module).get(owner)
    if isinstance(container, list):
        container[int(key)] = value
    elif isinstance(container, tuple):
        changed = [value if str(index) == key else inner for index, inner in enumerate(container)]
        made: Any = getattr(container, "_make", tuple)  # a named tuple stays one
        vars(module)[owner] = made(changed)
    elif isinstance(container, dict):
        container[next((own for own in container if str(own) == key), key)] = value
    elif container is not None and key in slots(container):
        object.__setattr__(container, key, value)  # a frozen dataclass refuses its own
    elif container is not None:
        vars(container)[key] = value


def _apart(value: Any, objects: bool) -> Any:
    kind: Any = type(value)
    if isinstance(value, list | dict | SimpleNamespace):
        return copy.copy(value)
    return _duplicate(value) if objects and _kind(kind) is _Kind.OBJECT else value


def _duplicate(value: Any) -> Any:
    """Return another object with the same attributes: an own ``__new__`` may hand out one that lives."""
    kind: Any = type(value)
    try:
        other = object.__new__(kind)
    except TypeError:  # derived from a type of Python's own
        return copy.copy(value)
    if hasattr(value, "__dict__"):
        vars(other).update(vars(value))
    for name in slots(value):
        object.__setattr__(other, name, getattr(value, name))
    return other
