"""Run a module's own constructor again, with nothing intercepted, to learn what its authors meant.

`rebuild` runs a stock constructor on
CPU, in FP32, with parameters on the meta device (none of theirs is wanted, and a whole model may be asked
for), and tells of every tensor that the module keeps where its values come from.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from safe_rope import constructors
from safe_rope._base.dtypes import LOW
from safe_rope._base.registrations import on_parameter
from safe_rope._base.torch_private import storage_key
from safe_rope._recognition.arguments import Arguments
from safe_rope._recognition.holdings import entries, unfilled
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.untouched import Untouched
from safe_rope.constructors._default_dtype import default_dtype

_thread = threading.local()

# What is counted out and no position all the same: windows and filters of a spectrogram, noise schedules,
# bounds, statistics. The names are a supplement to where the values come from.
_NO_POSITION = re.compile(
    r"running_(mean|var)|window|stft|mel|filter|fbank|kernel|lowpass|resampl|clip|noise|beta|alpha|sigma|"
    r"timestep(s)?$|schedule|quantil|boundar|mask|(^|_)(min|max)(_|$)|(^|_)(mean|std)$|"
    r"taps|fir$|anchor|codebook|cluster"
)
# No position unless they are counted out.
_SELDOM = re.compile(r"(^|_)scale$|(^|(?<!alibi)(?<!position)_)bias$|bucket")
_FREQUENCIES = re.compile(r"(^|_)inv_freq$")
_ALWAYS = re.compile(r"(^|_)(inv_freq|cos_cached|sin_cached)$")
_POSITION = re.compile(
    r"pos|freq|rope|rotary|(^|_)(sin|cos)(_|$)|sinusoid|alibi|slope|coord|timescale|period|distance"
)
# What is still to be multiplied by positions; anything else (a decay, a slope) is used as it is.
_FREQUENCY = re.compile(r"freq|timescale|theta|omega|period|div_term|(^|_)inv_|angle|phase")

_FROZEN = 1 << 20
"""Elements of a frozen parameter that is built for its values."""
_FEWEST = 8
_SMALL = 1 << 22
"""Parameters that a class may have to be built again with real ones."""
_LIBRARIES = ("torch.", "transformers.", "builtins", "abc", "typing")
# Their constructors set up processes, optimizers and hooks: they must never be run twice.
_NEVER_AGAIN = ("torch.", "deepspeed.", "accelerate.", "peft.")
_REMEMBERING = type(functools.lru_cache(lambda: None))


class Rebuilt(NamedTuple):
    """A module as its constructor makes it, and the origin of the tensors of each module in it, by path."""

    module: nn.Module
    origins: dict[tuple[str, str], Origin]
    elsewhere: bool = False
    """Whether the constructor has made tables that no module in it holds: on a class, in a closure."""

    def has_tables(self) -> bool:
        """Whether any module in it holds position tables."""
        return any(self.tables(path) for path, _ in self.module.named_modules())

    def tables(self, path: str = "") -> dict[str, tuple[torch.Tensor, bool]]:
        """Return the position tables of the module at ``path``: values, and whether they are finished."""
        module = self.module.get_submodule(path)
        found = {}
        for name, tensor in own_tensors(module):
            origin = self.origins.get((path, name), Origin.NONE)
            if is_position_table(name, tensor, origin):
                ready = bool(origin & Origin.FINISHED) or not is_frequency(name)
                found[name] = (tensor.detach(), ready)
        return found


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The module's own tensors (see `_holdings`) that are floating or complex, and no parameters."""
    return [
        (name, value)
        for name, value in entries(module)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and (value.is_floating_point() or value.is_complex() or _may_be_buckets(name, value))
        and value.numel() > 1
    ]


def _may_be_buckets(name: str, value: torch.Tensor) -> bool:
    return value.dtype in (torch.int32, torch.int64) and bool(_SELDOM.search(name.lower()))


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


def is_frequency(name: str) -> bool:
    """Whether a table of that name is still to be multiplied by positions."""
    return bool(_FREQUENCY.search(name.lower()))


def is_position_table(name: str, tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that a constructor made is a position table: by origin, supplemented by name."""
    if origin & Origin.RANDOM or tensor.is_meta or _NO_POSITION.search(name.lower()):
        return False
    if _ALWAYS.search(name):
        values = tensor.reshape(-1)
        return bool(torch.isfinite(tensor.abs()).all()) and not bool((values == values[0]).all())
    counted = bool(origin & Origin.COUNTED)
    if not counted and _SELDOM.search(name.lower()):
        return False
    if not tensor.is_floating_point() and not tensor.is_complex():
        return counted and bool(origin & Origin.FINISHED)
    if origin & Origin.LITERAL and not counted and _oscillates(tensor):
        return True
    if not (counted or _POSITION.search(name.lower())):
        return False
    values = tensor.reshape(-1)
    if tensor.is_floating_point() and values.numel() < 4096 and len(set(values.tolist())) < 3 and not counted:
        return False  # one constant, or a mask
    return not bool((values == values[0]).all()) and bool(torch.isfinite(values.abs()).all())


def has_position_name(name: str) -> bool:
    """Whether a name says that what it names holds positions."""
    return bool(_ALWAYS.search(name) or _POSITION.search(name.lower()))


def is_empty_table(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has a position table's name and holds what is no number, or stands on meta."""
    if not has_position_name(name) or _NO_POSITION.search(name.lower()):
        return False
    return tensor.is_meta or bool(tensor.isnan().any())


def _oscillates(tensor: torch.Tensor) -> bool:
    """Whether every column of a table [rows, columns] is a sampled sine: x[i + 1] + x[i - 1] is c x[i]."""
    if tensor.dim() < 2 or tensor.shape[-2] < _FEWEST or not tensor.is_floating_point():
        return False
    rows = tensor.reshape(-1, tensor.shape[-2], tensor.shape[-1])[0].double()
    before, middle, after = rows[:-2], rows[1:-1], rows[2:]
    square = (middle * middle).sum(0)
    factor = ((before + after) * middle).sum(0) / square.clamp(min=1e-30)
    rest = (before + after - factor * middle).abs().amax(0)
    turns = bool((rows.std(0) > 1e-2).any())
    return turns and bool((rest < 1e-5).all()) and bool((rows.abs() < 1 + 1e-5).all())


# ---- building again ------------------------------------------------------------------------------------


def rebuilding() -> bool:
    """Whether this thread is inside `rebuild`, where nothing is to be watched or protected."""
    return getattr(_thread, "depth", 0) > 0


class Conditions(NamedTuple):
    """What a constructor ran under: the default dtype, and what lowered the tensors that it made.

    ``lowered`` is zero.Init's dtype, None outside of it. With ``truthful`` a constructor that was called with
    a dtype gave that dtype, as a guard has it. ``spared`` names those that something left alone. ``device``
    is where tensors were made that asked for none.
    """

    default: torch.dtype = torch.float32
    lowered: torch.dtype | None = None
    truthful: bool = True
    spared: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def plain(self) -> bool:
        """Whether nothing was in the way: what the constructor made is what its authors meant."""
        return self.default not in LOW and self.lowered is None and self.device == "cpu"

    def variants(self) -> Iterator[Conditions]:
        """Yield the conditions that cannot be told from these: transformers keeps zero.Init off arange."""
        yield self
        if self.lowered is not None:
            yield self._replace(spared=("arange",))

    @classmethod
    def now(cls) -> Conditions:
        """Return what a constructor that is called by this thread now runs under, with a guard open."""
        device = torch.get_default_device().type
        return cls(torch.get_default_dtype(), constructors.lowered_dtype(), device=device)

    @classmethod
    def usual(cls) -> Iterator[Conditions]:
        """Yield the conditions under which models are built that are damaged."""
        for low in LOW:
            yield cls(low)
            for default, spared in itertools.product((low, torch.float32), ((), ("arange",))):
                yield cls(default, low, False, spared)


def rebuild(cls: type[nn.Module], arguments: Arguments, conditions: Conditions | None = None) -> Rebuilt:
    """Build a ``cls`` from ``arguments`` with nothing intercepted, or replay what ``conditions`` did to it.

    Parameters are on the meta device. A class that makes no tables then is built with real ones.

    Raises:
        Exception: whatever the constructor raises.

    """
    try:
        rebuilt = _rebuild(cls, arguments, conditions, _parameters_on_meta, anew=True)
    except Exception:
        rebuilt = _rebuild(cls, arguments, conditions, _parameters_on_meta, anew=False)
    if _is_small(rebuilt.module) and not rebuilt.has_tables():
        return _rebuild(cls, arguments, conditions, contextlib.nullcontext, anew=True)
    return rebuilt


def _is_small(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return len(parameters) > 0 and sum(p.numel() for p in parameters) <= _SMALL


def _rebuild(
    cls: type[nn.Module],
    arguments: Arguments,
    conditions: Conditions | None,
    parameters: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    anew: bool,
) -> Rebuilt:
    provenance = Provenance()
    args, kwargs = arguments.fresh()
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
            stack.enter_context(parameters())
            stack.enter_context(_nothing_remembered(cls))
            stack.enter_context(Untouched(cls, anew=anew))
            stack.enter_context(_global_state_kept())
            if conditions is not None:
                stack.enter_context(_replaying(conditions))
            stack.enter_context(provenance)
            args = tuple(_without_device(value) for value in args)
            kwargs = {name: _without_device(value) for name, value in kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = None
            module = cls(*args, **kwargs)
            elsewhere = _keeps_elsewhere(module, provenance)
    finally:
        _thread.depth -= 1
    origins = {
        (path, name): provenance.origin(tensor)
        for path, part in module.named_modules()
        for name, tensor in (*own_tensors(part), *part._parameters.items())
        if tensor is not None
    }
    return Rebuilt(module, origins, elsewhere)


def _keeps_elsewhere(module: nn.Module, provenance: Provenance) -> bool:
    if not isinstance(module, nn.Module):
        return False
    held = [tensor for part in module.modules() for _, tensor in own_tensors(part)]
    places = {storage_key(tensor) for tensor in held if not tensor.is_meta}
    parameters = {id(parameter) for parameter in module.parameters()}
    return any(
        origin & Origin.COUNTED
        and tensor.is_floating_point()
        and tensor.numel() >= _FEWEST
        and id(tensor) not in parameters
        and not tensor.is_meta
        and storage_key(tensor) not in places
        for tensor, origin in provenance.alive()
    )


class _Lowering(TorchFunctionMode):
    """Does what zero.Init's constructors do, for one thread and with no global replaced."""

    def __init__(self, conditions: Conditions) -> None:
        super().__init__()
        self.conditions = conditions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in constructors.CONSTRUCTORS or name in self.conditions.spared:
            return result
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        if self.conditions.truthful and kwargs.get("dtype") is not None:
            return result
        return result.to(self.conditions.lowered)


@contextlib.contextmanager
def _replaying(conditions: Conditions) -> Iterator[None]:
    with default_dtype(conditions.default):
        if conditions.lowered is None:
            yield
        else:
            with _Lowering(conditions):
                yield


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """Put back Python's and NumPy's random state, which a constructor may use for its weights."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpys is not None:
            numpy.random.set_state(numpys)


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
            anew = functools.lru_cache(maxsize=None)(inner)  # it still has cache_clear() and its like
            setattr(place, name, staticmethod(anew) if isinstance(value, staticmethod) else anew)
        yield
    finally:
        for place, name, value in replaced:
            setattr(place, name, value)
