"""A count or an exponent grid that `torch.arange` makes in a floating dtype.

DeepSpeed's `zero.Init` replaces `torch.arange` while a module is built. It casts a floating result to
bfloat16 or float16, whatever dtype was asked for. bfloat16 holds every whole number only up to 256; 257
becomes 256. An inverse frequency computed from such exponents is off by half a percent, which is several
radians at position 4,095.

What a module holds by `from torch import arange`, or under another name, is torch's function where the module
is imported before. So is what the body of the module or of a class calls. Then only a cast lowers what it
makes, which is a warning.

An integer tensor is left alone. Count in int64 and cast afterwards: the FP32 values are the same bit for
bit, with and without `zero.Init`. The fix is offered only where every bound is provably a whole number:
`arange(0, 1, 0.25)` must stay as it is.

Not reported: counts that provably stay within 256 and that nothing divides or raises.
"""

from __future__ import annotations

import ast

from safe_rope.scan.engine import LOW, PINNED, Call, File, Report, Site, Value, is_import
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an arange whose dtype is a floating literal, seen through variables and defaults."""
    if call is None or call.function not in ("torch.arange", "torch.tensor"):
        return None
    call = file.counted(call)
    if call is None or (given := call.keywords.get("dtype")) is None:
        return None
    dtype = file.value(given.value, given.place)
    if dtype.dtype not in PINNED | LOW or is_anothers(dtype) or file.is_harmless(site, call):
        return None
    fix = fixes.through_integers(file, call, site.place, keep=dtype.dtype in PINNED)
    early = dtype.dtype in PINNED and (is_import(site) or file.names.is_early(call.node.func, site.place))
    return Report(
        call.node,
        file.severity("warning" if early else "error", site, follows_activations=dtype.dtype in LOW),
        f"{called(call)} in {dtype.dtype}: {effect(file, site, call, dtype.dtype, early=early)}"
        "; count in int64, then cast",
        fix,
    )


def is_anothers(dtype: Value) -> bool:
    """Say whether a dtype is read from a tensor: SR002 reports that, whatever it turns out to be."""
    return dtype.source.endswith(".dtype")


def called(call: Call) -> str:
    """Return what counts: an arange, or a tensor of Python's ``range``."""
    ranged = getattr(call.node.func, "attr", getattr(call.node.func, "id", "")).endswith("tensor")
    return "tensor of a range" if ranged else "arange"


def effect(file: File, site: Site, call: Call, dtype: str, *, early: bool = False) -> str:
    """Say what the values become once something lowers them; ``early``: after an import."""
    how = "" if dtype in LOW else " once zero.Init or a cast lowers it"
    if early:
        how = " once a cast lowers it, or a zero.Init in which this module is imported"
    if file.flow.is_raised(site):
        return f"{frequencies(file, site, call)}{how}"
    if file.flow.is_exponent(site):
        return f"what is computed from it keeps 8 bits in bfloat16{how}"
    return f"{messages.position(dtype, file.largest(call))}{how}"


def frequencies(file: File, site: Site, call: Call) -> str:
    """Say what becomes of the inverse frequencies of an exponent grid, in the code's own numbers."""
    bases = [
        file.value(step.node.left, step.place).constant
        for step in file.flow.steps(site, "raised")
        if isinstance(step.node, ast.BinOp)
    ]
    match [value.constant for value in file.bounds(call)]:
        case [0, int(end), 2]:
            dimension: int | None = end
        case [int(count)]:
            dimension = 2 * count
        case _:
            dimension = None
    return messages.exponent(bases[0] if bases else None, dimension)


RULE = Rule(
    id="SR001",
    name="float-arange",
    severity="error",
    summary="torch.arange with a floating dtype",
    explanation=__doc__,
    functions=("arange", "tensor"),
    check=check,
    VALID=(
        "import torch\nx = torch.arange(n, dtype=torch.int64).to(torch.float32)\n",
        "import torch\nx = torch.arange(0, d, 2).float() / d\n",
        "import torch\nx = torch.arange(200, dtype=torch.float32)\n",
        "import numpy as np\nx = np.arange(4096, dtype=np.float32)\n",
        "import torch\nx = torch.tensor(range(9), dtype=torch.float32)\n",
        "import torch\nx = torch.tensor([i for i in range(n) if i], dtype=torch.float32)\n",
        "import torch\nx = 2.0 ** torch.arange(10, dtype=torch.float32)\n",
        "import torch\ndtype = torch.long\nx = torch.arange(n, dtype=dtype)\n",
        "import torch\nr = range(n)\nx = torch.tensor(list(r)).float()\n",
    ),
    INVALID=(
        "import torch\ninv_freq = 1.0 / (base ** (torch.arange(0, 128, 2, dtype=torch.float) / 128))\n",
        "import torch as th\nt = th.arange(len(x), dtype=th.float32)\n",
        "from torch import arange, float32\nt = arange(4096, dtype=float32)\n",
        "import torch\ndtype = torch.float32\nt = torch.arange(n, dtype=dtype)\n",
        "import torch\ndef table(n, dtype=torch.float32):\n    return torch.arange(n, dtype=dtype)\n",
        "import torch\nfrom functools import partial\n"
        "count = partial(torch.arange, dtype=torch.float32)\nt = count(n)\n",
        "import torch\noptions = {'dtype': torch.float32}\nt = torch.arange(n, **options)\n",
        "import torch\ncount = torch.arange\nt = count(n, dtype=torch.float64)\n",
        "import torch\nt = getattr(torch, 'arange')(n, dtype=getattr(torch, 'float32'))\n",
        "import torch\nt = (count := torch.arange)(n, dtype=torch.float32)\n",
        "import torch\ncount = getattr(torch, 'arange')\nt = count(n, dtype=torch.float32)\n",
        "import torch\nx = torch.arange(0, 1, 4 / head_dim, dtype=torch.float32)\n",
        "import torch\nt = torch.tensor(range(n), dtype=torch.float32)\n",
        "import torch\nt = torch.tensor([i for i in range(0, n)], dtype=torch.float32)\n",
        "import torch\nr = range(n)\nt = torch.tensor(list(r), dtype=torch.float32)\n",
        "from torch import *\nt = arange(n, dtype=float)\n",
        "import torch\nt = torch.arange(n, dtype=float)\n",
        "try:\n    import torch\nexcept ImportError:\n    torch = None\nt = torch.arange(n, dtype=float)\n",
        "torch = None\nif True:\n    import torch\nt = torch.arange(n, dtype=torch.float)\n",
    ),
)
