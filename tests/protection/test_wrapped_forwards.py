"""What wraps a module's forward, keeps it, or holds the module where nothing is registered, is protected."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

import safe_rope

LENGTH, DIM = 300, 16
X = torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16)


class Low(nn.Module):
    """Computes all of it in the dtype of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
        return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rates).sin()


class Static(nn.Module):
    """Has a forward that takes no self."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        rates = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
        return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rates).sin()


class Model(nn.Module):
    """Calls a child beside weights."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.rotary = child
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rotary(x)
        return result


class KeepsTheMethod(Model):
    """Calls what it has taken of its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__(child)
        self.turn = child.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.turn(x)
        return result


class InAList(nn.Module):
    """Holds its child in a list, which keeps it out of its state."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.held = [child, self.proj]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.held[0](x)
        return result


TRUE = Low()(X.float()).bfloat16()


def by_a_lambda(module: Any) -> None:
    inner = module.forward
    module.forward = lambda *args: inner(*args)


def by_a_decorator(module: Any) -> None:
    module.forward = torch.no_grad()(torch.inference_mode(False)(module.forward))


def by_a_partial(module: Any) -> None:
    module.forward = functools.partial(module.forward)


def by_its_method(module: Any) -> None:
    module.forward = types.MethodType(type(module).forward, module)


class Called:
    """An object around a function, as accelerate's that converts outputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def by_an_object(module: Any) -> None:
    module.forward = Called(module.forward)


WRAPPERS = (by_a_lambda, by_a_decorator, by_a_partial, by_its_method, by_an_object)


@pytest.mark.parametrize("make", [Model, KeepsTheMethod, InAList])
@pytest.mark.parametrize("wrap", [None, *WRAPPERS], ids=lambda wrap: getattr(wrap, "__name__", "as it is"))
def test_protect_reaches_it(
    make: Callable[[nn.Module], nn.Module], wrap: Callable[[Any], None] | None
) -> None:
    child = Low()
    if wrap is not None:
        wrap(child)
    model = make(child).bfloat16()
    assert not torch.equal(model(X), TRUE)
    report = safe_rope.protect(model)
    assert not report.unprotected
    assert torch.equal(model(X), TRUE)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_wraps_a_protected_one_is_as_before(wrap: Callable[[Any], None]) -> None:
    with safe_rope.guard():
        model = Model(Low())
    wrap(model.rotary)
    assert torch.equal(model.bfloat16()(X), TRUE)


def test_hooks_of_accelerate_call_the_protected_one() -> None:
    model = Model(Low()).bfloat16()
    cpu_offload(model, execution_device=torch.device("cpu"))
    safe_rope.protect(model)
    assert torch.equal(model(X), TRUE)


def test_a_table_that_is_protected_below_hooks_of_accelerate_is_ok() -> None:
    class Rows(nn.Module):
        """Is asked for rows by what nobody else has: sizes of a batch."""

        def __init__(self) -> None:
            super().__init__()
            rates = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
            phases = torch.outer(torch.arange(LENGTH), rates)
            self.register_buffer("weights", torch.cat([phases.sin(), phases.cos()], -1), persistent=False)

        def forward(self, sizes: list[int], begin: int) -> torch.Tensor:
            rows: torch.Tensor = self.weights[begin : begin + sizes[1]]
            return rows.expand(*sizes, DIM)

    model = Model(Rows())
    true = model.rotary.weights.clone()
    cpu_offload(model.bfloat16(), execution_device=torch.device("cpu"))
    assert not safe_rope.audit(model).ok
    safe_rope.protect(model)
    assert torch.equal(model.rotary([2, 9], 3).bfloat16(), true[3:12].bfloat16().expand(2, 9, DIM))
    report = safe_rope.audit(model)
    assert report.ok, str(report)


def test_the_method_of_a_base_stays_that_of_the_base() -> None:
    class Louder(Low):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = Model(Louder()).bfloat16()
    model.rotary.forward = types.MethodType(Low.forward, model.rotary)  # type: ignore[method-assign]
    before = model(X)
    safe_rope.protect(model)
    assert torch.equal(model(X), before)


def test_a_static_forward_has_the_signature_of_stock() -> None:
    model = safe_rope.protect(module := Static()) and module
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert torch.equal(model(x=X), TRUE)


def test_the_audit_measures_what_a_list_holds() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).sin().to(x.dtype)

    model = InAList(Held())
    assert safe_rope.audit(model).verdict == "ok"
    model.held[0].bfloat16()
    assert safe_rope.audit(model).verdict == "damaged"


class FillsInItsCall(nn.Module):
    """Makes its tables in a call of its own, before the forward that hooks may wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
        self.tables: list[torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> Any:
        if self.tables is None:
            phases = torch.outer(torch.arange(x.shape[1]).to(self.rates), self.rates)
            self.tables = [phases.cos(), phases.sin()]
        return super().__call__(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tables is not None
        return torch.cat([table.to(x.dtype) for table in self.tables], dim=-1)


def test_an_own_call_leads_to_a_wrapped_forward() -> None:
    with safe_rope.guard():
        module = FillsInItsCall()
    module.forward = functools.partial(lambda inner, *args: inner(*args), module.forward)  # type: ignore[method-assign]
    assert torch.equal(module.bfloat16()(X), FillsInItsCall()(X.float()).bfloat16())


class IsItsCall(nn.Module):
    """Computes in its call, whatever its forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).to(self.inv_freq), self.inv_freq).cos().to(x.dtype)


def test_an_own_call_that_needs_no_forward_runs_in_fp32() -> None:
    with safe_rope.guard():
        module = IsItsCall()
    module.forward = lambda *args: None  # type: ignore[method-assign]
    x = torch.zeros(1, 900, DIM)
    assert torch.equal(module.bfloat16()(x.bfloat16()), IsItsCall()(x).bfloat16())
