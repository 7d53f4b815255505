"""Tables behind objects, descriptors and overridden methods of a module, and what a forward keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, LONGEST, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _tables(dim: int = DIM) -> Pair:
    phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
    return phase.cos(), phase.sin()


def _rows(pair: Any, x: torch.Tensor) -> Pair:
    cos, sin = pair
    return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


def _in_its_dtype(inv_freq: torch.Tensor, length: int) -> Pair:
    phase = torch.outer(torch.arange(length).to(inv_freq.dtype), inv_freq)
    return phase.cos(), phase.sin()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Held(nn.Module):
    """Frequencies in a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Neither assigned to nor listed by ``vars``."""

    cos: torch.Tensor
    sin: torch.Tensor


@style("objects", "slots")
class InSlotsOfADataclass(nn.Module):
    """State as functional libraries pass it around."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State(*_tables())

    def forward(self, x: torch.Tensor) -> Pair:
        return _rows((self.state.cos, self.state.sin), x)


@style("objects", "slots", "_apply", shows="output")
class MapsItsState(nn.Module):
    """Casts and moves go through the state as through a tree, beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.state = State(*_tables())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn)
        self.state = State(fn(self.state.cos), fn(self.state.sin))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (self.state.cos[: x.shape[1]], self.state.sin[: x.shape[1]])
        return _turned(self.q(x), *rows)


@style("objects", "_apply", shows="output")
class MapsItsAttributes(nn.Module):
    """Attributes go where buffers go; what is computed from them has their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.cos, self.sin = _tables()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn)
        self.cos, self.sin = fn(self.cos), fn(self.sin)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _turned(self.q(x), self.cos[: x.shape[1]], self.sin[: x.shape[1]])


@style("objects", "getattr")
class AnswersForNamesItHasNot(nn.Module):
    """``__getattr__`` makes names of what a dictionary holds."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dict(zip(("cos", "sin"), _tables(), strict=True))

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_rows"):
            return self.__dict__["store"][name[:3]]
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rows((self.cos_rows, self.sin_rows), x)


class Registered:
    """Whatever is assigned becomes a buffer of another name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}_of_this"

    def __get__(self, module: nn.Module, owner: type | None = None) -> Any:
        return module._buffers[self.name]

    def __set__(self, module: nn.Module, value: torch.Tensor) -> None:
        module.register_buffer(self.name, value, persistent=False)


@style("objects", "descriptor")
class ByADescriptor(nn.Module):
    cos, sin = Registered(), Registered()

    def __init__(self) -> None:
        super().__init__()
        self.cos, self.sin = _tables()

    def forward(self, x: torch.Tensor) -> Pair:
        return _rows((self.cos, self.sin), x)


class SetUp(type(nn.Module)):  # type: ignore[misc]
    """Calls ``setup`` once an instance is built."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        module = super().__call__(*args, **kwargs)
        module.setup()
        return module


@style("objects", "metaclass", inv_freq="inv_freq", not_on=("meta",))
class SetUpAsInFlax(nn.Module, metaclass=SetUp):
    """There is no constructor."""

    def setup(self) -> None:
        self.register_buffer("inv_freq", _frequencies(), persistent=False)
        self.tables = _tables()

    def forward(self, x: torch.Tensor) -> Pair:
        return _rows(self.tables, x)


class Turn(torch.autograd.Function):
    """Turns back in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


class Computed(Held):
    def forward(self, x: torch.Tensor) -> Pair:
        return _rows(_in_its_dtype(self.inv_freq, x.shape[1]), x)


@style("objects", "autograd", shows="output", inv_freq="rope.inv_freq")
class TurnedByAFunctionOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.rope = Computed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = Turn.apply(self.q(x), *self.rope(x))  # type: ignore[no-untyped-call]
        return turned


@style("kept by forward", "persistent")
class RegistersWhatIsSaved(Held):
    """Its forward registers tables that are saved, in the dtype that inv_freq has by then."""

    def forward(self, x: torch.Tensor) -> Pair:
        if not hasattr(self, "cos_t") or self.cos_t.shape[0] < x.shape[1]:
            cos, sin = _in_its_dtype(self.inv_freq, x.shape[1])
            self.register_buffer("cos_t", cos)
            self.register_buffer("sin_t", sin)
        return self.cos_t[: x.shape[1]], self.sin_t[: x.shape[1]]


@style("kept by forward", "cached property")
class RemembersAProperty(Held):
    """Computed when it is first asked for, from whatever the buffer is by then."""

    @functools.cached_property
    def rope(self) -> Pair:
        return _in_its_dtype(self.inv_freq, LONGEST)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rows(self.rope, x)


_BY_MODULE: weakref.WeakKeyDictionary[nn.Module, Pair] = weakref.WeakKeyDictionary()


@style("kept by forward", "weak", reset=_BY_MODULE.clear)
class RememberedByModule(Held):
    """A dictionary that forgets modules with their last reference."""

    def forward(self, x: torch.Tensor) -> Pair:
        if self not in _BY_MODULE or len(_BY_MODULE[self][0]) < x.shape[1]:
            _BY_MODULE[self] = _in_its_dtype(self.inv_freq, x.shape[1])
        return _rows(_BY_MODULE[self], x)


@style("kept by forward", "with", inv_freq="inv_freq")
class OnlyInsideAWithStatement(Held):
    """The rows of a call are an attribute as long as the call takes."""

    current: Pair | None = None

    @contextlib.contextmanager
    def rope(self, x: torch.Tensor) -> Iterator[None]:
        self.current = _in_its_dtype(self.inv_freq, x.shape[1])
        try:
            yield
        finally:
            self.current = None

    def forward(self, x: torch.Tensor) -> Pair:
        with self.rope(x):
            return _rows(self.current, x)


@style("integers")
class PhasesAsSmallIntegers(nn.Module):
    """Five thousandths of a radian, in 16 bits: no cast harms them, and meta loses them."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).double(), _frequencies(dim).double()) % (2 * math.pi)
        self.register_buffer("steps", (phase * 5000).round().to(torch.int16), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.steps[: x.shape[1]].float() / 5000
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class PhaseTensor(torch.Tensor):
    """A class of tensors of its author's own, which is lost in the first operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if isinstance(result, PhaseTensor) else result


@style("subclass", "phases")
class InATensorOfItsOwnClass(nn.Module):
    """Phases in a tensor of another class than torch's."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("table", phases.as_subclass(PhaseTensor), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.table[: x.shape[1]].float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)
