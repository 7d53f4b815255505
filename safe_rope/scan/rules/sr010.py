"""Phases computed as a matrix product, in reach of autocast or TF32.

`inv_freq @ positions` is an outer product, yet autocast runs it in bfloat16 and
`torch.set_float32_matmul_precision("high")` in TF32, which has 11 bits: positions above 2,048 lose their last
digits. Switching autocast off around it leaves TF32 (a note).

An elementwise product gives the same FP32 bits and neither touches it. The fix is offered where one side
provably ends in a dimension of one, so that the two are the same. `torch.einsum("i,j->ij", …)` is elementwise
too, and no finding: torch makes a matrix product only of a sum over what two operands have.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import INVERSE_FREQUENCIES, Call, File, Fix, Place, Report, Site
from safe_rope.scan.fixing import fixes
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.rule import Rule

# Other things that a number is raised to a grid for.
_OTHERS = re.compile(r"decay|slope|alibi|window|filter|kernel|pdf|mask", re.IGNORECASE)
_PRODUCTS = ("torch.matmul", "torch.bmm", "torch.mm")


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a matrix product of inverse frequencies."""
    node = site.node
    if call is None:
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else []
    elif call.function not in _PRODUCTS:
        return None
    else:
        operands = [item.value for item in call.positional]
    if not any(_mentions(file, operand, site.place) for operand in operands):
        return None
    fix = _elementwise(file, node, site.place) if isinstance(node, ast.BinOp) else None
    off = _autocast_off(site)
    shown = file.purpose.shown(site, frequency=True) or any(map(_is_named, operands))
    exposed = f"autocast makes it bfloat16, {messages.position()}"
    return Report(
        node,
        "warning" if shown and not off and file.kind(site) == "forward" else "note",
        f"phases by a matrix product: {'TF32 rounds the positions to 11 bits' if off else exposed}"
        "; use an elementwise product",
        fix,
    )


def _is_named(node: ast.expr) -> bool:
    names = (getattr(inner, "id", getattr(inner, "attr", "")) for inner in ast.walk(node))
    return any(map(INVERSE_FREQUENCIES.fullmatch, names))


def _mentions(file: File, node: ast.expr, place: Place, depth: int = 0) -> bool:
    """Say whether inverse frequencies are in an expression, or in what a variable in it was made of."""
    for inner in ast.walk(node):
        name = getattr(inner, "id", getattr(inner, "attr", ""))
        if INVERSE_FREQUENCIES.fullmatch(name):
            return True
        named = isinstance(inner, ast.Name | ast.Attribute) and not _OTHERS.search(name)
        if named and isinstance(inner, ast.expr) and file.value(inner, place).exponent:
            return True
        if isinstance(inner, ast.Name) and depth == 0:
            values = file.names.values(inner.id, place)
            if any(_mentions(file, value, where, 1) for value, where in values):
                return True
    return False


def _autocast_off(site: Site) -> bool:
    decorators = getattr(site.place.scope.node, "decorator_list", [])
    for context in (*site.place.contexts, *decorators):
        if isinstance(context, ast.Call) and "autocast" in ast.unparse(context.func):
            for keyword in context.keywords:
                if keyword.arg == "enabled" and isinstance(keyword.value, ast.Constant):
                    return keyword.value.value is False
    return False


def _elementwise(file: File, node: ast.BinOp, place: Place) -> Fix | None:
    """Replace the operator where the sides are provably [..., n, 1] and [..., 1, m]: the same products."""
    if not _ends_in_one(file, node.left, place, -1) or not _ends_in_one(file, node.right, place, -2):
        return None
    start, end = file.source.end(node.left), file.source.start(node.right)
    between = file.source.text[start:end]
    if between.count(b"@") != 1 or b"#" in between:
        return None
    at = start + between.index(b"@")
    return Fix(False, "Multiply elementwise.", (fixes.edit(file, at, at + 1, "*"),))


def _ends_in_one(file: File, node: ast.expr, place: Place, dimension: int, depth: int = 0) -> bool:
    """Say whether a dimension, counted from the end, is one because ``None`` made it."""
    if depth > 6:
        return False
    if isinstance(node, ast.Name):
        bindings = file.names.bindings(node.id, place)
        return bool(bindings) and all(
            binding.how == "value"
            and binding.value is not None
            and _ends_in_one(file, binding.value, binding.place, dimension, depth + 1)
            for binding in bindings
        )
    if isinstance(node, ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        if len(items) < 2 or any(isinstance(item, ast.Starred) for item in items):
            return False
        # An ellipsis, or slices that name every dimension: what follows counts from the end.
        chosen = items[dimension]
        tail_is_plain = all(isinstance(item, ast.Slice) or _is_none(item) for item in items[dimension:])
        return _is_none(chosen) and tail_is_plain and _names_all(node, items)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in ("float", "to", "double", "contiguous", "type"):
            return _ends_in_one(file, node.func.value, place, dimension, depth + 1)
        if name == "expand" and len(node.args) >= -dimension:
            size = node.args[dimension]
            kept = (isinstance(size, ast.Constant) and size.value == 1) or ast.unparse(size) == "-1"
            return kept and _ends_in_one(file, node.func.value, place, dimension, depth + 1)
    return False


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _names_all(node: ast.Subscript, items: list[ast.expr]) -> bool:
    """Say whether the subscript reaches the last dimension: by an ellipsis, or a slice for each."""
    if any(isinstance(item, ast.Constant) and item.value is Ellipsis for item in items):
        return True
    named = sum(isinstance(item, ast.Slice) for item in items)
    text = ast.unparse(node.value)
    # inv_freq has one dimension and position_ids two in every rotary class there is; no fix elsewhere.
    return (
        named == 1
        if INVERSE_FREQUENCIES.fullmatch(text.rpartition(".")[2])
        else named == 2 and "position" in text
    )


RULE = Rule(
    id="SR010",
    name="rotary-matmul",
    severity="warning",
    summary="rotary phases as a matrix product, in reach of autocast or TF32",
    explanation=__doc__,
    functions=("@", "matmul", "bmm", "mm"),
    check=check,
    VALID=(
        "import torch\ndef forward(self, t):\n"
        "    return self.inv_freq[None, :, None] * t[:, None, :].float()\n",
        "import torch\ndef forward(self, t):\n    return torch.outer(t, self.inv_freq)\n",
        "import torch\ndef forward(self, q, k):\n    return torch.matmul(q, k)\n",
        "import torch\ndef f(n, t):\n    slopes = 2.0 ** -torch.arange(1, n).float()\n"
        "    return torch.matmul(slopes[:, None], t[None])\n",
        "import torch\ndef forward(self, t):\n    return torch.einsum('i,j->ij', t, self.inv_freq)\n",
    ),
    INVALID=(
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        theta = 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d))\n"
        "        self.register_buffer('theta', theta)\n"
        "    def table(self, n):\n        t = torch.arange(n)\n"
        "        return torch.matmul(t[:, None], self.theta[None])\n",
        "import torch\ndef forward(self, t):\n    return torch.mm(t[:, None], self.inv_freq[None])\n",
        "import torch\ndef forward(self, position_ids):\n    inv = self.inv_freq[None, :, None].float()\n"
        "    return (inv @ position_ids[:, None, :].float()).transpose(1, 2)\n",
        "import torch\ndef forward(self, x):\n    with torch.autocast('cuda', enabled=False):\n"
        "        return self.inv_freq @ x\n",
    ),
)
