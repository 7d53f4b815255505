"""Draw position modules from a grammar: what `styles` has one by one, in combinations.

A number draws a module: how its frequencies are computed, who holds what, how positions meet them, what
becomes of the phases. All draws mean the same, and each is a file of its own, as a user's would be.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drawn_pieces import (
    AS_IT_IS,
    BASES,
    CASTS,
    COUNTS_WHEN_BUILT,
    COUNTS_WHEN_CALLED,
    FREQUENCIES,
    HEADER,
    NAMES_OF_RATES,
    NAMES_OF_TABLES,
    PRODUCTS,
    READS,
    TWICE,
)
from styles.registry import Style, hidden_and_positions
from torch import nn


class Held(NamedTuple):
    """How a module holds tensors: code before the class, in the constructor, and to read each of them."""

    before: str
    built: str
    reads: tuple[str, ...]


Items = dict[str, str]
"""Names of tensors, and the expressions that make them; ``dim`` and ``base`` are known there."""


def _buffers(items: Items, *, persistent: bool, owner: str = "self") -> Held:
    lines = [f"{owner}.register_buffer('{n}', {made}, persistent={persistent})" for n, made in items.items()]
    return Held("", "\n".join(lines), tuple(f"{owner}.{name}" for name in items))


def _in_one(opening: str, closing: str, read: str) -> Callable[[Items], Held]:
    """Hold all in one attribute; ``read`` has the place of an index or of a name."""

    def hold(items: Items) -> Held:
        named = "{" in opening or "(" in opening
        entries = [f"{n!r}: {made}" if "{" in opening else f"{n}={made}" for n, made in items.items()]
        inner = ", ".join(entries if named else items.values()) + ","
        reads = tuple(read.format(index=i, name=name) for i, name in enumerate(items))
        return Held("", f"self.store = {opening}{inner}{closing}", reads)

    return hold


def _object(items: Items, *, slots: bool) -> Held:
    arguments, lines = ", ".join(items), "".join(f"        self.{n} = {n}\n" for n in items)
    slotted = f"    __slots__ = {tuple(items)!r}\n" if slots else ""
    before = f"class Store:\n{slotted}    def __init__(self, {arguments}):\n{lines}"
    made = ", ".join(items.values())
    return Held(before, f"self.store = Store({made})", tuple(f"self.store.{n}" for n in items))


def _given(items: Items, *, persistent: bool) -> Held:
    lines = "".join(f"        self.register_buffer('{n}', {n}, persistent={persistent})\n" for n in items)
    before = f"class Holder(nn.Module):\n    def __init__(self, {', '.join(items)}):\n"
    made = ", ".join(items.values())
    reads = tuple(f"self.holder.{n}" for n in items)
    return Held(f"{before}        super().__init__()\n{lines}", f"self.holder = Holder({made})", reads)


def _bare(items: Items) -> Held:
    held = _buffers(items, persistent=False, owner="self.bare[0]")
    return held._replace(built=f"self.bare = nn.ModuleList([nn.Module()])\n{held.built}")


def _frozen(items: Items) -> Held:
    lines = [f"self.{n} = nn.Parameter({made}, requires_grad=False)" for n, made in items.items()]
    return Held("", "\n".join(lines), tuple(f"self.{n}" for n in items))


def _attributes(items: Items) -> Held:
    lines = [f"self.{n} = {made}" for n, made in items.items()]
    return Held("", "\n".join(lines), tuple(f"self.{n}" for n in items))


HOLDS: tuple[Callable[[Items], Held], ...] = (
    functools.partial(_buffers, persistent=True),
    functools.partial(_buffers, persistent=False),
    functools.partial(_buffers, persistent=False),
    _attributes,
    _frozen,
    _bare,
    functools.partial(_object, slots=True),
    functools.partial(_object, slots=False),
    functools.partial(_given, persistent=True),
    functools.partial(_given, persistent=False),
    _in_one("[", "]", "self.store[{index}]"),
    _in_one("OrderedDict({", "})", "self.store['{name}']"),
    _in_one("SimpleNamespace(", ")", "self.store.{name}"),
)


def source(number: int) -> str:
    """Return the module that ``number`` draws: a file with a class ``Drawn``."""
    draw = random.Random(number)
    formula, base = draw.choice(FREQUENCIES), draw.choice(BASES)
    before, made = _formula(draw, formula)
    if draw.random() < 0.5:
        names: Sequence[str] = (draw.choice(NAMES_OF_RATES),)
        held = draw.choice(HOLDS)(dict(zip(names, [made], strict=True)))
        phase = f"rates = {held.reads[0]}{draw.choice(('', '', '.float()', '.to(x.device)'))}\n"
        phase += f"t = {draw.choice(COUNTS_WHEN_CALLED)}\nphase = {draw.choice(PRODUCTS)}\n"
        read = f"{phase}phase = {draw.choice((AS_IT_IS, *TWICE))}\ncos, sin = phase.cos(), phase.sin()"
    else:
        names = draw.choice(NAMES_OF_TABLES)
        lines = f"rates = {made}\nt = {draw.choice(COUNTS_WHEN_BUILT)}\nphase = {draw.choice(PRODUCTS)}\n"
        lines += f"phase = {draw.choice((AS_IT_IS, *TWICE))}\nreturn phase.cos(), phase.sin()"
        before += "\n\ndef tables(dim, base):\n" + textwrap.indent(lines, "    ")
        made_of = (f"tables(dim, base)[{index}]" for index in range(2))
        held = draw.choice(HOLDS)(dict(zip(names, made_of, strict=True)))
        how = draw.choice(READS)
        read = f"cos, sin = {how.format(held.reads[0])}, {how.format(held.reads[1])}"
    return _file(draw, before, base, held, read)


def _formula(draw: random.Random, formula: str) -> tuple[str, str]:
    """Return code before the class, and the expression of the frequencies."""
    if draw.random() < 0.5:
        return "", f"({formula})"
    return f"def frequencies(dim, base):\n    return {formula}", "frequencies(dim, base)"


def _file(draw: random.Random, before: str, base: str, held: Held, read: str) -> str:
    cast, kind = draw.choice(CASTS), draw.choice(("returned", "applied", "beside weights", "by its parent"))
    name = "Rope" if kind == "by its parent" else "Drawn"
    result = f"cos, sin = cos{cast}, sin{cast}\n"
    if kind == "beside weights":
        result = f"x = self.proj(x)\n{result}"
    result += "return cos, sin" if kind in ("returned", "by its parent") else "return turned(x, cos, sin)"
    weights = "\nself.proj = nn.Linear(DIM, DIM, bias=False)" if kind == "beside weights" else ""
    built = f"super().__init__()\n{held.built}{weights}"
    text = f"{HEADER}\n{before}\n\n{held.before}\n\nclass {name}(nn.Module):\n"
    text += f"    def __init__(self, dim=DIM, base={base}):\n{textwrap.indent(built, ' ' * 8)}\n\n"
    forward = f"n = x.shape[1]\n{read}\n{result}"
    text += f"    def forward(self, x, position_ids):\n{textwrap.indent(forward, ' ' * 8)}\n"
    return text + (_PARENT if kind == "by its parent" else "")


_PARENT = """

class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.rope = Rope()

    def forward(self, x, position_ids):
        return turned(self.q(x), *self.rope(x, position_ids))
"""


def style(text: str, name: str, folder: Path, *, widens: bool) -> Style:
    """Write a drawn module into ``folder``, import it, and return it as a style."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    make: Callable[[], nn.Module] = module.Drawn
    with torch.no_grad():
        answer = make()(*hidden_and_positions(torch.float32, 8))
    return Style(
        name=name,
        make=make,
        tags=frozenset(),
        inputs=hidden_and_positions,
        inv_freq=None,
        exact=None,
        shows="output" if isinstance(answer, torch.Tensor) else "tables",
        roundings=1,
        widens=widens,
        not_on=frozenset(),
        reset=getattr(getattr(module, "tables_of", None), "cache_clear", lambda: None),
    )
