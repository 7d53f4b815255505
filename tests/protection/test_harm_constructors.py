"""Constructors that a second run does not repeat: what the first one made is what the authors meant."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import no_harm
import pytest
import torch
from no_harm import DIM, Holder, Rope
from torch import nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")


# ---- arguments that are rebound or popped before the base's constructor runs ---------------------------


class Ntk(Rope):
    """NTK-aware scaling of the base, under the argument's own name."""

    def __init__(self, dim: int = DIM, base: float = 1e4, a: float = 4.0) -> None:
        base = base * a ** (dim / (dim - 2))
        super().__init__(dim, base)


class NtkInPlace(Rope):
    def __init__(self, dim: int = DIM, base: float = 1e4, a: float = 4.0) -> None:
        base *= a
        super().__init__(dim=dim, base=base)
        self.dim, self.base, self.a = dim, base, a


class Interpolated(Rope):
    """The scale is taken out of the keywords that the base gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        scale = kwargs.pop("scale", 1.0)
        super().__init__(*args, **kwargs)
        self.inv_freq /= scale


class ByUpdatedKeywords(Rope):
    def __init__(self, **kwargs: Any) -> None:
        kwargs.update(base=kwargs.get("base", 1e4) * 4.0)
        super().__init__(**kwargs)


class Halved(Rope):
    """Rotates half of each head."""

    def __init__(self, dim: int = 2 * DIM, base: float = 1e4) -> None:
        dim //= 2
        super().__init__(dim, base)


REBOUND: dict[str, Callable[[], Rope]] = {
    "Ntk": Ntk,
    "Ntk with an argument": lambda: Ntk(a=8.0),
    "NtkInPlace": NtkInPlace,
    "Interpolated": lambda: Interpolated(DIM, scale=4.0),
    "ByUpdatedKeywords": lambda: ByUpdatedKeywords(dim=DIM),
    "Halved": Halved,
}


# ---- arguments that the constructor changes ------------------------------------------------------------


class Config:
    def __init__(self) -> None:
        self.base, self.dim = 1e4, DIM


class FromConfig(Rope):
    def __init__(self, config: Config) -> None:
        config.base *= 4
        super().__init__(config.dim, config.base)


class FromDict(Rope):
    def __init__(self, settings: dict[str, float]) -> None:
        settings["base"] *= 4
        super().__init__(DIM, settings["base"])


class FromIterator(Rope):
    def __init__(self, bases: Iterator[float]) -> None:
        super().__init__(DIM, next(bases))


class Taking(Rope):
    """What the caller hands over is empty afterwards."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings.pop("dim"), settings.pop("base"))


CHANGED: dict[str, Callable[[], Rope]] = {
    "FromConfig": lambda: FromConfig(Config()),
    "FromDict": lambda: FromDict({"base": 1e4}),
    "FromIterator": lambda: FromIterator(iter([5e4, 1e4, 7e4])),
    "Taking": lambda: Taking({"dim": DIM, "base": 5e5}),
}


# ---- constructors that cannot run twice ----------------------------------------------------------------


class OnlyOne(Rope):
    """Refuses a second module under the same name."""

    names: set[str] = set()

    def __init__(self, name: str) -> None:
        if name in self.names:
            raise ValueError(f"there is a {name} already")
        self.names.add(name)
        super().__init__(DIM, 5e5)


class LooksAtItsWeight(Rope):
    """As SwinV2: what is not on meta is computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))
        if self.weight.is_meta:
            self.register_buffer("inv_freq", torch.zeros(DIM // 2), persistent=False)


def _rows(module: Any, length: int) -> torch.Tensor:
    return torch.outer(torch.arange(length).float(), module.inv_freq)


class ForgetsWhatItRemembers(Rope):
    """As Megatron's Yarn: the constructor clears a cache of the class's own method."""

    def __init__(self, base: float = 5e5) -> None:
        super().__init__(DIM, base)
        self.rows.cache_clear()

    rows = functools.lru_cache(maxsize=4)(_rows)


class RemembersItsForward(Rope):
    """Its forward is remembered as a whole, and forgotten whenever it is built."""

    def __init__(self, base: float = 5e5) -> None:
        super().__init__(DIM, base)
        self.forward.cache_clear()

    forward = functools.lru_cache(maxsize=4)(Rope.forward)


def _fresh_name() -> OnlyOne:
    return OnlyOne(f"rope {len(OnlyOne.names)}")


ONCE: dict[str, Callable[[], Rope]] = {
    "OnlyOne": _fresh_name,
    "LooksAtItsWeight": LooksAtItsWeight,
    "ForgetsWhatItRemembers": ForgetsWhatItRemembers,
    "RemembersItsForward": RemembersItsForward,
}
ALL = REBOUND | CHANGED | ONCE


@pytest.mark.parametrize("load", ["FP32", "default dtype"])
@pytest.mark.parametrize("style", ALL)
def test_without_the_guard_every_style_is_right(style: str, load: str) -> None:
    no_harm.assert_right(no_harm.LOADS[load](lambda: Holder(ALL[style]())).rope, ALL[style]())


@pytest.mark.parametrize("load", no_harm.FILLED)
@pytest.mark.parametrize("style", ALL)
def test_what_was_built_stays(style: str, load: str) -> None:
    truth = ALL[style]()
    model, _ = no_harm.guarded(lambda: Holder(ALL[style]()), load)
    no_harm.assert_right(model.rope, truth)


@pytest.mark.parametrize("style", ALL)
def test_what_was_never_filled_is_right_or_named(style: str) -> None:
    truth = ALL[style]()
    model, said = no_harm.guarded(lambda: Holder(ALL[style]()), "meta")
    no_harm.assert_right_or_named(said, "rope", model.rope, truth)


@pytest.mark.parametrize("style", ALL)
def test_protect_leaves_a_right_module_right(style: str) -> None:
    truth = ALL[style]()
    model = Holder(ALL[style]())
    no_harm.protected(model)
    no_harm.assert_right(model.rope, truth)
    no_harm.assert_right(model.half().float().rope, truth)


@pytest.mark.parametrize("style", ALL)
def test_protect_repairs_or_names_a_damaged_module(style: str) -> None:
    truth = ALL[style]()
    model = Holder(ALL[style]()).to(torch.bfloat16)
    said = no_harm.protected(model)
    no_harm.assert_right_or_named(said, "rope", model.rope, truth)


def test_what_a_forward_remembers_can_still_be_forgotten() -> None:
    model, _ = no_harm.guarded(lambda: Holder(RemembersItsForward()))
    for _ in range(2):
        no_harm.assert_right(model.rope, RemembersItsForward())
        model.rope.forward.cache_clear()


# ---- settings that are no argument ---------------------------------------------------------------------

SETTING = {"scale": 1.0}


class UnderASetting(Rope):
    def __init__(self) -> None:
        super().__init__()
        self.inv_freq /= SETTING["scale"]


@pytest.mark.parametrize("with_parent", [False, True])
@pytest.mark.parametrize("load", no_harm.FILLED)
def test_a_setting_that_is_gone_when_the_guard_closes(load: str, with_parent: bool) -> None:
    def make() -> nn.Module:
        SETTING["scale"] = 4.0
        try:
            rope = UnderASetting()
        finally:
            SETTING["scale"] = 1.0
        return Holder(rope) if with_parent else rope

    truth: Any = make()
    model, _ = no_harm.guarded(make, load)
    no_harm.assert_right(getattr(model, "rope", model), getattr(truth, "rope", truth))


def test_a_whole_model_is_built_once_with_side_effects_once() -> None:
    with safe_rope.guard():
        before = len(OnlyOne.names)
        Holder(_fresh_name())
        assert len(OnlyOne.names) == before + 1


@pytest.mark.parametrize("make", [Ntk, Interpolated])
def test_a_guard_keeps_nothing_of_its_caller_alive(make: Callable[[], Rope]) -> None:
    with safe_rope.guard():
        first = Holder(make())
        second = Holder(make())
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert isinstance(second.rope, make)
