"""Modules whose class torch derives as a script runs, and classes that have others than modules first."""

from __future__ import annotations

import abc
import copy
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, LENGTH, Holder
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import safe_rope


def turned(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    phase = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), inv_freq.float()).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * phase.cos().to(x.dtype) + torch.cat((-second, first), dim=-1) * phase.sin().to(x.dtype)


class TurningLinear(nn.Linear):
    """Turns what it projects."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM, bias=False)
        self.register_buffer("inv_freq", no_harm.frequencies(), persistent=False)
        nn.init.eye_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(super().forward(x), self.inv_freq)


class Exponential(nn.Module):
    def forward(self, exponent: torch.Tensor) -> torch.Tensor:
        return exponent.exp()


class Parametrized(nn.Module):
    """What is kept are logarithms, in a module of torch's."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", no_harm.frequencies().log())
        parametrize.register_parametrization(self, "inv_freq", Exponential())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(x, self.inv_freq)


class NormedByItself(TurningLinear):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self, "weight")


class ShapedLater(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """A buffer without a shape, which is filled before the first forward."""

    inv_freq: Any

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.parameter.UninitializedBuffer()

    def initialize_parameters(self, x: torch.Tensor) -> None:
        if self.has_uninitialized_params():
            self.inv_freq.materialize((x.shape[-1] // 2,))
            self.inv_freq.copy_(no_harm.frequencies(x.shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(x, self.inv_freq)


X = torch.arange(LENGTH * DIM).reshape(1, LENGTH, DIM).remainder(17).float() / 8
STYLES = pytest.mark.parametrize("make", [Parametrized, NormedByItself, ShapedLater])


@torch.no_grad()
def test_a_parametrization_of_a_protected_module_is_as_in_stock() -> None:
    stock: Any = Holder(TurningLinear())
    parametrizations.weight_norm(stock.rope, "weight")
    true = stock.rope(X)
    model: Any = no_harm.guarded(lambda: Holder(TurningLinear()))[0]
    parametrizations.weight_norm(model.rope, "weight")
    copied: Any = copy.deepcopy(model)
    for one in (model, copied):
        assert torch.equal(one.rope(X), true)
    model.to(BF16)
    for one in (model, copy.deepcopy(model)):
        assert type(one.rope) is type(model.rope)
        assert (one.rope(X.to(BF16)).float() - true).abs().max() < 2**-6 * true.abs().max()
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(model.rope)
    parametrize.remove_parametrizations(model.rope, "weight")
    assert torch.equal(no_harm.in_full_precision(model.rope), no_harm.frequencies())


@STYLES
@pytest.mark.parametrize("load", ["FP32", "to(bfloat16)", "default dtype"])
@torch.no_grad()
def test_what_torch_derives_while_it_is_built_runs_as_in_stock_and_is_named(
    make: Callable[[], nn.Module], load: str
) -> None:
    model: Any
    model, said = no_harm.guarded(lambda: Holder(make()), load)
    assert said.names("rope")
    stock: Any = no_harm.LOADS[load](lambda: Holder(make()))
    x = X if load == "FP32" else X.to(BF16)
    assert model.rope(x).dtype == stock.rope(x).dtype
    assert torch.equal(model.rope(x), stock.rope(x))


@STYLES
def test_protect_and_the_audit_take_what_torch_has_derived(make: Callable[[], nn.Module]) -> None:
    model = Holder(make()).to(BF16)
    assert no_harm.protected(model).names("rope")
    safe_rope.audit(model)


class Interface(abc.ABC):
    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Slotted:
    __slots__ = ()


Kind = TypeVar("Kind")


class Turning(nn.Module):
    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", no_harm.frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(x, self.inv_freq)


class OfInterface(Interface, Turning):
    forward = Turning.forward


class OfAbc(abc.ABC, Turning): ...


class OfGeneric(Generic[Kind], Turning): ...


class OfSlotted(Slotted, Turning): ...


class OfOneWithMore(Interface, Turning):
    __slots__ = ("more",)
    forward = Turning.forward


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cls", [OfInterface, OfAbc, OfGeneric, OfSlotted, OfOneWithMore])
def test_a_first_base_without_a_dict_hinders_no_protection(cls: Any, late: bool) -> None:
    """Python gives an object no class with another layout; the first base decides over that."""
    torch.manual_seed(0)
    x = torch.randn(1, LENGTH, DIM)
    expected = cls()(x)
    if late:
        module = cls()
        assert not safe_rope.protect(module).unprotected
    else:
        with safe_rope.guard() as session:
            module = cls()
        assert not session.report.unprotected
    module.to(BF16)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(one, cls)
        assert torch.equal(one(x), expected)
    assert safe_rope.audit(module).verdict == "ok"
    again = type("Again", (type(module),), {})
    assert again.__mro__[1:] == type(module).__mro__
