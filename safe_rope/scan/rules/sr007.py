"""Positions counted by `cumsum` over a mask in a floating dtype.

The running sum of a mask numbers the tokens or pixels. In bfloat16 it stops at 256: 256 + 1 rounds to 256,
and every later position is the same one. Sum integers or booleans, or ask for `dtype=torch.float32`; the
result's dtype changes, so that the fix needs `--unsafe-fixes`.

Not reported: sums of probabilities, widths or values, which count nothing.
"""

from __future__ import annotations

import ast

from safe_rope.scan.engine import Argument, Call, File, Report, Site
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a cumsum of whole numbers in a floating dtype that something can lower."""
    if call is None or (operand := _operand(call, site)) is None:
        return None
    value = file.of(operand)
    # What only its name makes a mask is summed in the dtype that is asked for.
    summed = value.sort == "tensor" or "dtype" in call.keywords
    if not summed or not value.whole or value.is_int:
        return None
    if _is_filled(file, operand):
        return None
    lowered = (file.dtype(call) or value).lowerable
    if not lowered and ("dtype" in call.keywords or not _is_made(file, operand)):
        return None
    return Report(
        call.node,
        file.severity("warning", site, follows_activations=lowered),
        f"cumsum of a mask in a floating dtype: 256 + 1 stays 256 ({messages.position()}); sum integers",
        fixes.with_dtype(file, call, site.place),
    )


def _is_made(file: File, operand: Argument) -> bool:
    """Say whether a constructor that zero.Init casts makes the tensor, whatever dtype it is asked for."""
    node, place = operand.value, operand.place
    nodes = file.names.values(node.id, place) if isinstance(node, ast.Name) else [(node, place)]
    made = ("torch.ones", "torch.full", "torch.tensor")
    return any(
        isinstance(one, ast.Call)
        and file.names.qualify(one.func, where) in made
        and file.value(one, where).dtype  # that of listed numbers may not be known
        and not file.names.is_early(one.func, where)
        for one, where in nodes
    )


def _is_filled(file: File, operand: Argument) -> bool:
    """Say whether items of a variable are set to what is not known to be whole: it is no mask."""
    uses = file.flow.uses(operand.place.scope, getattr(operand.value, "id", ""))
    return any(
        isinstance(target, ast.Subscript)
        and target.value is node
        and isinstance(statement, ast.Assign | ast.AugAssign)
        and target is not statement.value
        and not file.value(statement.value, place).whole
        for node, (*_, statement, target), place in (use for use in uses if len(use[1]) > 1)
    )


def _operand(call: Call, site: Site) -> Argument | None:
    if call.function == "torch.cumsum":
        return call.argument(0, "input")
    function = call.node.func
    if call.function in ("", "cumsum") or call.function.split(".")[0] not in ("numpy", "jax", "tensorflow"):
        return Argument(function.value, site.place) if isinstance(function, ast.Attribute) else None
    return None


RULE = Rule(
    id="SR007",
    name="float-cumsum",
    severity="warning",
    summary="cumsum of a mask in a floating dtype",
    explanation=__doc__,
    functions=("cumsum",),
    check=check,
    VALID=(
        "import torch\ndef f(mask, x):\n    return (~mask).cumsum(1, dtype=torch.float32)\n",
        "import torch\ndef f(ids, pad):\n    mask = ids.ne(pad).int()\n"
        "    return torch.cumsum(mask, dim=1)\n",
        "import torch\ndef f(logits):\n    return logits.softmax(dim=-1).cumsum(dim=-1)\n",
        "import torch\ndef f(mask):\n    return mask.long().cumsum(-1) - 1\n",
        "import torch\ndef f(mask):\n    return mask.cumsum(-1)\n",
        "import torch\ndef f(x, n):\n    return x.new_ones(n, dtype=torch.float32).cumsum(0)\n",
        "import torch\ndef f(x, widths):\n    return torch.cumsum(widths.to(x.dtype), dim=-1)\n",
        "import torch\ndef f(n):\n    return torch.full((n,), 1).cumsum(0)\n",
        "import torch\ndef f(n):\n    return torch.cumsum(torch.tensor([0] + n.tolist()), dim=-1)\n",
        "import torch\ndef f(f0, rate):\n    steps = torch.zeros(9, f0.size(-1))\n    for i in range(9):\n"
        "        steps[i : i + 1] = f0 * (i + 1) / rate\n    return torch.cumsum(steps, dim=-1) % 1\n",
        "import torch\ndef f(attention_mask, ids, image):\n    mask = attention_mask.new_zeros(ids.shape)\n"
        "    mask |= ids == image\n    return mask.cumsum(-1) - 1\n",
    ),
    INVALID=(
        "import torch\ndef f(attention_mask, n):\n    mask = attention_mask\n    if mask is None:\n"
        "        mask = torch.ones(2, n)\n    return torch.cumsum(mask, dim=1)\n",
        "import torch\ndef f(ids, pad, x):\n    mask = ids.ne(pad).to(x.dtype)\n    return mask.cumsum(1)\n",
        "import torch\ndef f(b, n):\n    return torch.cumsum(torch.ones(b, n), dim=-1) - 1\n",
        "import torch\ndef f(n):\n    return torch.ones(n, dtype=torch.float32).cumsum(0)\n",
        "import torch\ndef f(mask, x):\n    return mask.to(x.dtype).cumsum(1)\n",
        "import torch\ndef f(pad_mask, dtype):\n    embed_mask = pad_mask[:, 0].to(dtype)\n"
        "    return embed_mask.cumsum(1)\n",
        "import torch\ndef f(mask: torch.Tensor | None, dtype: torch.dtype):\n    m = mask.to(dtype)\n"
        "    return m.cumsum(1)\n",
        "import torch\ndef f(attention_mask, x):\n    return torch.cumsum(attention_mask.type_as(x), 1)\n",
        "import torch\ndef f(log_duration):\n    duration = torch.ceil(torch.exp(log_duration))\n"
        "    return torch.cumsum(duration, -1)\n",
        "import torch\ndef f(attention_mask, x):\n    return attention_mask.cumsum(-1, dtype=x.dtype) - 1\n",
        "import torch\ndef f(n):\n    return torch.full((n,), 1.0).cumsum(0)\n",
        "import torch\ndef f(x, lengths):\n    seen = torch.zeros(x.shape[0], 9999)\n"
        "    for i, n in enumerate(lengths):\n        seen[i, :n] = 1\n    return seen.cumsum(-1)\n",
    ),
)
