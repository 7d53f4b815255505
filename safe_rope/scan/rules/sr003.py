"""`torch.arange` with a float bound and no dtype: it counts in the default dtype.

`torch.set_default_dtype(torch.bfloat16)`, as loading in bfloat16 does around a model's constructor, and
DeepSpeed's `zero.Init` both lower it. If all bounds are whole numbers, as in `arange(0.0, d, 2.0)`, counting
in int64 gives the same FP32 values and no default can touch them. If they are fractions there is no fix,
because integers would change the values.

A tensor of `[float(i) for i in range(n)]` is the same. `torch.range` counts in the default dtype whatever its
bounds are. It includes its end, so that no fix is offered: use an integer `torch.arange`, and cast.
"""

from __future__ import annotations

from safe_rope.scan.engine import Call, File, Report, Site
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules.rule import Rule
from safe_rope.scan.rules.sr001 import called, effect


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an arange that is floating only because of its bounds."""
    if call is None or not call.complete:
        return None
    if call.function == "torch.range":
        return _range(file, site, call)
    call = file.counted(call)
    if call is None or file.dtype(call) is not None:
        return None
    if not call.floats and not any(value.is_float for value in file.bounds(call)):
        return None
    if file.is_harmless(site, call):
        return None
    fix = None if "dtype" in call.keywords else fixes.through_integers(file, call, site.place)
    return Report(
        call.node,
        file.severity("error", site),
        f"{called(call)} of floats in the default dtype: {effect(file, site, call, 'default')}"
        "; give whole bounds and cast",
        fix,
    )


def _range(file: File, site: Site, call: Call) -> Report | None:
    dtype = file.dtype(call)
    if (dtype is not None and not dtype.lowerable) or file.is_harmless(site, call):
        return None
    counts = "the default dtype" if dtype is None else dtype.source or "a dtype that others lower"
    return Report(
        call.node,
        file.severity("error", site, follows_activations=dtype is not None),
        f"torch.range counts in {counts}: {effect(file, site, call, 'default')}"
        "; use an integer arange and cast",
    )


RULE = Rule(
    id="SR003",
    name="float-bounds-arange",
    severity="error",
    summary="torch.arange with float bounds and no dtype",
    explanation=__doc__,
    functions=("arange", "range", "tensor"),
    check=check,
    VALID=(
        "import torch\nt = torch.arange(0, d, 2)\n",
        "import torch\nt = torch.arange(0.0, d, 2.0, dtype=torch.int64)\n",
        "import torch\nt = torch.arange(0.0, 100.0)\n",
        "import torch\nt = torch.arange(n // 2)\n",
        "import torch\nt = torch.range(0, n, dtype=torch.int64)\n",
        "import torch\nt = torch.range(0, n, dtype=torch.float32)\n",
        "import torch\nt = torch.range(0, 9)\n",
    ),
    INVALID=(
        "import torch\ninv_freq = 1 / (10000 ** (torch.arange(0.0, d, 2.0) / d))\n",
        "import torch\ndef f(beg, end):\n    return torch.arange(beg, end, -1.0)\n",
        "import torch\nt = torch.arange(0, 1, 1 / n)\n",
        "import torch\nt = torch.arange(float(n))\n",
        "import torch\nt = torch.range(0, 4096)\n",
        "import torch\nt = torch.tensor([float(i) for i in range(n)])\n",
        "import torch\nt = torch.range(0, n, dtype=x.dtype)\n",
        "import torch\nclass R(torch.nn.Module):\n    def f(self):\n        self.t = torch.arange(4e3)\n",
    ),
)
