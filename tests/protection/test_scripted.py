"""What torch.jit.script makes of a guarded model is what it makes of the stock one, and is told of."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, LENGTH = 16, 300
X = torch.ones(1, LENGTH, DIM, dtype=torch.bfloat16)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Frequencies(nn.Module):
    """Keeps frequencies, and counts in their dtype."""

    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]).to(self.inv_freq.dtype)
        return torch.outer(places, self.inv_freq).cos()


class Tables(nn.Module):
    """Keeps cos."""

    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("cos_cached", torch.outer(torch.arange(LENGTH), rates).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cos_cached[: x.shape[1]].to(x.dtype)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.proj, self.rotary = nn.Linear(DIM, DIM, bias=False), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos = self.rotary(x).repeat(1, 2)
        return x * cos + self.proj(x) * 0


def built(make: Callable[[], nn.Module], *, guarded: bool) -> Model:
    torch.manual_seed(0)
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = Model(make)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("make", [Frequencies, Tables])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "module"])
def test_it_is_compiled_as_in_stock_and_told_of(make: Callable[[], nn.Module], whole: bool) -> None:
    stock, guarded = built(make, guarded=False), built(make, guarded=True)
    expected = torch.jit.script(stock if whole else stock.rotary)
    with pytest.warns(PrecisionWarning, match=rf"torch\.jit\.script compiles .*{make.__name__} as it is"):
        scripted = torch.jit.script(guarded if whole else guarded.rotary)
    torch.testing.assert_close(scripted(X), expected(X), rtol=0, atol=0)
    torch.testing.assert_close(dict(scripted.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)
    assert guarded(X).dtype == torch.bfloat16


class Keeps(nn.Module):
    """Keeps, for later calls, what a part of it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.rotary = nn.Linear(DIM, DIM, bias=False), Frequencies()
        self.register_buffer("kept", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.shape[0] < x.shape[1]:
            self.kept = self.rotary(x)
        cos = self.kept[: x.shape[1]].repeat(1, 2)
        return x * cos + self.proj(x) * 0


def called_and_cast(first: torch.dtype, *, guarded: bool) -> Keeps:
    torch.manual_seed(0)
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = Keeps()
    model.to(first)(X.to(first))
    return model.to(torch.bfloat16).eval()


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["trace", "freeze", "script"])
@pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning")
@torch.no_grad()
def test_a_file_of_a_model_that_keeps_what_its_part_made_holds_it(first: torch.dtype, how: str) -> None:
    expected = called_and_cast(torch.float32, guarded=False)(X)
    model, file = called_and_cast(first, guarded=True), io.BytesIO()
    graph = torch.jit.script(model) if how == "script" else torch.jit.trace(model, (X,))
    torch.jit.save(torch.jit.freeze(graph) if how == "freeze" else graph, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    torch.testing.assert_close(loaded(X), expected, rtol=0, atol=0)
