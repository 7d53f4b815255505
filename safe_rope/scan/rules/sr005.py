"""Positions that are cast to the dtype of something else.

`torch.arange(n).type_as(x)`, `.to(x.dtype)` and `.to(self.inv_freq)` hand the positions to whatever dtype an
activation, a buffer or a caller has. bfloat16 ends at 256, float16 at 2,048 whole numbers.

Cast to float32 instead. The result's dtype changes, so that the fix needs `--unsafe-fixes`.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import (
    INVERSE_FREQUENCIES,
    LOW,
    PINNED,
    Argument,
    Call,
    File,
    Place,
    Report,
    Severity,
    Site,
    Step,
    Value,
    indices,
    tensors,
)
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule

_POSITION_IDS = re.compile(r"(?:\w+_)?pos(?:ition)?_ids(?:_expanded)?")
_HALVES = {"half": "float16", "bfloat16": "bfloat16"}
_POSITIONS = re.compile(r"positions?")  # of embeddings, if what is around says so


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report an integer arange, or position ids, cast to a low or inherited dtype."""
    if call is None:
        return None
    if (counted := file.counted(call)) is None:
        return _cast_of_positions(file, site, call)
    call = counted
    if not call.complete or not file.value(call.node, site.place).is_int:
        return None
    for step in file.flow.steps(site):
        if step.how != "cast" or file.is_harmless(site, call):
            continue
        target = _target(file, step)
        if target is None or not indices.counts_in(file, site, target):
            severity: Severity = "note" if target and _meets(site, step, target) else "warning"
            return Report(
                call.node,
                file.severity(severity, site, follows_activations=True),
                f"positions cast to {_named(step.target)}: "
                f"{messages.position(step.target, file.largest(call))}; use float32",
                fixes.replace_cast(file, step.node, step.place, call.node.func),
                step.node,
            )
    return None


def _target(file: File, step: Step) -> Argument | None:
    """Return the dtype or tensor that a cast is to, if it is an argument."""
    if not isinstance(step.node, ast.Call):
        return None
    return tensors.cast_argument(file.inference, file.inference.call(step.node, step.place))


def _meets(site: Site, step: Step, target: Argument) -> bool:
    """Say whether an operation with the very tensor follows at once: it would cast the integers too."""
    tensor = ast.dump(target.value)
    operations = [node for node in site.ancestors if isinstance(node, ast.BinOp) and node is not step.node]
    around = [node for operation in operations for node in ast.walk(operation)]
    within = {id(node) for node in ast.walk(step.node)}
    return any(ast.dump(node) == tensor for node in around if id(node) not in within)


def _cast_of_positions(file: File, site: Site, call: Call) -> Report | None:
    """Report a cast of what is called position ids, wherever they come from."""
    node = call.node.func
    if not isinstance(node, ast.Attribute):
        return None
    of = node.value
    while (inner := _reshaped(of) or _moved(file, of, site.place)) is not None:
        of = inner
    name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    frequencies = INVERSE_FREQUENCIES.fullmatch(name) is not None
    positions = _POSITION_IDS.fullmatch(name) or (_POSITIONS.fullmatch(name) and file.purpose.shown(site))
    if not frequencies and not positions and not _is_helpers(file, of, site.place):
        return None
    if node.attr in _HALVES:
        target: Value | None = Value("dtype", dtype=_HALVES[node.attr])
    else:
        target = tensors.cast_target(file.inference, call)
        argument = tensors.cast_argument(file.inference, call)
        if argument is None or "device" in ast.unparse(argument.value):
            return None
        if indices.holds(file, argument.value, argument.place):
            return None
    if target is None or not target.lowerable:
        return None
    what = "inverse frequencies" if frequencies else "positions"
    becomes = "0.4 % off in bfloat16" if frequencies else messages.position(target.dtype)
    return Report(
        call.node,
        file.severity("warning", site, follows_activations=True),
        f"{what} cast to {_named(target.dtype)}: {becomes}; use float32",
        fixes.replace_cast(file, call.node, site.place),
    )


def _reshaped(node: ast.expr) -> ast.expr | None:
    """Return what an expression gives a part or another shape of; None if it does neither."""
    if isinstance(node, ast.Subscript):
        return node.value
    method = node.func if isinstance(node, ast.Call) else None
    return method.value if isinstance(method, ast.Attribute) and method.attr in tensors.KEPT else None


def _moved(file: File, node: ast.expr, place: Place) -> ast.expr | None:
    """Return what an expression moves to a device, or casts to a dtype that holds it; else None."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr != "to":
        return node.func.value if node.func.attr in ("float", "double") else None
    target = tensors.cast_target(file.inference, file.inference.call(node, place))
    return node.func.value if target is None or target.dtype in PINNED else None


def _is_helpers(file: File, node: ast.expr, place: Place) -> bool:
    """Say whether it is a grid of positions as a function of this file returns it."""
    nodes = file.names.values(node.id, place) if isinstance(node, ast.Name) else [(node, place)]
    if not any(
        isinstance(one, ast.Call) and file.names.qualify(one.func, where).startswith(".")
        for one, where in nodes
    ):
        return False
    value = file.value(node, place)
    return value.grid and not value.exponent and value.dtype != "bool"


def _named(dtype: str) -> str:
    return dtype if dtype in LOW else "a dtype that others lower"


RULE = Rule(
    id="SR005",
    name="positions-cast-low",
    severity="warning",
    summary="positions cast to the dtype of another tensor, or to a low one",
    explanation=__doc__,
    functions=("arange", "tensor", "as_tensor", "to", "type", "type_as", "half", "bfloat16"),
    check=check,
    VALID=(
        "import torch\nt = torch.arange(n).to(torch.float32)\n",
        "import torch\ndef f(x, n):\n    return torch.arange(n).to(x.device)\n",
        "import torch\ndef f(device, n):\n    return torch.arange(n).to(device)\n",
        "import torch\ndef f(input_ids, n):\n    return torch.arange(n).type_as(input_ids)\n",
        "import torch\nt = torch.arange(128).to(torch.bfloat16)\n",
        "import torch\nt = torch.arange(n).type(torch.LongTensor)\n",
        "import torch\nt = torch.arange(n).type(torch.cuda.DoubleTensor)\n",
        "import torch\ndef f(position_ids):\n    return position_ids.type('torch.IntTensor')\n",
        "import torch\ndef f(x, i, h, w):\n    x[i, :h] = 0\n    return torch.arange(h).to(h)\n",
        "import torch\ndef grid(h):\n    return torch.arange(h).to(h)\n"
        "def f(x, i, sizes):\n    for h in sizes:\n        x[i, :h] = grid(h)\n",
        "import torch\ndef f(batch_idxs, n):\n    return torch.arange(n).type_as(batch_idxs)\n",
        "import torch\ndef f(x, order, n):\n    return x[torch.arange(n).to(order) - order]\n",
        "import torch\ndef forward(self, x, position_ids):\n    return position_ids.to(x.device)\n",
        "import torch\ndef forward(self, x, inv_freq):\n    return inv_freq.to(x.device)\n",
        "import torch\ndef f(position_ids):\n    d = self._text_device\n    return position_ids.to(d)\n",
        "import torch\ndef f(position_ids):\n    d = torch.device('cuda')\n    return position_ids.to(d)\n",
        "import torch\ndef f(position_ids):\n    d = self.devices[0]\n    return position_ids.to(d)\n",
        "import torch\ndef forward(self, position_ids):\n"
        "    return [position_ids.to(place) for place in self.devices]\n",
        "import torch\ndef forward(self, x, position_ids):\n    return position_ids[:, None].to(x.device)\n",
        "import torch\ndef f(position_ids):\n    return position_ids[..., None].type(torch.float32)\n",
        "import torch\ndef forward(self, inv_freq):\n    return inv_freq.to(torch.float32)\n",
        "import torch\ndef forward(self, x, inv_freq):\n    return inv_freq.float().to(x.device)\n",
    ),
    INVALID=(
        "import torch\ndef f(x, n):\n    return torch.tensor([i for i in range(n)]).to(x.dtype)\n",
        "import torch\ndef f(self, n):\n    return torch.arange(n).type_as(self.inv_freq)\n",
        "import torch\ndef f(x, n):\n    return torch.arange(n, device=x.device).to(x.dtype)\n",
        "import torch\nt = torch.arange(4096).bfloat16()\n",
        "import torch\nt = torch.arange(4096).type(torch.HalfTensor)\n",
        "import torch\nt = torch.arange(4096).type('torch.cuda.BFloat16Tensor')\n",
        "import torch\ndef f(n, damping: torch.Tensor):\n    return torch.arange(n).to(damping)\n",
        "import torch\ndef f(n, dtype):\n    t = torch.arange(n)\n    return t[None, :].to(dtype)\n",
        "import torch\ndef forward(self, x, position_ids):\n"
        "    return position_ids.to(device=x.device, dtype=x.dtype)\n",
        "import torch\ndef forward(self, x, inv_freq):\n    return inv_freq.to(x.dtype)\n",
        "import torch\ndef grid(h, w):\n    ys, xs = torch.arange(h), torch.arange(w)\n"
        "    return torch.stack(torch.meshgrid([xs, ys], indexing='ij'), dim=-1).permute(1, 0, 2)\n"
        "def forward(self, x):\n    g = grid(64, 640)\n    g = g.to(x.dtype)\n    return g\n",
        "import torch\ndef forward(self, x, position_ids):\n    return position_ids[..., None].type_as(x)\n",
        "import torch\ndef f(x, inv_freq):\n    return inv_freq[None].unsqueeze(-1).to(x.dtype)\n",
        "import torch\ndef f(x, inv_freq, device):\n    return inv_freq.to(device=device).to(x.dtype)\n",
        "import torch\ndef f(inv_freq, device):\n    return inv_freq.to(device).half()\n",
        "import torch\ndef forward(self, position_ids):\n    return position_ids.float().bfloat16()\n",
    ),
)
