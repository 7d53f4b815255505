"""Inverse frequencies that a module keeps as a buffer or parameter.

`module.to(torch.bfloat16)`, `module.half()` and DeepSpeed's engine cast every floating buffer and parameter.
`inv_freq` in bfloat16 is off by up to 0.4 %, and no later `.float()` brings it back.

A class is reported once, at the first of those that weigh most.

There is no edit that is right for every model: keep the frequencies where casts do not reach them, or build
them again, in float32, when they are used.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import FLOATING, INVERSE_FREQUENCIES, Call, File, Report, Site
from safe_rope.scan.rules.registered import registration
from safe_rope.scan.rules.rule import Rule

# Tables of cos and sin are SR011's; a decay is raised to a grid too.
_OTHERS = re.compile(r"cos|sin(?!us)|decay|slope|alibi|window|filter", re.IGNORECASE)


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a registration of inverse frequencies."""
    if call is None or (kept := registration(file, site, call)) is None:
        return None
    name, _, value, parameter = kept
    if not INVERSE_FREQUENCIES.fullmatch(name) and not (value.exponent and value.dtype in {*FLOATING, ""}):
        return None
    if _OTHERS.search(name):
        return None
    how = "parameter" if parameter else "buffer"
    learned = parameter and "requires_grad" not in call.keywords
    shown = not learned and not _is_restored(site, name) and file.purpose.keeps(site.place, name)
    certain = shown or INVERSE_FREQUENCIES.fullmatch(name) is not None
    what = "inverse frequencies" if certain else "powers of a grid, as inverse frequencies are"
    return Report(
        call.node,
        "note" if not shown else file.severity("warning", site, follows_activations=True, shown=True),
        f"{how} {name!r} holds {what}, and a cast of the module lowers it: up to 0.4 % off in bfloat16",
    )


def _is_restored(site: Site, name: str) -> bool:
    """Say whether the class does something about the attribute itself when its module is cast."""
    owner = site.place.scope.owner
    return any(
        isinstance(method, ast.FunctionDef)
        and method.name == "_apply"
        and any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(method))
        for method in getattr(owner and owner.node, "body", ())
    )


RULE = Rule(
    id="SR008",
    name="inv-freq-buffer",
    severity="warning",
    summary="inverse frequencies as a buffer or parameter, which a module cast lowers",
    explanation=__doc__,
    functions=("register_buffer", "Buffer", "Parameter"),
    check=check,
    once_per_class=True,
    VALID=(
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        self.register_buffer('position_ids', torch.arange(512))\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        self.register_buffer('inv_freq', None)\n",
        "import torch\nclass M(torch.nn.Module):\n    def __init__(self, n):\n"
        "        dt = torch.exp(torch.rand(n))\n        self.dt_bias = torch.nn.Parameter(dt)\n"
        "        self.ids = torch.arange(n)\n        x = self.ids / n\n",
    ),
    INVALID=(
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        inv_freq = 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d))\n"
        "        self.register_buffer('inv_freq', inv_freq, persistent=False)\n",
        "import torch\nfrom torch import nn\nclass R(nn.Module):\n    def __init__(self, inv_freq):\n"
        "        self.inv_freq = nn.Buffer(inv_freq, persistent=False)\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        self.register_buffer('freqs', self.table(d), persistent=False)\n"
        "    def table(self, d):\n"
        "        return 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d))\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        theta = 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d))\n"
        "        self.register_buffer('theta', theta)\n",
    ),
)
