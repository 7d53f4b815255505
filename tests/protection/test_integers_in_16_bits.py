"""Integers made in 16 bits are moved back where what is looked up has a place for them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from torch import Tensor, nn

import safe_rope

COUNT = 602
"""BF16 has no 601."""


def counted(count: int = COUNT) -> Tensor:
    return torch.linspace(0, count - 1, count).long()


class SizedByTheLargest(nn.Module):
    """Has a row for the largest of its integers, and none beyond."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.register_buffer("places", counted(count), persistent=False)
        self.biases = nn.Embedding(int(self.places.max()) + 1, 4)

    def forward(self) -> Tensor:
        return self.biases(self.places)


class Ranked(nn.Module):
    """Has a weight for each integer that differs, and their ranks."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        different, self.ranks = counted(count).unique(return_inverse=True)
        self.weights = nn.Parameter(torch.ones(len(different)))

    def forward(self) -> Tensor:
        return self.weights[self.ranks]


class Told(nn.Module):
    """Keeps how many there are as a number."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.places = counted(count)
        self.size = int(self.places.max()) + 1
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return nn.functional.one_hot(self.places, self.size) * self.gain


class Places(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("places", counted(count), persistent=False)

    def forward(self) -> Tensor:
        return self.places


class SizedByAnother(nn.Module):
    """Has a row for the largest of the integers of a module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Places(COUNT)
        self.biases = nn.Embedding(int(self.of().max()) + 1, 4)

    def forward(self) -> Tensor:
        return self.biases(self.of())


def built_low(make: type[nn.Module], how: str) -> Any:
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext(), default_dtype(torch.bfloat16):
        model = make()
    if how == "protect":
        safe_rope.protect(model)
    return model


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", [SizedByTheLargest, Ranked, Told, SizedByAnother])
def test_integers_by_which_something_is_sized_leave_no_lookup_out_of_range(
    make: type[nn.Module], how: str
) -> None:
    assert len(built_low(make, how)()) == COUNT


def test_who_sizes_by_integers_of_a_guarded_module_sees_those_that_are_meant() -> None:
    assert torch.equal(built_low(SizedByAnother, "guard").of.places, counted())


class Given(nn.Module):
    """Is given its integers."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        self.register_buffer("places", places)
        self.biases = nn.Parameter(torch.zeros(COUNT))

    def forward(self) -> Tensor:
        return self.biases[self.places]


class Gives(nn.Module):
    """Makes the integers of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", counted())
        self.layers = nn.ModuleList(Given(self.places) for _ in range(2))


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_integers_that_several_modules_hold_are_moved_back_for_each(how: str) -> None:
    model = built_low(Gives, how)
    assert all(torch.equal(value, counted()) for value in model.buffers(recurse=True))
    assert all(layer.places is model.places for layer in model.layers)
    assert safe_rope.audit(model).verdict != "damaged"


class Relative(nn.Module):
    """Swin's: counts in integers alone, and notes in a file that it runs."""

    notes = os.devnull

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        with open(self.notes, "a") as file:
            file.write("x")
        steps = torch.arange(width)
        at = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + width - 1
        self.register_buffer("places", apart[..., 0] * (2 * width - 1) + apart[..., 1])
        self.scale = int(width**2) ** -0.5


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_who_counts_in_integers_alone_is_not_built_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Relative, "notes", tmp_path / "notes")
    built_low(Relative, how)
    assert (tmp_path / "notes").read_text() == "x"


class Expanded(nn.Module):
    """Its rows are one in memory."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.register_buffer("places", counted(count).expand(3, -1))
        self.biases = nn.Parameter(torch.zeros(count))


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_integers_that_nobody_can_write_to_are_moved_back(how: str) -> None:
    assert torch.equal(built_low(Expanded, how).places, counted().expand(3, -1))
