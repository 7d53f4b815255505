"""Integers that an operation turns into the default dtype.

`torch.arange(0, d, 2) / d`, `torch.exp(torch.arange(d) * -0.1)` and the like leave integers in the default
dtype. Loading a model in bfloat16 sets that to bfloat16 around its constructor, and the exponents or
positions are rounded to 8 bits.

Cast to float32 before the operation: it then computes the same FP32 values, whatever the default is.
"""

from __future__ import annotations

import ast

from safe_rope.scan.engine import Call, File, Report, Site, Step
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules.rule import Rule
from safe_rope.scan.rules.sr001 import frequencies


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an integer arange that is divided, scaled by a float or put through exp and its like."""
    call = file.counted(call)
    if call is None:
        return None
    if not file.value(call.node, site.place).is_int:
        return None
    for step in file.flow.steps(site):
        if step.how == "arithmetic":
            fix = fixes.cast_operand(file, call, step)
            return Report(
                call.node,
                "note" if _is_ramp(file, site, call, step) else file.severity("warning", site),
                f"integers become the default dtype here: {_effect(file, site, call)}; cast to float32 first",
                fix,
                step.operand,
            )
    return None


def _effect(file: File, site: Site, call: Call) -> str:
    raised = file.flow.is_raised(site)
    return frequencies(file, site, call) if raised else "what is computed keeps 8 bits in bfloat16"


def _is_ramp(file: File, site: Site, call: Call, step: Step) -> bool:
    """Say whether a count is divided by its own length, and nothing raised to that: shares of a whole."""
    match step.node:
        case ast.BinOp(left=left, op=ast.Div(), right=right) if (
            left is step.operand and len(call.bounds) == 1
        ):
            own = ast.dump(call.bounds[0].value) == ast.dump(right)
            return own and not file.flow.is_raised(site)
    return False


RULE = Rule(
    id="SR004",
    name="integers-to-default-dtype",
    severity="warning",
    summary="an integer arange that arithmetic turns into the default dtype",
    explanation=__doc__,
    functions=("arange", "tensor", "as_tensor"),
    check=check,
    VALID=(
        "import torch\nx = torch.arange(0, d, 2).to(torch.float32) / d\n",
        "import torch\nx = torch.arange(0, d, 2).float() / d\n",
        "import torch\nx = torch.arange(n)[None, :] + 1\n",
        "import torch\nx = torch.arange(n) // 2\n",
        "import torch\nx = torch.exp(torch.arange(n).to(torch.float32) * 0.5)\n",
        "import torch\nx = torch.div(torch.arange(n), 2, rounding_mode='floor')\n",
    ),
    INVALID=(
        "import torch\nx = torch.tensor(range(n)) / n\n",
        "import torch\ninv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2) / dim))\n",
        "import torch, math\nx = torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))\n",
        "import torch\nx = torch.exp(torch.arange(n))\n",
        "import torch\ndef f(n, ratio):\n    t = torch.arange(n)\n    return t / ratio\n",
        "import torch\nx = (torch.arange(0, d, 2)[: d // 2].view(1, -1) + 0.5).sin()\n",
        "import torch\ndef f(n, d: int):\n    t: torch.Tensor = torch.arange(n)\n    return t / d\n",
        "import torch\nfreqs = 10000.0 ** torch.arange(n, dtype=torch.int64)\n",
        "import torch\nx = torch.exp(torch.arange(n) * -torch.log(torch.tensor(1e4)))\n",
        "import torch\nt = torch.arange(1, n)\nx = torch.true_divide(t, 3)\n",
        "import torch\nt = torch.arange(1, n)\nx = abs(t) / 3\n",
        "import torch\nx = 1e4 ** ((t := torch.arange(0, d, 2)) / d)\n",
        "import torch\nx = (t := torch.arange(n)) + 1\ny = t / d\n",
        "import torch\nx = torch.div(other=d, input=torch.arange(n))\n",
        "import torch\nx = torch.arange(n).div(other=d)\n",
        "import torch\nt = torch.arange(1, n)\nx = torch.neg(t) / 3\n",
        "import torch\nt = torch.arange(1, n)\nx = torch.flip(t, (0,)) / 3\n",
        "import torch\nt = torch.arange(1, n)\nx = torch.outer(t, t) / 3\n",
        "import torch\nt = torch.arange(1, n)\nx = torch.stack((t, t)) / 3\n",
        "import torch\nt = torch.arange(1, n)\nx = t.reciprocal()\n",
        "import torch\nt = torch.arange(1, n)\nx = t.rsqrt()\n",
        "import torch\nt = torch.arange(1, n)\nx = t.exp2()\n",
        "import torch\nx = torch.arange(n) * torch.tensor([0.5, 0.25])[:, None]\n",
        "import torch\ndef f(n, d):\n    step = torch.tensor(9.2 / (d - 1))\n"
        "    return torch.arange(n) * -step\n",
        "import torch\nfrom math import pi\nfreqs = torch.arange(1, n + 1) * pi\n",
    ),
)
