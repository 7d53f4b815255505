"""Parts of a model that a guard meets below a parent: copies, states handed over, settings of the moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

LENGTH, DIM = 300, 16
X = torch.zeros(1, LENGTH, DIM)
SETTINGS = {"base": 10000.0}


def rates(base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(0, DIM, 2).float() / DIM)


class Rates(nn.Module):
    """Holds what it is given, under a name that says nothing."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)


class Held(nn.Module):
    """Counts in the dtype of frequencies that a holder has."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Rates(rates())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).type_as(self.holder.w), self.holder.w)
        return phase.sin().to(x.dtype)


class Sinusoids(nn.Module):
    """Keeps a table that is saved, of counts in the dtype that is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "table", torch.outer(torch.arange(0.0, LENGTH), rates().to(torch.get_default_dtype())).sin()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


class OfTheMoment(nn.Module):
    """Reads a global while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(SETTINGS["base"]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).sin().to(x.dtype)


class Pair(nn.Module):
    """Has two parts, one made from the other before either is registered."""

    def __init__(self, make: Callable[[], nn.Module], again: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        online = make()
        self.target, self.online = again(online), online
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        return self.online(x), self.target(x)


def handed_over(online: nn.Module) -> nn.Module:
    target = type(online)()
    target.load_state_dict(online.state_dict())
    return target


@pytest.mark.parametrize("again", [copy.deepcopy, handed_over])
@pytest.mark.parametrize("make", [Held, Sinusoids])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_what_is_made_from_another_part_is_exact(
    make: Callable[[], nn.Module], again: Callable[[nn.Module], nn.Module], default: torch.dtype
) -> None:
    true = make()(X)
    torch.set_default_dtype(default)
    try:
        with safe_rope.guard():
            model = Pair(make, again)
    finally:
        torch.set_default_dtype(torch.float32)
    for result in model.bfloat16()(X.bfloat16()):
        assert torch.allclose(result.float(), true, rtol=0, atol=2**-9)


def test_a_part_on_meta_has_the_setting_that_it_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        with monkeypatch.context() as moment:
            moment.setitem(SETTINGS, "base", 250000.0)
            return OfTheMoment()

    true = make()(X)
    with safe_rope.guard(tables="fp32"), torch.device("meta"):
        model = Pair(make, lambda _: make())
    for result in model.to_empty(device="cpu")(X):
        assert torch.equal(result, true)


class OfAllHolders(nn.Module):
    """Takes a part of what each holder has in one expression."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(0.0, LENGTH), rates())
        self.holders = nn.ModuleList([Rates(phase.cos()), Rates(phase.sin())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (holder.w[: x.shape[1]].to(x.dtype) for holder in self.holders)
        return x.to(cos.dtype) * cos.repeat(1, 2) + x * sin.repeat(1, 2)


def test_what_a_generator_reads_of_a_holder_has_the_dtype_that_it_asks_for() -> None:
    x = torch.randn(1, LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    with safe_rope.guard():
        model = OfAllHolders()
    made = model.bfloat16()(x.bfloat16())
    assert made.dtype == OfAllHolders().bfloat16()(x.bfloat16()).dtype
    assert (made.float() - OfAllHolders()(x.bfloat16().float())).abs().max() <= 2**-5
