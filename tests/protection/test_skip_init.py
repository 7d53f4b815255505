"""`torch.nn.utils.skip_init` inside of zero.Init, which leaves torch's ``_apply`` in every class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.zero_init import zero_init
from torch import nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group", "classes_are_put_back")

HALF = 16


def subclasses(cls: type) -> set[type]:
    below = set(type.__subclasses__(cls))
    return below.union(*map(subclasses, below))


def casts_of_classes() -> dict[tuple[type, str], Any]:
    names = ("_apply", "_old_apply_of_skip_init_hook")
    classes = (nn.Module, *subclasses(nn.Module))
    return {(cls, name): vars(cls)[name] for cls in classes for name in names if name in vars(cls)}


@pytest.fixture
def classes_are_put_back() -> Iterator[None]:
    before = casts_of_classes()
    yield
    for cls, name in casts_of_classes().keys() - before.keys():
        if "_safe_rope_stock" not in vars(cls):
            delattr(cls, name)
    for (cls, name), value in before.items():
        setattr(cls, name, value)


def frequencies() -> torch.Tensor:
    return 10000.0 ** (-torch.arange(HALF, dtype=torch.float32) / HALF)


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class Skipped(nn.Module):
    """Takes a device, as skip_init wants it, and is filled by a method."""

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(HALF, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.inv_freq.copy_(frequencies())

    forward = Rope.forward


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope: Any = nn.utils.skip_init(Skipped)
        self.rope.reset_parameters()

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


def skip_init_elsewhere() -> None:
    with zero_init():
        nn.utils.skip_init(nn.Linear, 2, 2)
    assert "_apply" in vars(nn.Sigmoid)  # what DeepSpeed does; without it there is nothing to see here


def assert_right(model: nn.Module) -> None:
    x = torch.zeros(1, 300, 2 * HALF)
    true = Rope()(x)
    for got, expected in zip(model(x.bfloat16()), true, strict=True):
        assert (got.float() - expected).abs().max() < 2**-8


def test_a_protected_model_stays_right_in_graphs(fresh_compiler: None) -> None:
    with safe_rope.guard():
        model = nn.Sequential(Rope())
    skip_init_elsewhere()
    model.to(torch.bfloat16)
    assert_right(torch.compile(model, backend="eager"))


@pytest.mark.contract
def test_casts_are_followed() -> None:
    with safe_rope.guard():
        model = nn.Sequential(Rope())
    skip_init_elsewhere()
    assert model.to(torch.bfloat16).state_dict()["0.inv_freq"].dtype == torch.bfloat16
    assert_right(model)
    assert torch.equal(model.float().state_dict()["0.inv_freq"], frequencies())


def test_what_skip_init_makes_inside_of_a_guard_is_protected() -> None:
    with safe_rope.guard(), zero_init():
        model = Filled()
    model.to(torch.bfloat16)
    assert_right(model)
    assert torch.equal(model.float().state_dict()["rope.inv_freq"], frequencies())


@pytest.mark.contract
def test_no_class_keeps_what_a_guard_has_put_there() -> None:
    before = nn.Module._apply
    with safe_rope.guard():
        skip_init_elsewhere()
    assert nn.Module._apply is before
    assert nn.Linear._apply is before
    assert Rope._apply is before
    assert nn.Sigmoid._old_apply_of_skip_init_hook is before


def test_no_class_is_said_to_cast_by_itself() -> None:
    class Nested(Rope):
        def __init__(self) -> None:
            super().__init__()
            self.kept = {"tables": [frequencies()]}

    skip_init_elsewhere()
    with safe_rope.guard() as session:
        model = nn.Sequential(Nested()).bfloat16()
    assert_right(model)
    assert session.report.protected
    assert not session.report.unprotected
