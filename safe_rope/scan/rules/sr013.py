"""A table that `torch.zeros`, `empty` or `ones` makes, and that positions, cos or sin are written into.

`zero.Init` casts it to bfloat16, whatever dtype is asked for, and a low default dtype does where none is.
What is written into it is rounded then, however it was computed. Positions lose all but 8 bits, which is an
error; cos and sin are off by up to 0.4 %, a note.

Make it in int64 and cast: the zeros are the same, and neither touches them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safe_rope.scan.engine import PINNED, Call, File, Place, Report, Site
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule
from safe_rope.scan.rules.sr011 import is_table

# What else is written into tables.
_OTHERS = re.compile(r"filter|window|kernel|dct|basis|stft|dft|mel|hann|mask|weight", re.IGNORECASE)

_SUMS = ("sum", "mean")

_TABLES = re.compile(r"(?:\w+_)?(?:pe|embeddings?)", re.IGNORECASE)


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a table in a dtype that others lower, by what is written into it."""
    name = getattr(site.targets[0], "id", getattr(site.targets[0], "attr", "")) if site.targets else ""
    if call is None or not name or len(site.ancestors) > 1 or _OTHERS.search(name):
        return None
    if call.function not in ("torch.zeros", "torch.empty", "torch.ones"):
        return None
    dtype = file.value(call.node, site.place).dtype
    early = dtype in PINNED and file.names.is_early(call.node.func, site.place)
    if dtype not in {*PINNED, "default"} or early:
        return None
    written = {_kind(file, *one) for one in _written(file, site, name)}
    shown = file.purpose.shown(site) or _TABLES.fullmatch(name) is not None
    counts = "positions" in written
    if not counts and not (shown and "cos and sin" in written):
        return None
    how = "zero.Init" if dtype in PINNED else "zero.Init or the default dtype"
    rounds = messages.position() if counts else "0.4 % off at every position in bfloat16"
    return Report(
        call.node,
        file.severity("error", site, shown=True) if counts and shown else "note",
        f"a table that {'positions' if counts else 'cos and sin'} are written into: {how} lowers it, {rounds}"
        "; make it in int64, then cast",
        fixes.filled(file, call, site.place),
    )


def _written(file: File, site: Site, name: str) -> Iterator[tuple[ast.expr, Place]]:
    """Yield what the scope assigns to items of the table."""
    for statement, place in file.walk.statements:
        if place.scope is not site.place.scope:
            continue
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=held))], value=value):
                if any(one is site.node for one, _ in file.names.values(held, place)):
                    yield value, place
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=held))],
                value=value,
            ):
                if held == name:
                    yield value, place


def _kind(file: File, node: ast.expr, place: Place) -> str:
    if is_table(file, node, place):
        return "cos and sin"
    value = file.value(node, place)
    counts = value.sort == "tensor" and value.grid and not value.exponent
    return "positions" if counts and _counts(file, node, place) else ""


def _counts(file: File, node: ast.expr, place: Place) -> bool:
    """Say whether there are counts in an expression, other than those that a sum or a mean is taken of."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.Call) and getattr(one.func, "attr", "") in _SUMS:
            continue
        if any(getattr(part, "attr", "") in _SUMS for part in ast.walk(one)):
            waiting += [part for part in ast.iter_child_nodes(one) if isinstance(part, ast.expr)]
        elif file.value(one, place).grid:
            return True
    return False


RULE = Rule(
    id="SR013",
    name="written-table",
    severity="error",
    summary="a table in a dtype that others lower, which positions or cos and sin are written into",
    explanation=__doc__,
    functions=("zeros", "empty", "ones"),
    check=check,
    VALID=(
        "import torch\ndef make_pos_embed(n, d):\n    pe = torch.zeros(n, d, dtype=torch.int64)\n"
        "    pe[:, 0] = torch.arange(n)\n    return pe\n",
        "import torch\ndef make_pos_embed(n, d):\n"
        "    pe = torch.zeros(n, d, dtype=torch.int64).to(torch.float32)\n"
        "    pe[:, 0] = torch.arange(n)\n    return pe\n",
        "import torch\ndef make_pos_embed(n, x):\n    pe = torch.zeros(n, 2)\n    pe[:, 0] = x\n"
        "    return pe, torch.arange(n)\n",
        "import torch\ndef precision(n, x):\n    ap = torch.zeros(n)\n    for i in range(n):\n"
        "        ap[i] = (x[i].cumsum(0) / torch.arange(1, n)).sum()\n    return ap\n",
        "import torch\ndef rotation(angle):\n    R = torch.zeros(3, 3)\n    R[0, 0] = torch.cos(angle)\n"
        "    return R, torch.arange(9)\n",
    ),
    INVALID=(
        "import torch\ndef make_pos_embed(n, d):\n    pe = torch.zeros(n, d)\n"
        "    pe[:, 0] = torch.arange(n)\n    return pe\n",
        "import torch\nclass PositionalEncoding(torch.nn.Module):\n    def __init__(self, n, div_term):\n"
        "        pe = torch.empty(n, 64, dtype=torch.float32)\n"
        "        position = torch.arange(n).float()[:, None]\n"
        "        pe[:, 0::2] = torch.sin(position * div_term)\n        self.register_buffer('pe', pe)\n",
        "import torch\ndef make_pos_embed(n):\n    pe = torch.zeros(n, 2)\n    at = torch.arange(n).float()\n"
        "    pe[:, 0] = (at - at.mean()) / n\n    return pe\n",
        "import math, torch\ndef pos_table(n, d):\n    pe = torch.zeros(n, d)\n    for p in range(n):\n"
        "        for i in range(d):\n            pe[p, i] = math.sin(p / 1e4 ** (i / d))\n    return pe\n",
        "import torch\ndef make_pos_embed(phases):\n    pe = torch.zeros(9, 9)\n"
        "    pe[:, 0::2] = torch.sin(phases)\n    return pe\n",
        "import torch\nclass PositionalEncoding(torch.nn.Module):\n    def __init__(self, n):\n"
        "        self.pe = torch.ones(n, 2)\n        self.pe[:, 1] = torch.arange(n) / 2\n",
    ),
)
