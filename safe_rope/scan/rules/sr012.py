"""Float scale factors made as tensors while a module is built.

`torch.tensor`, `torch.Tensor`, `torch.full` and `torch.ones` are among the constructors that `zero.Init`
casts. Long factors of LongRoPE, slopes or a scaling kept as such a tensor come out in 8 bits, 1.1 as 1.1016.
Keep Python floats, or build the tensor where it is used.

A warning is the base of inverse frequencies as such a tensor: `exp(arange * -log(torch.tensor(10000.0)))`. In
bfloat16 it is 9984, and its logarithm is off by as much as all frequencies are. A base that bfloat16 holds,
and that only powers are taken of, is no finding.

An error is a tensor of powers that Python computes, `[base ** (-i / d) for i in range(0, d, 2)]`, where they
are frequencies or slopes of positions. They may be listed by `append` in a loop or by `map`, and counted by
`enumerate`, too. Raise to an int64 `arange` that is cast to float32 instead. It is a warning where the import
makes it in float32. Whole numbers are no finding. Nor are powers of two whose exponents are divided by powers
of two at most, as the slopes of 8 heads: bfloat16 may hold them.
"""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine import PINNED, Call, File, Place, Report, Site, Value, is_import, kind
from safe_rope.scan.rules import messages
from safe_rope.scan.rules.listed import are_powers
from safe_rope.scan.rules.rule import Rule

_FACTORS = re.compile(
    r"(?:\w+_)?(?:factors?|scale|scaling|slopes?|freqs?|theta|timescales?)(?:_\w+)?", re.IGNORECASE
)
_DEPTH = 2  # of variables and attributes
_POWERS = ("torch.pow", "torch.float_power")
_ROTARY = re.compile(r"rope|rotary|alibi|freq|sinus|yarn|ntk|pos(?:ition)?_?emb", re.IGNORECASE)


def check(file: File, site: Site, call: Call | None) -> Report | None:
    """Report a factor of a rotary or ALiBi table, or the base of frequencies, that is made as a tensor."""
    if call is None or not call.function.startswith("torch."):
        return None
    dtype = file.dtype(call)
    if call.function in ("torch.tensor", "torch.full"):
        raised = _raised(file, site.node, site.ancestors, site.place)
        if raised is not None:
            return _base(file, site, call, dtype, *raised)
    if dtype is not None and (dtype.is_int or dtype.dtype == "complex"):
        return None
    data = call.argument(0, "data")
    if call.function == "torch.tensor" and data is not None and are_powers(file, data.value, data.place):
        return _powers(file, site, call, dtype)
    if call.function.removeprefix("torch.") not in ("tensor", "Tensor", "full", "ones"):
        return None
    where = kind(site.place.scope, file.path, file.walk)
    if where != "constructor" or not _is_factor(site) or not _is_rotary(site):
        return None
    if file.value(call.node, site.place).is_int or _is_empty(call):
        return None
    pinned = dtype is not None and dtype.dtype in PINNED
    if pinned and file.names.is_early(call.node.func, site.place):
        return None
    how = "zero.Init" if pinned else "zero.Init or the default dtype"
    given = call.argument(1, "fill_value") if call.function == "torch.full" else call.argument(0, "data")
    number = None if given is None or call.function == "torch.ones" else file.of(given).constant
    rounds = "rounds it to 8 bits" if number is None else f"makes {number} {messages.in_bfloat16(number):g}"
    message = f"a scale factor as a tensor: {how} {rounds}; keep a Python float"
    return Report(call.node, file.severity("note", site), message)


def _powers(file: File, site: Site, call: Call, dtype: Value | None) -> Report | None:
    if not file.purpose.shown(site, frequency=True):
        return None
    pinned = dtype is not None and dtype.dtype in PINNED
    early = pinned and (is_import(site) or file.names.is_early(call.node.func, site.place))
    how = "zero.Init" if pinned else "zero.Init or the default dtype" if dtype is None else "a low dtype"
    how += ", if the module is imported in it," if early else ""
    return Report(
        call.node,
        file.severity("warning" if early else "error", site, shown=True),
        f"powers of Python's numbers as a tensor: {how} rounds them to 8 bits"
        "; raise to an int64 arange that is cast to float32",
    )


def _base(
    file: File, site: Site, call: Call, dtype: Value | None, grid: Site, logarithm: bool
) -> Report | None:
    given = call.argument(*((1, "fill_value") if call.function == "torch.full" else (0, "data")))
    value = None if given is None else file.of(given)
    if value is None or value.sort not in ("number", "unknown"):
        return None
    number = value.constant
    whole = value.floating is False if dtype is None else dtype.is_int  # which nothing lowers
    exact = whole or (number is not None and messages.in_bfloat16(number) == number)
    if exact and not logarithm:
        return None  # what it is raised to decides the dtype
    if exact:
        becomes = f"rounds what is computed of {'it' if number is None else f'{number:g}'}"
    elif number is None:
        becomes = "rounds it to 8 bits"
    else:
        becomes = f"makes {number:g} {messages.in_bfloat16(number):g}"
    how = "zero.Init" if dtype is not None and dtype.dtype in PINNED else "zero.Init or the default dtype"
    shown = file.is_shown(grid)
    powers = "frequencies" if shown else "powers"
    message = f"the base of {powers} as a tensor: {how} {becomes}; keep a Python float"
    return Report(call.node, file.severity("warning", site, shown=shown), message)


def _raised(
    file: File,
    current: ast.AST,
    ancestors: tuple[ast.AST, ...],
    place: Place,
    logarithm: bool = False,
    depth: int = 0,
) -> tuple[Site, bool] | None:
    """Return the count that a tensor is raised to, or that its logarithm scales, and whether that is it."""
    grid: Site | None = None
    for parent in reversed(ancestors):
        match parent:
            case ast.Attribute(attr="log" | "exp" | "item" | "float" | "pow") | ast.UnaryOp():
                logarithm = logarithm or getattr(parent, "attr", "") == "log"
            case ast.Call(func=ast.Attribute(attr="pow") as function, args=[exponent]) if function is current:
                found = _count(file, exponent, place)
                return None if found is None else (found, logarithm)
            case ast.Call(func=function) if function is current:
                pass
            case ast.Call(
                func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(kept)), _]
            ):
                return _kept(file, kept, place, logarithm, depth)
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=kept)]) if grid is None:
                return _kept(file, kept, place, logarithm, depth)
            case ast.Call(func=function):
                name = file.names.qualify(function, place)
                if name == "torch.exp" and grid is not None:
                    return grid, logarithm
                if name in _POWERS and len(parent.args) == 2 and parent.args[0] is current:
                    found = _count(file, parent.args[1], place)
                    return None if found is None else (found, logarithm)
                if name != "torch.log":
                    return None
                logarithm = True
            case ast.BinOp(left=left, op=operator, right=right) if logarithm or isinstance(operator, ast.Pow):
                found = _count(file, right if left is current else left, place)
                if isinstance(operator, ast.Pow):
                    return (found, logarithm) if found and left is current else None
                grid = found or grid
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if grid is None and depth < _DEPTH:
                uses = file.flow.reached(place, name, value)
                ways = (_raised(file, *use, logarithm, depth + 1) for use in uses)
                return next((way for way in ways if way is not None), None)
            case _:
                return None
        if isinstance(parent, ast.Attribute) and parent.attr == "exp" and grid is not None:
            return grid, logarithm
        current = parent
    return None


def _kept(file: File, name: str, place: Place, logarithm: bool, depth: int) -> tuple[Site, bool] | None:
    """Return what `_raised` does of an attribute of self that nothing else is assigned to."""
    if depth >= _DEPTH or len(file.names.attributes(name, place)) != 1:
        return None
    ways = (_raised(file, *use, logarithm, depth + 1) for use in file.purpose.reads(name, place))
    return next((way for way in ways if way is not None), None)


def _count(file: File, node: ast.expr, place: Place) -> Site | None:
    """Return the ``arange`` in an operand that holds a count or a part of one."""
    if not file.value(node, place).grid:
        return None
    inside = {id(inner) for inner in ast.walk(node)}
    return next((site for site in file.walk.calls.get("arange", ()) if id(site.node) in inside), None)


def _is_empty(call: Call) -> bool:
    first = call.positional[0].value if call.positional else None
    return isinstance(first, ast.List | ast.Tuple) and not first.elts


def _is_factor(site: Site) -> bool:
    if any(isinstance(node, ast.Call) and "Parameter" in ast.unparse(node.func) for node in site.ancestors):
        return False  # learned: a starting value, not a constant of the table
    names = (getattr(target, "id", getattr(target, "attr", "")) for target in site.targets)
    return any(_FACTORS.fullmatch(name) for name in names)


def _is_rotary(site: Site) -> bool:
    return any(_ROTARY.search(scope.name) for scope in site.place.scope.upward())


RULE = Rule(
    id="SR012",
    name="tensor-scale-factor",
    severity="note",
    summary="a float scale factor of a position table made as a tensor",
    explanation=__doc__,
    functions=("tensor", "Tensor", "full", "ones"),
    check=check,
    VALID=(
        "import torch\ndef inv_freqs(d, base, xs):\n"
        "    return torch.tensor([base ** (-x / d) for _, x in enumerate(xs)])\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        x = torch.arange(0, d, 2).float() * torch.log(torch.tensor(d))\n",
        "import torch\nclass Rotary(torch.nn.Module):\n    def __init__(self):\n        self.scaling = 1.1\n"
        "        self.ids = torch.arange(7)\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        self.register_buffer('decay', torch.tensor([0.9 ** (i / d) for i in range(d)]))\n",
        "import torch\ndef inv_freqs(d):\n    fs = []\n    for i in range(d):\n"
        "        fs.append(2.0**i)\n    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d, base, fs):\n    for i in fs:\n        fs.append(base ** (-i / d))\n"
        "    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d, base, table):\n    fs = []\n    for i in range(d):\n"
        "        fs.append(base ** (-i / d))\n    fs.clear()\n    fs.extend(table)\n"
        "    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = []\n    none = torch.tensor(fs)\n"
        "    for i in range(d):\n        fs.append(base ** (-i / d))\n    return none, fs\n",
        "import torch\ndef inv_freqs(d, base, tables):\n    fs = []\n    for i in range(d):\n"
        "        fs.append(base ** (-i / d))\n    return [torch.tensor(fs) for fs in tables], fs\n",
        "import torch\nclass Rotary(torch.nn.Module):\n    def __init__(self, base):\n"
        "        self.base = torch.tensor(int(base))\n    def forward(self, d):\n"
        "        return 1.0 / self.base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d, base):\n    base = torch.tensor(base, dtype=torch.int64)\n"
        "    return 1.0 / base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\nclass Rotary(torch.nn.Module):\n    def __init__(self, d):\n"
        "        self.bands = torch.tensor([2.0 ** i for i in range(d)])\n",
        "import torch\nclass RelativePositions(torch.nn.Module):\n    def __init__(self, window):\n"
        "        self.strides = torch.tensor([window ** i for i in range(3)])\n",
        "import math, torch\nclass RelativePositions(torch.nn.Module):\n    def __init__(self, n, s):\n"
        "        self.window = torch.tensor([math.exp(-(i - n) ** 2 / s) for i in range(n)])\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self):\n"
        "        self.base = torch.nn.Parameter(torch.tensor(1e4))\n    def forward(self, d):\n"
        "        return 1.0 / self.base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, base):\n"
        "        self.base = torch.tensor(base)\n        self.base = base\n    def forward(self, d):\n"
        "        return 1.0 / self.base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d):\n"
        "    return torch.tensor(512.0) ** -(torch.arange(0, d, 2).float() / d)\n",
        "import torch\nheads = 8\ndef alibi():\n"
        "    return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])\n",
        "import torch\ndef rope_init(n):\n    factors = torch.tensor([1, 2], dtype=torch.int64)\n"
        "    return torch.arange(n)\n",
    ),
    INVALID=(
        "import torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor([base ** (-i / d) for i in range(d) if i % 2 == 0 for _ in range(2)])\n",
        "import torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor([base ** (-2 * k / d) for _, k in enumerate(range(d // 2))])\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = [base ** (-i / d) for i in reversed(range(d))]\n"
        "    return torch.tensor(fs[: d // 2])\n",
        "import torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor(sorted([base ** (-i / d) for i in range(d)]))\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d, base):\n"
        "        inv_freq = torch.tensor([base ** (-i / d) for i in range(0, d, 2)])\n"
        "        self.register_buffer('inv_freq', inv_freq)\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = []\n    for i in range(0, d, 2):\n"
        "        fs.append(base ** (-i / d))\n    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = [1.0]\n    for k in range(2):\n        fs.clear()\n"
        "        for i in range(0, d, 2):\n            fs += [base ** (-i / d)]\n"
        "    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = [base ** (-i / d) for i in range(d)] + [0.0] * d\n"
        "    return torch.tensor(fs)\n",
        "import torch\ndef inv_freqs(d):\n    base = torch.full((), 10000, dtype=torch.float32)\n"
        "    return 1.0 / base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor([*map(lambda i: base ** (-i / d), range(0, d, 2))])\n",
        "import torch\ndef inv_freqs(d, base):\n    fs = tuple(base ** (-i / d) for i in range(0, d, 2))\n"
        "    return torch.tensor(fs)\n",
        "import math, torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor([math.pow(base, -i / d) for i in range(0, d, 2)])\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, d):\n"
        "        pe = (torch.arange(0, d, 2).float() * -(torch.log(torch.tensor(1e4)) / d)).exp()\n",
        "import torch\ndef inv_freqs(d):\n"
        "    return torch.tensor(10000.0) ** -(torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d):\n"
        "    return torch.exp(-torch.log(torch.tensor(10000)).item() * torch.arange(d).float() / d)\n",
        "import torch\ndef inv_freqs(d):\n"
        "    return 1 / torch.pow(torch.tensor(10000.0), torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d):\n    base = torch.tensor(10000.0)\n"
        "    return 1 / base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef inv_freqs(d):\n    step = torch.log(torch.tensor(512.0)) / d\n"
        "    return torch.exp(torch.arange(0, d, 2).float() * -step)\n",
        "import torch\ndef inv_freqs(d):\n"
        "    return torch.tensor(10000.0).pow(-torch.arange(0, d, 2).float() / d)\n",
        "import math, torch\ndef inv_freqs(d, base):\n"
        "    return torch.tensor([math.exp(-math.log(base) * i / d) for i in range(0, d, 2)])\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, base):\n"
        "        self.base = torch.tensor(base)\n    def forward(self, d):\n"
        "        return 1.0 / self.base ** (torch.arange(0, d, 2).float() / d)\n",
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, base):\n"
        "        self.register_buffer('rate', torch.log(torch.tensor(base)))\n    def forward(self, d):\n"
        "        return torch.exp(-self.rate * torch.arange(0, d, 2).float() / d)\n",
        "import torch\ndef compute_rope_parameters(config):\n"
        "    ext_factors = torch.tensor(config.long_factor, dtype=torch.float32)\n    return ext_factors\n",
    ),
)
