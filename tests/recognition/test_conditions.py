"""A constructor is run again on the device that it ran on; meta stands for one here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils import _device

from safe_rope._recognition.conditions import Conditions, replaying

META = torch.device("meta")
LOWERED = Conditions(torch.float32, torch.bfloat16, truthful=False)
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "arange": lambda: torch.arange(4.0),
    "full": lambda: torch.full((2,), 1.5),
    "linspace": lambda: torch.linspace(0, 1, 4),
    "on the CPU": lambda: torch.arange(4.0, device="cpu"),
    "out": lambda: torch.arange(4.0, out=torch.empty(4, device="cpu")),
}


@pytest.fixture(autouse=True)
def constructors_are_looked_up_anew() -> None:
    """Torch remembers what stood in their places at first, such as a loader's of transformers."""
    _device._device_constructors.cache_clear()


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "out"])  # where torch itself raises
def test_what_asks_for_no_device_is_made_there(name: str) -> None:
    with replaying(Conditions(), META):
        made = MAKERS[name]()
    assert made.is_meta == (name in ("arange", "full", "linspace"))
    assert made.dtype == torch.float32


@pytest.mark.parametrize("name", MAKERS)
def test_zero_init_moves_what_it_lowers(name: str) -> None:
    with replaying(LOWERED, META):
        made = MAKERS[name]()
    # zero.Init leaves linspace alone, which so stays where it is made.
    assert made.is_meta == (name in ("arange", "full"))
    assert made.dtype == (torch.float32 if name == "linspace" else torch.bfloat16)


def test_what_is_spared_stays_where_it_is() -> None:
    with replaying(LOWERED._replace(spared=("arange",)), META):
        assert not torch.arange(4.0).is_meta
        assert torch.full((2,), 1.0).is_meta


def test_without_a_device_everything_is_on_the_cpu() -> None:
    with replaying(LOWERED._replace(device="cuda")):
        assert torch.arange(4.0).device.type == "cpu"
