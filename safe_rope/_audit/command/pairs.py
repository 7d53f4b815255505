"""Which tables of two sides belong together: by their names, their layers, or their order."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from safe_rope._audit.layers import LAYERS, layer_type_in
from safe_rope._audit.report import Tables
from safe_rope._base.text import counted, shortened
from safe_rope.errors import ConfigError

Pair = tuple[str, dict[str, Tensor], dict[str, Tensor]]
_WIDTH = 120
_WORDS = ("local", "sliding"), ("global", "full")
"""What layers are called that see a window, and what those that see everything."""


def paired(first: Tables, second: Tables, names: Iterable[str]) -> tuple[list[Pair], list[str]]:
    """Return tables that belong together, by a title, and what is said of those without a counterpart.

    ``names``: of the two sides.

    Raises:
        ConfigError: the sides have different numbers of tables, and nothing tells which belong together.
    """
    common = [name for name in first if name in second]
    # A dump holds them in the order of their letters.
    lone, others = (sorted(side.keys() - {*common}, key=_by_kind) for side in (first, second))
    one, other = names
    left: list[str] = []
    if len(lone) + len(others) > 2 and {*map(_sort, lone)} != {*map(_sort, others)}:
        by_layer = _by_layer(lone, others, first)
        by_layer |= {(b, a) for a, b in _by_layer(others, lone, second)}
        pairs = [(a, b) for a in lone for b in others if (a, b) in by_layer]
        for side, rest, at in ((one, lone, 0), (other, others, 1)):
            untold = [name for name in rest if name not in {pair[at] for pair in pairs}]
            said = f"nothing tells which tables belong to {shortened(', '.join(untold), _WIDTH)} of {side}"
            left += [said] if untold else []
    elif len(lone) != len(others):
        raise ConfigError(
            f"{one} has {counted(len(first), 'rotary embedding')}, {other} has {len(second)}: "
            f"{', '.join(first)}; {', '.join(second)}; compare models of one layout"
        )
    else:
        pairs = [*zip(lone, others, strict=True)]
    pairs = [*((name, name) for name in common), *pairs]
    return [(a if a == b else f"{a} / {b}", first[a], second[b]) for a, b in pairs], left


def _by_layer(typed: list[str], others: list[str], tables: Tables) -> set[tuple[str, str]]:
    """Tables of a layer type with those of modules of a layer, or with the two that say what layers see."""
    typed, others = (
        [name for name in side if bool(layer_type_in(name)) is is_typed]
        for side, is_typed in ((typed, True), (others, False))
    )
    layers = {name: tables[name][LAYERS].tolist() if LAYERS in tables[name] else [] for name in typed}
    found = {(mine, name) for name in others for mine in typed if _layer(name) in layers[mine]}
    seen, told = ([_seen(name) for name in side] for side in (typed, others))
    if not found and sorted(map(str, seen)) == ["0", "1"] and len(told) == 2 and told[0] != told[1]:
        is_crossed = any(b is not None and a != b for a, b in zip(seen, told, strict=True))
        found = {*zip(typed, others[::-1] if is_crossed else others, strict=True)}
    return found


def _sort(name: str) -> str | None:
    """The layer type that a table is of, or "" for that of a module in a layer; None for any other."""
    return layer_type_in(name) or ("" if _layer(name) is not None else None)


def _layer(name: str) -> int | None:
    """The first number in a module's path: that of its layer."""
    numbers = (part for part in name.partition(":")[0].split(".") if part.isdecimal())
    return next(map(int, numbers), None)


def _seen(name: str) -> int | None:
    """Whether a name is of layers that see everything (1) or a window (0); None where it says neither."""
    said = [at for at, words in enumerate(_WORDS) if any(word in name.lower() for word in words)]
    return said[0] if len(said) == 1 else None


def _by_kind(name: str) -> tuple[str, list[str | int]]:
    """What to sort a name by so that tables of a layer type stand together, and layer 2 before layer 10."""
    return layer_type_in(name) or "", [
        int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)
    ]
