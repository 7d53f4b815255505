"""What nothing keeps, or nobody can know, is named by both ways to protect, and is not ok for the audit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer

import safe_rope

DIM, LENGTH = 32, 600
X = torch.zeros(1, LENGTH, DIM)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def rates() -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)


class ShapedLater(LazyModuleMixin, nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inv = UninitializedBuffer()  # type: ignore[no-untyped-call]

    def initialize_parameters(self, x: torch.Tensor) -> None:
        if self.has_uninitialized_params():  # type: ignore[no-untyped-call, misc]
            self.inv.materialize((DIM // 2,))
            self.inv.copy_(rates())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.inv).cos().to(x.dtype)


class Layer(nn.Module):
    """Takes tables from a dictionary of pairs, by the base, or puts them there."""

    def __init__(self, tables: dict[Any, Any], base: float = 1e4) -> None:
        super().__init__()
        self.base, self.tables = base, tables
        if base not in tables:
            phase = torch.outer(torch.arange(LENGTH).float(), base ** (-torch.arange(0, DIM, 2) / DIM))
            tables[base] = phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.tables[self.base][0]).to(x.dtype)


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables: dict[Any, Any] = {}
        self.layers = nn.ModuleList([Layer(tables), Layer(tables)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[1](x)


class Rotary(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("w", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, n: int) -> torch.Tensor:
        return torch.cos(torch.arange(n, dtype=self.w.dtype)[:, None] * self.w)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = torch.jit.script(Rotary())

    def forward(self, x: torch.Tensor) -> Any:
        return self.rotary(x.shape[1]).to(x.dtype)


class Holder:
    def __init__(self) -> None:
        self.kept = {"inv_freq": rates()}


class CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Holder()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.inner.kept = {name: one.to(*args) for name, one in self.inner.kept.items()}
        return super().to(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = self.inner.kept["inv_freq"]
        return (torch.arange(x.shape[1]).to(frequencies)[:, None] * frequencies).cos()


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        drawn = torch.randperm(2560, generator=torch.Generator().manual_seed(3))[:LENGTH]
        self.register_buffer("order", drawn, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.order[: x.shape[1], None] * self.inv_freq).cos().to(x.dtype)


def guarded(make: Callable[[], Any]) -> Any:
    with safe_rope.guard():
        return make()


def lost_on_meta() -> Any:
    with torch.device("meta"):
        model = Drawn()
    return model.to_empty(device="cpu")


def test_a_buffer_that_has_no_shape_yet_is_untold_before_and_after_its_first_call() -> None:
    with pytest.warns(safe_rope.PrecisionWarning, match="first forward"):
        model = guarded(lambda: nn.Sequential(ShapedLater()))
    model.to(torch.bfloat16)
    assert safe_rope.audit(model).verdict == "unknown"
    model(X.bfloat16())
    assert safe_rope.audit(model).verdict == "unknown"


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", [Handed, Compiled, CastsItself])
def test_both_ways_to_protect_name_it(make: type[nn.Module], how: str) -> None:
    true = make()(X)
    torch.set_default_dtype(torch.bfloat16 if make is Handed else torch.float32)
    try:
        with (
            pytest.warns(safe_rope.PrecisionWarning) if make is not Compiled else contextlib.nullcontext(),
            safe_rope.guard() if how == "guard" else contextlib.nullcontext() as session,
        ):
            model = make()
            report = safe_rope.protect(model) if how == "protect" else None
    finally:
        torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16)
    found = report or session.report  # type: ignore[union-attr]
    assert float((model(X.bfloat16()).float() - true).abs().max()) > 0.05  # it is damaged
    assert not found.protected
    assert found.unprotected or found.left
    assert safe_rope.audit(model).verdict in ("damaged", "unknown")
    if make is Handed:
        assert [entry.path for entry in found.unprotected] == ["layers.0", "layers.1"]


def test_integers_that_were_drawn_and_lost_on_meta_are_named() -> None:
    with pytest.warns(safe_rope.PrecisionWarning, match="order"):
        model = guarded(lost_on_meta)
    model.order.zero_()  # what the memory held
    assert safe_rope.audit(model).verdict == "unknown"
    with safe_rope.guard():
        whole = Drawn()
    assert safe_rope.audit(whole.to(torch.bfloat16)).verdict == "ok"


class Configured(nn.Module):
    """A rotary module of a config that can be changed after it was built."""

    def __init__(self, config: dict[str, float]) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", config["base"] ** -(torch.arange(4) / 4))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = position_ids[..., None] * self.inv_freq
        return phase.cos(), phase.sin()


def test_a_constructor_that_gives_no_numbers_tells_nothing() -> None:
    module = Configured({"base": 1e4})
    assert safe_rope.audit(module).ok
    module.config["base"] = -1.0
    module.inv_freq.mul_(1.5)
    assert [one.verdict for one in safe_rope.audit(module).modules] == ["unknown"]
