"""The audit finds every table that is damaged by hand, and none in a model that nobody has touched."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
from mutations import DAMAGES, survivors
from small_bodies import BODIES
from small_families import FAMILIES, build, present
from styles import STYLES
from torch import nn

CASES = FAMILIES | BODIES
OFTEN = {"gptj", "deepseek_v2", "dinov3"}
FEW = 6
SEEN: Counter[str] = Counter()
"""How many cells of each kind this process has seen."""


def _check(make: Callable[[], nn.Module]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(survivors(make))
    SEEN.update(said for said, _ in found)
    wrong = [text for _, text in found if text]
    assert not wrong, "\n".join(["", *wrong])
    return len(found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.exhaustive) for n in present(CASES)]
)
def test_every_damage_of_an_architecture_is_found(name: str) -> None:
    cells = _check(lambda: build(CASES[name]))
    assert cells > len(DAMAGES) or name not in OFTEN  # some hold no table: they make all in forward


TABLED = [name for name, style in STYLES.items() if "no position" not in style.tags]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if i % (len(TABLED) // FEW) == 5 else pytest.mark.exhaustive)
        for i, n in enumerate(TABLED)
    ],
)
def test_every_damage_of_a_style_is_found(name: str) -> None:
    _check(STYLES[name].make)
