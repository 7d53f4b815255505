"""Run a module's own constructor again, with nothing intercepted, to learn what its authors meant.

`Constructions` remembers the arguments that modules are built with. `rebuild` runs a stock constructor on
CPU, in FP32, with parameters on the meta device (none of theirs is wanted, and a whole model may be asked
for), and tells of every tensor that the module keeps where its values come from.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from safe_rope import constructors
from safe_rope._holdings import entries, unfilled
from safe_rope._provenance import Origin, Provenance

_thread = threading.local()

# What is counted out and no position all the same: windows and filters of a spectrogram, noise schedules,
# bounds, statistics. The names are a supplement to where the values come from.
_NO_POSITION = re.compile(
    r"running_(mean|var)|window|stft|mel|filter|fbank|kernel|lowpass|resampl|clip|noise|beta|alpha|sigma|"
    r"timestep(s)?$|schedule|quantil|boundar|bucket|mask|(^|_)(min|max)(_|$)|(^|_)(mean|std|scale)$|"
    r"(^|(?<!alibi)(?<!position)_)bias$|"
    r"taps|fir$|anchor|codebook|cluster"
)
_FREQUENCIES = re.compile(r"(^|_)inv_freq$")
_ALWAYS = re.compile(r"(^|_)(inv_freq|cos_cached|sin_cached)$")
_POSITION = re.compile(
    r"pos|freq|rope|rotary|(^|_)(sin|cos)(_|$)|sinusoid|alibi|slope|coord|timescale|period|distance"
)
# What is still to be multiplied by positions; anything else (a decay, a slope) is used as it is.
_FREQUENCY = re.compile(r"freq|timescale|theta|omega|period|div_term|(^|_)inv_|angle|phase")

_FROZEN = 4096
_LIBRARIES = ("torch.", "transformers.", "builtins", "abc", "typing")
# Their constructors set up processes, optimizers and hooks: they must never be run twice.
_NEVER_AGAIN = ("torch.", "deepspeed.", "accelerate.", "peft.")
_REMEMBERING = type(functools.lru_cache(lambda: None))


class Arguments(NamedTuple):
    """What a constructor was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Rebuilt(NamedTuple):
    """A module as its constructor makes it, and the origin of the tensors of each module in it, by path."""

    module: nn.Module
    origins: dict[tuple[str, str], Origin]

    def tables(self, path: str = "") -> dict[str, tuple[torch.Tensor, bool]]:
        """Return the position tables of the module at ``path``: values, and whether they are finished."""
        module = self.module.get_submodule(path)
        found = {}
        for name, tensor in own_tensors(module):
            origin = self.origins.get((path, name), Origin.NONE)
            if is_position_table(name, tensor, origin):
                ready = bool(origin & Origin.FINISHED) or not _FREQUENCY.search(name.lower())
                found[name] = (tensor.detach(), ready)
        return found


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The module's own tensors (see `_holdings`) that are floating or complex, and no parameters."""
    return [
        (name, value)
        for name, value in entries(module)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and (value.is_floating_point() or value.is_complex())
        and value.numel() > 1
    ]


def may_hold_positions(module: nn.Module) -> bool:
    """Whether it is worth a look where the module's tensors come from."""
    if type(module).__module__.startswith(_NEVER_AGAIN):
        return False
    if any(not _NO_POSITION.search(name.lower()) for name, _ in own_tensors(module)):
        return True
    return bool(made_later(module))


def made_later(module: nn.Module) -> list[str]:
    """Names of frequencies that the module has a place for and makes in its first forward."""
    return [name for name in unfilled(module) if _FREQUENCIES.search(name)]


def is_position_table(name: str, tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that a constructor made is a position table: by origin, supplemented by name."""
    if origin & Origin.RANDOM or tensor.is_meta or _NO_POSITION.search(name.lower()):
        return False
    if _ALWAYS.search(name):
        return bool(torch.isfinite(tensor.abs()).all())
    counted = bool(origin & Origin.COUNTED)
    if not (counted or _POSITION.search(name.lower())):
        return False
    values = tensor.reshape(-1)
    if tensor.is_floating_point() and values.numel() < 4096 and len(set(values.tolist())) < 3 and not counted:
        return False  # one constant, or a mask
    return not bool((values == values[0]).all()) and bool(torch.isfinite(values.abs()).all())


# ---- what constructors are called with -----------------------------------------------------------------


class Constructions:
    """Remembers what the constructors of modules are called with, while it is open."""

    def __init__(self) -> None:
        self._arguments: weakref.WeakKeyDictionary[nn.Module, Arguments] = weakref.WeakKeyDictionary()

    def note(self, module: nn.Module, frame: FrameType) -> None:
        """Read the arguments of the outermost constructor of ``module`` that is running from its frame."""
        arguments = _arguments_in(module, frame)
        if arguments is not None:
            self._arguments[module] = arguments

    def pop(self, module: nn.Module) -> Arguments | None:
        """Return and forget what ``module`` was built with."""
        return self._arguments.pop(module, None)

    def waiting(self) -> list[nn.Module]:
        """The modules that nobody has asked for yet."""
        return list(self._arguments)


def _arguments_in(module: nn.Module, frame: FrameType | None) -> Arguments | None:
    outermost = None
    # The chain of constructors of this object: its own, its bases', and wrappers around each.
    while frame is not None and _first_argument(frame) is module:
        if frame.f_code.co_name == "__init__":
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else _call_of(outermost)


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    if code.co_argcount == 0 and not code.co_flags & inspect.CO_VARARGS:
        return None
    name = code.co_varnames[0]
    values = frame.f_locals
    first = values.get(name)
    if code.co_argcount == 0 and isinstance(first, tuple):
        return first[0] if first else None
    return first


def _call_of(frame: FrameType) -> Arguments | None:
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames
    count, keywords = code.co_argcount, code.co_kwonlyargcount
    rest: tuple[Any, ...] = ()
    more: dict[str, Any] = {}
    at = count + keywords
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(names[at], ())
        at += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        more = values.get(names[at], {})
    if any(name not in values for name in names[1 : count + keywords]):
        return None
    if count == 0:
        rest = rest[1:]
    elif not rest and code.co_posonlyargcount <= 1:
        by_name = {name: values[name] for name in names[1 : count + keywords]}
        return Arguments((), {**by_name, **more})
    args = (*(values[name] for name in names[1:count]), *rest)
    return Arguments(args, {**{name: values[name] for name in names[count : count + keywords]}, **more})


# ---- building again ------------------------------------------------------------------------------------


def rebuilding() -> bool:
    """Whether this thread is inside `rebuild`, where nothing is to be watched or protected."""
    return getattr(_thread, "depth", 0) > 0


def rebuild(cls: type[nn.Module], arguments: Arguments) -> Rebuilt:
    """Build a ``cls`` from ``arguments`` with nothing intercepted.

    Raises:
        Exception: whatever the constructor raises.

    """
    provenance = Provenance()
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(constructors.pristine(follow=False))
            stack.enter_context(constructors.unpartitioned())
            stack.enter_context(_parameters_on_meta())
            stack.enter_context(_nothing_remembered(cls))
            stack.enter_context(provenance)
            args = tuple(_without_device(value) for value in arguments.args)
            kwargs = {name: _without_device(value) for name, value in arguments.kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = None
            module = cls(*args, **kwargs)
    finally:
        _thread.depth -= 1
    origins = {
        (path, name): provenance.origin(tensor)
        for path, part in module.named_modules()
        for name, tensor in own_tensors(part)
    }
    return Rebuilt(module, origins)


def _without_device(value: Any) -> Any:
    return None if isinstance(value, torch.device) else value


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread or parameter.is_meta:
            return None
        if not parameter.requires_grad and parameter.numel() <= _FROZEN:
            return None  # it may be frequencies
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook: Any = to_meta  # Any: the annotation there leaves out that it may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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
        if isinstance(getattr(value, "__func__", value), _REMEMBERING)
    ]
    try:
        for place, name, value in replaced:
            inner = getattr(value, "__func__", value).__wrapped__
            setattr(place, name, staticmethod(inner) if isinstance(value, staticmethod) else inner)
        yield
    finally:
        for place, name, value in replaced:
            setattr(place, name, value)


# ---- arguments that nobody saw -------------------------------------------------------------------------


def infer_arguments(module: nn.Module, stock: type[nn.Module]) -> Arguments | None:
    """Tell from its attributes what a module was built with; None where they do not say."""
    kwargs = {}
    try:
        parameters = list(inspect.signature(stock.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in module.__dict__:
            kwargs[parameter.name] = module.__dict__[parameter.name]
        elif parameter.default is parameter.empty:
            return None
    return Arguments((), kwargs)
