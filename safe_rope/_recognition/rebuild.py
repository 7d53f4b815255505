"""Run a module's own constructor again, with nothing intercepted, to learn what its authors meant.

`rebuild` runs a stock constructor on CPU, in FP32, and tells of every tensor that the module keeps where its
values come from. Parameters are on the meta device, because none of their values is wanted, and a whole model
may be asked for.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope import constructors
from safe_rope._base import bytecode
from safe_rope._base.random_states import random_states_kept
from safe_rope._base.registrations import on_parameter
from safe_rope._base.torch_private import Dispatched, storage_key
from safe_rope._base.uninterrupted import uninterrupted
from safe_rope._recognition.arguments import Arguments, copied_container
from safe_rope._recognition.conditions import Conditions, replaying
from safe_rope._recognition.given_modules import without_modules
from safe_rope._recognition.holdings import entries, get_table, nested
from safe_rope._recognition.outside import remembering_in
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.tables import (
    is_finished,
    is_handed_on,
    is_never_turned,
    is_table_of,
    own_tensors,
)
from safe_rope._recognition.untouched import Before, Untouched
from safe_rope._recognition.waves import FEWEST, rises_or_falls

_thread = threading.local()
_Context = Callable[[], contextlib.AbstractContextManager[None]]

_FROZEN = 1 << 20
"""Elements of a frozen parameter that is built for its values."""
_SMALL = 1 << 22
"""Parameters that a class may have to be built again with real ones."""
_UNWRITTEN = -1.34375 * 2.0**-10
"""Every floating dtype holds it, and no table does throughout."""
_LIBRARIES = ("torch.", "transformers.", "builtins", "abc", "typing")


class Rebuilt(NamedTuple):
    """A module as its constructor makes it, and the origin of the tensors of each module in it, by path."""

    module: nn.Module
    origins: dict[tuple[str, str], Origin]
    elsewhere: bool = False
    """Whether the constructor has made tables that no module in it holds: on a class, in a cache."""
    moves: bool = False
    """Whether it has changed anything outside, so that the next time it may make something else."""

    def has_tables(self) -> bool:
        """Whether any module in it holds position tables."""
        return any(self.tables(path) for path, _ in self.module.named_modules())

    def tables(self, path: str = "", above: type | None = None) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return the position tables of the module at ``path``: values, and whether they are finished.

        ``above`` is the class of the module in which the whole is, where that is known.
        """
        module = self.module.get_submodule(path)
        found = {}
        for name, tensor in own_tensors(module):
            # What no operation of torch's has been seen to make comes from NumPy or from a script.
            origin = self.origins.get((path, name)) or Origin.LITERAL
            if not origin & Origin.EMPTY and is_table_of(module, name, tensor, origin):
                ready = is_finished(self._reader(path) or above, name, origin, tensor)
                ready |= is_never_turned(module, name, origin)
                ready &= not is_handed_on(module, name, tensor, self._parent(path) or above)
                found[name] = (tensor.detach(), ready and tensor.numel() > 1)
        return found

    def nested(self, path: str = "") -> dict[str, tuple[torch.Tensor, bool]]:
        """Return as `tables` does what of the module at ``path`` is in containers inside of containers."""
        module, found = self.module.get_submodule(path), {}
        for name, tensor in nested(module):
            origin = self.origins.get((path, name)) or Origin.LITERAL
            if is_table_of(module, name, tensor, origin) or _may_be_a_table(tensor, origin):
                found[name] = tensor.detach(), is_finished(self._reader(path), name, origin, tensor)
        return found

    def _parent(self, path: str) -> type | None:
        """The class of the module around that at ``path``."""
        return type(self.module.get_submodule(path.rpartition(".")[0])) if path else None

    def _reader(self, path: str) -> type | None:
        """The class whose code reads the tables at ``path``: of a mere holder one above, if there is any."""
        names = path.split(".") if path else []
        for depth in range(len(names), -1, -1):
            cls = type(self.module.get_submodule(".".join(names[:depth])))
            if not (cls.__module__.startswith("torch.") or bytecode.only_hands_out(cls)):
                return cls
        return None

    def empty(self, path: str) -> list[str]:
        """Names of the tensors of the module at ``path`` that its constructor has not filled."""
        return [name for (of, name), origin in self.origins.items() if of == path and origin & Origin.EMPTY]

    def unseen(self) -> list[tuple[str, str]]:
        """Paths and names of memory that no operation has been seen to make, as ``torch.Tensor(8)``."""
        parts = self.module.named_modules()
        held = ((path, name, value) for path, part in parts for name, value in own_tensors(part))
        unseen = ((path, name, value) for path, name, value in held if not self.origins.get((path, name)))
        # NumPy's memory cannot be resized.
        return [(path, name) for path, name, value in unseen if value.untyped_storage().resizable()]


def rebuilding() -> bool:
    """Whether this thread is `unwatched`."""
    return getattr(_thread, "depth", 0) > 0


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Have this thread build and call modules that are nobody's: nothing is to be watched or protected."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


@uninterrupted()
def rebuild(
    cls: type[nn.Module],
    arguments: Arguments,
    conditions: Conditions | None = None,
    before: Before | None = None,
    device: torch.device | None = None,
) -> Rebuilt:
    """Build a ``cls`` from ``arguments`` with nothing intercepted, or replay what ``conditions`` did to it.

    Parameters are on the meta device. A class that makes no tables then is built with real ones. ``before``
    is what its constructor could get at when it ran, where that is known; ``device``, where conditions made
    its tensors, whose arithmetic has other last bits than the CPU's.

    Raises:
        Exception: whatever the constructor raises.

    """
    replay = None if conditions is None else functools.partial(replaying, conditions, device)
    build = functools.partial(_rebuild, cls, arguments, replay, before, device)
    parameters: _Context = _parameters_on_meta
    anew = True
    try:
        rebuilt = build(parameters, anew=anew)
    except Exception:  # noqa: BLE001 - a foreign constructor
        try:
            anew = False
            rebuilt = build(parameters, anew=anew)
        except RuntimeError:  # it computes with its parameters, or sets them
            parameters, anew = _few_parameters, True
            rebuilt = build(parameters, anew=anew)
    if _is_small(rebuilt.module) and not rebuilt.has_tables():
        parameters, anew = contextlib.nullcontext, True
        rebuilt = build(parameters, anew=anew)
    if conditions is None and (unseen := rebuilt.unseen()):
        with contextlib.suppress(Exception):
            marked = build(functools.partial(_memory_marked, parameters), anew=anew)
            _note_memory(rebuilt, unseen, marked.module)
    return rebuilt


def _note_memory(rebuilt: Rebuilt, unseen: list[tuple[str, str]], marked: nn.Module) -> None:
    """Note what of ``unseen`` the constructor has not written to, as `_memory_marked` has shown."""
    for path, name in unseen:
        value = get_table(marked.get_submodule(path), name)
        is_there = isinstance(value, torch.Tensor) and not value.is_meta
        if is_there and bool((value == _UNWRITTEN).all()):
            rebuilt.origins[path, name] = Origin.EMPTY


def _is_small(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return len(parameters) > 0 and sum(p.numel() for p in parameters) <= _SMALL


def _rebuild(
    cls: type[nn.Module],
    arguments: Arguments,
    replay: _Context | None,
    before: Before | None,
    device: torch.device | None,
    parameters: _Context,
    *,
    anew: bool,
) -> Rebuilt:
    provenance = Provenance()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unwatched())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(random_states_kept(device))  # it may name one itself
        stack.enter_context(constructors.pristine(follow=False))
        stack.enter_context(constructors.unpartitioned())
        args, kwargs = without_modules(*arguments.fresh())
        stack.enter_context(parameters())
        stack.enter_context(_nothing_remembered(cls))
        held = (*args, *kwargs.values())
        if before is not None:
            stack.enter_context(Untouched(cls, arguments.held()))
            before.put_back()
        context = None if before is None else before.context
        untouched = stack.enter_context(Untouched(cls, held, anew=anew, context=context))
        drawn = random.getstate()
        if replay is not None:
            stack.enter_context(replay())
        stack.enter_context(provenance)
        if replay is None:
            stack.enter_context(constructors.as_imported_from_torch())
        args = tuple(_without_device(value) for value in args)
        kwargs = {name: _without_device(value) for name, value in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = None
        module = untouched.run(cls, *args, **kwargs)
        _keep_what_was_handed(module, held)
        elsewhere = _keeps_elsewhere(module, provenance)
        draws = random.getstate() != drawn
    origins = {
        (path, name): provenance.origin(tensor)
        for path, part in module.named_modules()
        for name, tensor in (*entries(part), *nested(part), *part._parameters.items())
        if tensor is not None
    }
    return Rebuilt(module, origins, elsewhere, moves=untouched.moved or draws)


def _keep_what_was_handed(module: Any, held: Iterable[Any]) -> None:
    """Give modules copies of the containers that a constructor was handed, which are emptied again."""
    handed = {id(value) for value in held if type(value) in (list, dict)}
    for part in module.modules() if handed and isinstance(module, nn.Module) else ():
        kept = {name: copied_container(value) for name, value in vars(part).items() if id(value) in handed}
        vars(part).update(kept)


def _keeps_elsewhere(module: nn.Module, provenance: Provenance) -> bool:
    if not isinstance(module, nn.Module):
        return False
    held = [value for part in module.modules() for _, value in (*entries(part), *nested(part))]
    tensors = [value for value in held if isinstance(value, torch.Tensor) and value.layout == torch.strided]
    places = {storage_key(tensor) for tensor in tensors if not tensor.is_meta}
    parameters = {id(parameter) for parameter in module.parameters()}
    return any(
        id(tensor) not in parameters and _may_be_a_table(tensor, origin) and storage_key(tensor) not in places
        for tensor, origin in provenance.alive()
    )


def _may_be_a_table(tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that is no module's own may hold positions."""
    if tensor.is_meta or tensor.numel() < FEWEST or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(origin & Origin.COUNTED) or (tensor.dim() == 1 and rises_or_falls(tensor))


def _without_device(value: Any) -> Any:
    return None if isinstance(value, torch.device) else value


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread or parameter.is_meta:
            return None
        if not parameter.requires_grad and parameter.numel() <= _FROZEN:
            return None  # it may be a position table
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with on_parameter(to_meta):
        yield


class _Marking(Dispatched):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty and result.is_floating_point():
            result.fill_(_UNWRITTEN)
        return result


@contextlib.contextmanager
def _memory_marked(parameters: _Context) -> Iterator[None]:
    """Let memory that nothing has written to hold `_UNWRITTEN`, also that of ``torch.Tensor(8)``."""
    with parameters(), _Marking():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def _few_parameters() -> Iterator[None]:
    """Let parameters be real, and stop at more than `_SMALL` of them."""
    thread, count = threading.get_ident(), 0

    def counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        if parameter is not None and threading.get_ident() == thread:
            count += parameter.numel()
            if count > _SMALL:
                raise ValueError(f"it has more than {_SMALL} parameters, and computes with them")

    with on_parameter(counted):
        yield


@contextlib.contextmanager
def _nothing_remembered(cls: type) -> Iterator[None]:
    """Let functions beside a class compute anew: what ``functools.lru_cache`` remembers may be damaged."""
    places: list[Any] = []
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.models.") or not base.__module__.startswith(_LIBRARIES):
            places += [base, sys.modules.get(base.__module__)]
    replaced = [
        (place, name, value)
        for place in dict.fromkeys(places)
        for name, value in list(vars(place).items() if place is not None else ())
        if remembering_in(value) is not None
    ]
    try:
        for place, name, value in replaced:
            inner = remembering_in(value).__wrapped__
            anew = functools.lru_cache(maxsize=None)(inner)  # it still has cache_clear() and its like
            setattr(place, name, staticmethod(anew) if isinstance(value, staticmethod) else anew)
        yield
    finally:
        for place, name, value in replaced:
            setattr(place, name, value)
