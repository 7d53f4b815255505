"""Draw position modules that keep tables from call to call, in the ways that users keep them.

As `drawn`, in another dimension: there one formula is written in many ways, here what it gives is made at
different times, by different code, and kept in different places.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from drawn_pieces import BASES, FREQUENCIES, HEADER

ELEMENTWISE = ("torch.outer(t, rates)", "t[:, None] * rates[None, :]", "rates[None] * t[:, None]")
PRODUCTS = ("torch.einsum('i,j->ij', t, rates)", "t.unsqueeze(-1) @ rates.unsqueeze(0)")
COUNTS = (
    "torch.arange(n).float()",
    "torch.arange(n, dtype=torch.float32)",
    "torch.linspace(0, n - 1, n)",
    "torch.tensor(range(n), dtype=torch.float)",
    "torch.ones(n).cumsum(0) - 1",
    "torch.arange(n, dtype=rates.dtype)",
    "torch.arange(n).type_as(rates)",
    "torch.from_numpy(np.arange(n)).float()",
    "torch.arange(n, dtype=torch.int64).to(rates)",
)
NAMES = ("inv_freq", "inv_freq", "freqs", "omega", "_f")
_TWICE = "torch.cat([phase] * 2, -1)"
# What the phases become, and how it is applied to x [1, n, DIM].
FORMS = (
    ("({twice}.cos(), {twice}.sin())", "turned(x, *tabs)"),
    ("(phase.cos(), phase.sin())", "turned(x, *tabs)"),
    ("(phase.sin(), phase.cos())", "x + torch.cat(tabs, dim=-1).to(x.dtype)"),
    ("(torch.polar(torch.ones_like(phase), phase),)", "turned_pairs(x, *tabs)"),
    ("(torch.complex(phase.cos(), phase.sin()),)", "turned_pairs(x, *tabs)"),
)
_PAIRS = """
def turned_pairs(x, cis):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)
"""


class Kept(NamedTuple):
    """How a module keeps its tables: code before it, in its constructor, its methods, and to read them."""

    read: str
    built: str = "pass"
    before: str = ""
    methods: str = ""


class Draw(NamedTuple):
    """What is drawn before the way of keeping: chance, where the frequencies are, how many tables."""

    chance: random.Random
    hold: str
    rates: str
    count: int


def _when_built(draw: Draw) -> Kept:
    extra, read = draw.chance.choice((("", "[:n]"), ("[None, None]", "[:, :, :n, ...][0, 0]")))
    lines = ["tabs = tables(LONGEST, frequencies())"]
    for index in range(draw.count):
        persistent = draw.chance.random() < 0.5
        lines.append(f"self.register_buffer('t{index}', tabs[{index}]{extra}, persistent={persistent})")
    return Kept(f"({''.join(f'self.t{index}{read}, ' for index in range(draw.count))})", "\n".join(lines))


def _grown(draw: Draw) -> Kept:
    put = draw.chance.choice(("self.t{0} = tabs[{0}]", "self.register_buffer('t{0}', tabs[{0}], False)"))
    lines = ["if n <= self.longest:", "    return", "self.longest = n", f"tabs = tables(n, {draw.rates})"]
    lines += [put.format(index) for index in range(draw.count)]
    first = draw.chance.choice(("16", "LONGEST", "64"))
    return Kept(
        f"(self.grow(n), {''.join(f'self.t{index}[:n], ' for index in range(draw.count))})[1:]",
        f"{draw.hold}\nself.longest = 0\nself.grow({first})",
        methods="def grow(self, n):\n" + textwrap.indent("\n".join(lines), "    "),
    )


def _in_a_dictionary(draw: Draw) -> Kept:
    key = draw.chance.choice(("n", "(n, x.device)", "(n, x.dtype, str(x.device))"))
    method = f"def look(self, n, x):\n    if {key} not in self.known:\n"
    method += (
        f"        self.known[{key}] = tables(n, {draw.rates}.to(x.device))\n    return self.known[{key}]"
    )
    return Kept("self.look(n, x)", f"{draw.hold}\nself.known = {{}}", methods=method)


def _by_a_function(draw: Draw) -> Kept:
    before = "@functools.lru_cache(maxsize=8)\ndef tables_of(n):\n    return tables(n, frequencies())"
    return Kept("tables_of(n)", before=before)


def _by_an_object(draw: Draw) -> Kept:
    before = "class Store:\n    def __init__(self):\n        self.rates, self.kept = frequencies(), None\n\n"
    before += "    def __call__(self, n):\n        if self.kept is None or len(self.kept[0]) < n:\n"
    before += "            self.kept = tables(n, self.rates)\n        return [one[:n] for one in self.kept]"
    return Kept("self.store(n)", "self.store = Store()", before)


def _by_a_closure(draw: Draw) -> Kept:
    before = "def lookup_of(rates):\n    kept = {}\n    def lookup(n):\n        if n not in kept:\n"
    before += "            kept[n] = tables(n, rates)\n        return kept[n]\n    return lookup"
    return Kept("self.lookup(n)", "self.lookup = lookup_of(frequencies())", before)


def _by_a_property(draw: Draw) -> Kept:
    kind = draw.chance.choice(("property", "functools.cached_property"))
    return Kept("tables(n, self.speeds)", methods=f"@{kind}\ndef speeds(self):\n    return frequencies()")


def _by_a_child(draw: Draw) -> Kept:
    returns = draw.chance.choice((f"tables(n, {draw.rates})", draw.rates))
    before = "class Inner(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    before += f"        {draw.hold}\n\n"
    before += f"    def forward(self, n):\n        return {returns}"
    read = "self.inner(n)" if returns != draw.rates else "tables(n, self.inner(n))"
    return Kept(read, "self.inner = Inner()", before)


def _anew(draw: Draw) -> Kept:
    return Kept(f"tables(n, {draw.rates})", draw.hold)


WAYS: tuple[Callable[[Draw], Kept], ...] = (
    *(_when_built, _grown, _in_a_dictionary, _by_a_function, _by_an_object, _by_a_closure),
    *(_by_a_property, _by_a_child, _anew),
)


def source(number: int) -> str:
    """Return the module that ``number`` draws: a file with a class ``Drawn``."""
    chance = random.Random(number)
    formula, base = chance.choice(FREQUENCIES), chance.choice(BASES)
    scale = chance.choice(("", "", " * 2.0", " * 0.5"))
    form, applied = chance.choice(FORMS)
    way, name = chance.choice(WAYS), chance.choice(NAMES)
    holds = f"self.register_buffer('{name}', frequencies(), persistent={chance.random() < 0.5})"
    hold = chance.choice((holds, holds, f"self.{name} = frequencies()"))
    count = 1 if "turned_pairs" in applied else 2
    kept = way(Draw(chance, hold, f"self.{name}", count))
    # Nothing sees what a closure multiplies under autocast.
    product = chance.choice(ELEMENTWISE if way is _by_a_closure else (*ELEMENTWISE, *PRODUCTS))
    tables = f"    t = {chance.choice(COUNTS)}\n    phase = {product}\n    return {form.format(twice=_TWICE)}"
    has_weights = chance.random() < 0.35
    weights = "\nself.proj = nn.Linear(DIM, DIM, bias=False)" if has_weights else ""
    result = f"x = self.proj(x)\nreturn {applied}" if has_weights else f"return {applied}"
    if not has_weights and count == 2 and chance.random() < 0.5:
        result = "return tuple(one.to(x.dtype) for one in tabs)"
    built = textwrap.indent(f"super().__init__()\n{kept.built}{weights}", " " * 8)
    forward = textwrap.indent(f"n = x.shape[1]\ntabs = tuple({kept.read})\n{result}", " " * 8)
    text = f"{HEADER}{_PAIRS}\n\ndef frequencies(dim=DIM, base={base}):\n    return ({formula}){scale}\n\n\n"
    text += f"def tables(n, rates):\n{tables}\n\n\n{kept.before}\n\n\nclass Drawn(nn.Module):\n"
    text += f"    def __init__(self):\n{built}\n\n{textwrap.indent(kept.methods, ' ' * 4)}\n\n"
    return f"{text}    def forward(self, x, position_ids):\n{forward}\n"
