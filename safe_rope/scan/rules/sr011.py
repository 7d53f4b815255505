"""Cosine and sine tables that a module keeps in a low dtype.

A table that is cast when it is stored, or kept as a buffer that a module cast lowers, holds cos and sin to 8
bits. The phases were right, so that the error is a constant half percent and does not grow with the
position: a note.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import Call, File, Place, Report, Site
from safe_rope.scan.rules.registered import registration
from safe_rope.scan.rules.rule import Rule

_TABLE = re.compile(r"(?:\w+_)?(?:cos|sin|cosine|sine|freqs_cis)(?:_\w+)?", re.IGNORECASE)

# What else is made of cosines.
_FILTERS = re.compile(r"filter|window|kernel|dct|basis|stft|dft|mel|hann", re.IGNORECASE)


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a registration of a cos or sin table."""
    if call is None or (kept := registration(file, site, call)) is None or kept.parameter:
        return None
    name = kept.name
    if _FILTERS.search(name) or not (_TABLE.fullmatch(name) or is_table(file, kept.tensor, site.place)):
        return None
    return Report(
        call.node,
        file.severity("note", site, follows_activations=True),
        f"{name!r} caches cos or sin where a cast lowers it: 0.4 % off at every position in bfloat16",
    )


def is_table(file: File, node: ast.expr, place: Place, depth: int = 0) -> bool:
    """Say whether cosines or sines are in an expression, or in what its variables are made of."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
            if name in ("cos", "sin", "polar"):
                return True
        elif isinstance(inner, ast.Name) and depth < 2:
            values = file.names.values(inner.id, place)
            if any(is_table(file, value, where, depth + 1) for value, where in values):
                return True
    return False


RULE = Rule(
    id="SR011",
    name="table-cached-low",
    severity="note",
    summary="cos and sin tables cached where a cast lowers them",
    explanation=__doc__,
    functions=("register_buffer", "Buffer"),
    check=check,
    VALID=(
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self):\n"
        "        self.register_buffer('position_ids', torch.arange(512))\n",
        "import torch\nclass F(torch.nn.Module):\n    def __init__(self):\n        t = torch.arange(9) / 2\n"
        "        self.register_buffer('filter', torch.sin(t) / t)\n",
    ),
    INVALID=(
        "import torch\nclass R(torch.nn.Module):\n    def f(self, emb, dtype):\n"
        "        self.register_buffer('cos_cached', emb.cos().to(dtype), persistent=False)\n",
        "import torch\nclass R(torch.nn.Module):\n    def f(self, inv_freq, t):\n"
        "        phases = torch.outer(t, inv_freq)\n"
        "        cache = torch.stack([torch.cos(phases), torch.sin(phases)], dim=-1)\n"
        "        self.register_buffer('cache', cache, persistent=False)\n",
    ),
)
