"""A grid of positions or frequencies from `linspace` or `logspace` in a default or inherited dtype.

`zero.Init` leaves `linspace` alone; the default dtype and an inherited one do not. A pixel's centre k + 0.5
needs 9 bits above 128, and bfloat16 has 8. Ask for float32. The result's dtype changes, so the fix needs
`--unsafe-fixes`.

Not reported: grids that are read back as Python numbers (stochastic depth), and ramps within 0 and 1 that are
no exponents. Nor are grids named as bins, bounds, rates, schedules, windows or filters: none of them are
positions.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import Call, File, Report, Site
from safe_rope.scan.engine.purpose import is_position
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules.rule import Rule

_NO_POSITIONS = re.compile(
    r"drop|dpr|rate|snr|bins?\b|bins?_|bound|bucket|quantile|threshold|beta|sigma|noise|alpha|schedule|time_?step"
    r"|decay|window|fade|weight|prob|lower|upper|level|temperature|guidance|mel\b|mel_|_mels?\b|hz\b|hz_|\bdt_|_dt\b"
    r"|audio|video|image\b|latent|sample\b|loss",
    re.IGNORECASE,
)
_WHERE = ("device", "dtype")  # whose tensors say nothing of the grid
# The functions around that make something else than positions.
_NO_ENCODING = re.compile(
    r"schedule|temperature|gauss|blur|mel(?:scale)?_|_mel|filter|_?fbanks?|fb_matrix|kernel|upsample"
)


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a linspace or logspace of positions whose dtype is not pinned."""
    if call is None or not call.complete or call.function not in ("torch.linspace", "torch.logspace"):
        return None
    dtype = file.dtype(call)
    if dtype is not None and dtype.dtype and not dtype.lowerable:
        return None
    ramp = call.function == "torch.linspace" and _is_ramp(file, call) and not file.flow.is_raised(site)
    if ramp and not file.is_shown(site):
        return None
    named = any(is_position(ast.unparse(target)) for target in site.targets)
    if _is_read_back(site) or (_NO_POSITIONS.search(_words(site)) and not named):
        return None
    if _NO_ENCODING.search(site.place.scope.name):
        return None
    inherited = dtype is not None
    what = "an inherited dtype" if inherited else "the default dtype"
    return Report(
        call.node,
        file.severity("warning", site, follows_activations=inherited),
        f"{call.function.removeprefix('torch.')} in {what}: 128.5 rounds to 128 in bfloat16; ask for float32",
        fixes.with_dtype(file, call, site.place),
    )


def _is_ramp(file: File, call: Call) -> bool:
    ends = [call.argument(0, "start"), call.argument(1, "end")]
    start, end = (None if at is None else file.value(at.value, at.place).constant for at in ends)
    inside = [None if at is None else 0 <= at <= 1 for at in (start, end)]
    # To one from what nobody knows: a share of a whole. Frequencies start there.
    return inside == [True, True] or (start is None and end == 1)


def _is_read_back(site: Site) -> bool:
    """Say whether the statement reads the grid back as Python numbers; bounds and counts may be read too."""
    waiting: list[ast.AST] = list(site.ancestors[:1])
    for node in waiting:  # which grows
        if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist"):
            return True
        others = node is site.node or (isinstance(node, ast.comprehension) and node not in site.ancestors)
        waiting += [] if others else ast.iter_child_nodes(node)
    return False


def _words(site: Site) -> str:
    """Return the names in the call, but for where it is made, and in the target of its statement."""
    assert isinstance(site.node, ast.Call)
    given = [*site.node.args, *(word.value for word in site.node.keywords if word.arg not in _WHERE)]
    nodes = [inner for one in given for inner in ast.walk(one)]
    words = [node.id for node in nodes if isinstance(node, ast.Name)]
    words += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    words += [ast.unparse(target) for target in site.targets]
    words += [node.arg for node in site.ancestors if isinstance(node, ast.keyword) and node.arg]
    return " ".join(words)


RULE = Rule(
    id="SR006",
    name="linspace-dtype",
    severity="warning",
    summary="linspace or logspace of positions in a default or inherited dtype",
    explanation=__doc__,
    functions=("linspace", "logspace"),
    check=check,
    VALID=(
        "import torch\nx = torch.linspace(0.5, h - 0.5, h, dtype=torch.float32)\n",
        "import torch\ndpr = [x.item() for x in torch.linspace(0, config.drop_path_rate, n)]\n",
        "import torch\nx = torch.linspace(0, 1, n)\n",
        "import torch\nrates = [float(x.item()) for x in torch.linspace(0, config.rate_end, n)]\n",
        "import torch\nframes = torch.linspace(0, total - 1, n).round().tolist()\n",
        "import torch\niou = torch.linspace(0.5, 0.95, 10)\n",
        "import torch\ndef sample(begin, steps):\n    return torch.linspace(begin, 1, steps + 1)\n",
        "import torch\nboundaries = torch.linspace(0, 20, n)\n",
        "import torch\ndef gaussian_blur(k, half):\n    x = torch.linspace(-half, half, steps=k)\n"
        "    return torch.exp(-0.5 * x**2)\n",
        "import numpy as np\nx = np.linspace(0, 4096, 4096)\n",
    ),
    INVALID=(
        "import torch\ndef f(text_len, audio_len):\n    abs_pos = torch.linspace(0, text_len, audio_len)\n"
        "    return abs_pos\n",
        "import torch\ndef f(h, x):\n    return torch.linspace(0.5, h - 0.5, h, dtype=x.dtype)\n",
        "import torch\nbands = torch.linspace(1.0, max_freq / 2, n)\n",
        "import torch\nfreqs = torch.logspace(0, 1, n, b)\n",
        "import torch\nedges = torch.linspace(0, n - 1, n)\n",
        "import torch\ndef f(self, h):\n"
        "    return torch.linspace(0, self.side - 1, h, device=self.pos_embed.weight.device)\n",
        "import torch\ndef f(side, heights):\n"
        "    return [torch.linspace(0, side - 1, int(h)) for h in heights.tolist()]\n",
        "import torch\ndef f(side, h):\n    return torch.linspace(0, side.item() - 1, h)\n",
        "import torch\nx = torch.logspace(0, 4, n, dtype=torch.bfloat16)\n",
        "import torch\ndef f(n, log_max):\n    ramp = torch.linspace(0.0, 1.0, n)\n"
        "    return torch.exp(ramp * log_max)\n",
    ),
)
