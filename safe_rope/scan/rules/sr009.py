"""ALiBi slopes, or the bias made of them, cast to a low dtype.

slope times distance in bfloat16 gives neighbours above 256 the same bias. Checkpoints were trained with it:
casting later changes what such a model computes, so that there is no fix. Know it when you compare lengths.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import Call, File, Report, Site, tensors
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule

_BIAS = re.compile(r"(?:\w+_)?(?:alibi|slopes?)(?:_\w+)?")


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a cast of slopes or of an ALiBi bias to a low or inherited dtype."""
    if call is None or not isinstance(call.node.func, ast.Attribute) or not _is_bias(call.node.func.value):
        return None
    if call.node.func.attr not in ("half", "bfloat16"):
        target = tensors.cast_target(file.inference, call)
        if target is None or not target.lowerable:
            return None
    return Report(
        call.node,
        file.severity("note", site, follows_activations=True),
        f"ALiBi cast to a low dtype: distances collide, {messages.position()}; checkpoints may depend on it",
    )


def _is_bias(node: ast.expr) -> bool:
    """Say whether a chain of views, casts and products starts from slopes or an ALiBi bias."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(attr=name) if _BIAS.fullmatch(name):
                return True
            case ast.Attribute(value=inner) | ast.Call(func=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.BinOp():
                return _is_bias(node.left) or _is_bias(node.right)
            case _:
                return False
    return _BIAS.fullmatch(node.id) is not None


RULE = Rule(
    id="SR009",
    name="alibi-cast-low",
    severity="note",
    summary="ALiBi slopes or bias cast to a low dtype",
    explanation=__doc__,
    functions=("to", "type_as", "type", "half", "bfloat16"),
    check=check,
    VALID=(
        "import torch\ndef f(slopes):\n    return slopes.to(torch.float32)\n",
        "import torch\ndef f(alibi, device):\n    return alibi.to(device)\n",
    ),
    INVALID=(
        "import torch\ndef f(slopes, positions):\n    return slopes[..., None].bfloat16() * positions\n",
        "import torch\ndef f(alibi, n, dtype):\n    return alibi.reshape(1, n, 1).to(dtype)\n",
    ),
)
