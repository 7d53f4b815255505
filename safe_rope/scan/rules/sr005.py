"""Positions that are cast to the dtype of something else.

`torch.arange(n).type_as(x)`, `.to(x.dtype)` and `.to(self.inv_freq)` hand the positions to whatever dtype an
activation, a buffer or a caller has. bfloat16 ends at 256, float16 at 2,048 whole numbers.

Cast to float32 instead. The result's dtype changes, so that the fix needs `--unsafe-fixes`.
"""

from __future__ import annotations

from safe_rope.scan import fixes, messages
from safe_rope.scan._scopes import Site
from safe_rope.scan._values import LOW
from safe_rope.scan.file import File, Report
from safe_rope.scan.names import Call
from safe_rope.scan.rules._rule import Rule


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an integer arange that is cast to a low or inherited dtype."""
    if call is None or call.function != "torch.arange" or not file.value(call.node, site.place).is_int:
        return None
    for step in file.flow.steps(site):
        if step.how == "cast" and not file.is_harmless(site, call):
            target = step.target if step.target in LOW else "a dtype that others lower"
            return Report(
                call.node,
                file.severity("warning", site, follows_activations=True),
                f"positions cast to {target}: {messages.position(step.target, file.largest(call))}"
                "; use float32",
                fixes.replace_cast(file, step.node, step.place),
            )
    return None


RULE = Rule(
    id="SR005",
    name="positions-cast-low",
    severity="warning",
    summary="an integer arange cast to the dtype of another tensor, or to a low one",
    explanation=__doc__,
    functions=("arange",),
    check=check,
    VALID=(
        "import torch\nt = torch.arange(n).to(torch.float32)\n",
        "import torch\ndef f(x, n):\n    return torch.arange(n).to(x.device)\n",
        "import torch\ndef f(device, n):\n    return torch.arange(n).to(device)\n",
        "import torch\ndef f(input_ids, n):\n    return torch.arange(n).type_as(input_ids)\n",
        "import torch\nt = torch.arange(128).to(torch.bfloat16)\n",
    ),
    INVALID=(
        "import torch\ndef f(self, n):\n    return torch.arange(n).type_as(self.inv_freq)\n",
        "import torch\ndef f(x, n):\n    return torch.arange(n, device=x.device).to(x.dtype)\n",
        "import torch\nt = torch.arange(4096).bfloat16()\n",
        "import torch\ndef f(n, damping: torch.Tensor):\n    return torch.arange(n).to(damping)\n",
        "import torch\ndef f(n, dtype):\n    t = torch.arange(n)\n    return t[None, :].to(dtype)\n",
    ),
)
