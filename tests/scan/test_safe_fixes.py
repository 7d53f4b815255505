"""A fix is called safe only where it is proven: what it is not proven for is unsafe, or no fix at all."""

from __future__ import annotations

import pytest

from safe_rope.scan.engine import apply_edits
from safe_rope.scan.run.analyze import analyze


def kinds(source: str) -> set[tuple[str, bool | None]]:
    """Return the rules that find something, and whether the fix of each is safe; None where there is none."""
    found = analyze(source.encode(), "model.py")
    return {(finding.rule, None if finding.fix is None else finding.fix.safe) for finding in found}


def safe(source: str) -> bool:
    return any(is_safe for _, is_safe in kinds("import torch\n" + source))


@pytest.mark.parametrize(
    "source",
    [
        "def f(z, L):\n    P = z * torch.arange(L)\n    return P.exp()\n",
        "def f(z, L):\n    return torch.exp(torch.arange(L) + z)\n",
        "def f(n, ratio):\n    return torch.arange(n) / ratio\n",
        "def f(n, x):\n    return torch.arange(n) * (0.5 / x)\n",
        "def f(n, c):\n    return torch.arange(n) / c.head_dim\n",
        "def f(n, d):\n    return torch.arange(n) / d\nf(8, 64)\n",
        "def f(n, z):\n    t = torch.arange(n)\n    for _ in range(2):\n        y = t.exp()\n        t = z\n",
        "t = torch.arange(9)\nf = lambda t: t / 2\n",
        "def f(n, d: int):\n    q = list(range(n))\n    q[0] = 1j\n    return torch.tensor(q) / d\n",
        # Names of integers are also those of FLUX's positions, in float64 or bfloat16.
        "def f(ids: torch.Tensor, d: int):\n    return torch.arange(0, d, 2, dtype=ids.dtype) / d\n",
        "def f(ids: torch.Tensor, d: int):\n    return torch.arange(0, d, 2).to(ids.dtype) / d\n",
        "def f(ids: torch.Tensor, d: int):\n    return torch.arange(0, d, 2).type_as(ids) / d\n",
        "def f(ids: torch.Tensor, d: int):\n    return (torch.arange(0, d, 2) + torch.zeros_like(ids)) / d\n",
    ],
)
def test_an_operand_is_cast_safely_only_where_all_that_it_meets_is_a_real_number(source: str) -> None:
    assert not safe(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(n, d: int):\n    return torch.arange(n) / d\n",
        "def f(x):\n    return torch.arange(x.shape[0]) / x.shape[1]\n",
        "def f(n, d: int):\n    t = torch.arange(n)[None, :] * 2\n    return t / d\n",
        "import math\ndef f(n, d: int):\n    return torch.exp(torch.arange(n) * -(math.log(10000.0) / d))\n",
        "def f(n):\n    return 2.0 ** torch.arange(n)\n",
        "def f(n, d: int):\n    r = range(n)\n    return torch.tensor(r) / d\n",
        "def f(n, m):\n    return torch.arange(n) / (torch.arange(m) + 1)\n",
    ],
)
def test_an_operand_that_meets_numbers_or_integers_is_cast_safely(source: str) -> None:
    assert safe(source)


@pytest.mark.parametrize(
    "line",
    [
        'idx.div(n, rounding_mode="floor")',
        'idx.true_divide(n, rounding_mode="trunc")',
        'torch.div(idx, n, rounding_mode="floor")',
        "idx.floor_divide(n)",
    ],
)
def test_a_division_that_rounds_leaves_integers(line: str) -> None:
    source = f"import torch\ndef f(x, n: int):\n    idx = torch.arange(9999)\n    row = {line}\n"
    assert kinds(source + "    return x[row]\n") == set()


@pytest.mark.parametrize(
    "source",
    [
        "from torch import arange, float32\nt = arange(4096, dtype=float32)\n",
        "from torch import arange\nt = arange(0.0, 4096.0)\n",
        "from torch import arange\nt = arange(64) / 64\n",
        "from torch import arange\ndef f():\n    import torch\ndef g():\n    return arange(64) / 64\n",
        "from typing import TYPE_CHECKING\nfrom torch import arange\nif TYPE_CHECKING:\n    import torch\n"
        "t = arange(64) / 64\n",
    ],
)
def test_no_fix_writes_a_name_that_is_not_bound(source: str) -> None:
    (finding,) = analyze(source.encode(), "model.py")
    assert finding.fix is None


def test_a_fix_writes_the_names_that_are_there() -> None:
    for head, before, after in (
        ("import torch as th", "th.arange(64) / 64", "th.arange(64).to(th.float32) / 64"),
        (
            "from torch import arange, float32, int64",
            "arange(4096, dtype=float32)",
            "arange(4096, dtype=int64).to(float32)",
        ),
        (
            "from torch import arange\nimport torch",
            "arange(4096, dtype=torch.float)",
            "arange(4096, dtype=torch.int64).to(torch.float)",
        ),
    ):
        source = f"{head}\nt = {before}\n".encode()
        (finding,) = analyze(source, "model.py")
        assert finding.fix is not None
        assert finding.fix.safe
        assert apply_edits(source, finding.fix.edits).decode() == f"{head}\nt = {after}\n"


@pytest.mark.parametrize(
    "bound",
    ["box.width", 'cfg["max_len"]', "config.max_position_embeddings", 'getattr(config, "head_dim", 64)', "n",
     'cfg.get("num_positions")', "config.hidden_size + 1", "self.max_len"],
)  # fmt: skip
def test_a_name_proves_no_bound_whole(bound: str) -> None:
    call = f"torch.arange({bound}, dtype=torch.float32)"
    assert kinds(f"import torch\ndef f(self, box, cfg, config, n):\n    return {call}\n") == {
        ("SR001", False)
    }


@pytest.mark.parametrize(
    "source",
    [
        # Beyond 2**24 an arange rounds otherwise than a cast.
        "def f(n: int):\n    return torch.arange(16777217, n, 3, dtype=torch.float32)\n",
        "def list(r):\n    return [i / 2 for i in r]\ndef f(n):\n"
        "    return torch.tensor(list(range(n)), dtype=torch.float32)\n",
        "class Box:\n    shape = (4.5,)\ndef f(x):\n    return torch.arange(x.shape[0], dtype=torch.float)\n",
        "class Box:\n    def size(self):\n        return 4.5, 3\ndef f(x):\n    w, h = x.size()\n"
        "    return torch.arange(w, dtype=torch.float32)\n",
        "class Box:\n    def size(self, axis):\n        return 4.5\ndef f(x):\n"
        "    return torch.arange(x.size(0), dtype=torch.float32)\n",
    ],
)
def test_what_the_file_gives_another_meaning_proves_nothing(source: str) -> None:
    assert not safe(source)


def test_a_parameter_is_what_its_annotation_says_and_no_caller_or_default() -> None:
    body = "    return torch.arange(max_len, dtype=torch.float32)\n"
    assert not safe(f"def f(max_len):\n{body}f(4096)\n")
    assert not safe(f"def f(max_len=4096):\n{body}")
    assert safe(f"def f(max_len: int = 4096):\n{body}")
    assert not safe("def f(n: int, dtype=torch.float32):\n    return torch.arange(n, dtype=dtype)\n")


@pytest.mark.parametrize("call", ["torch.set_default_dtype(d)", "with set_default_torch_dtype(d): pass"])
def test_a_default_dtype_that_the_file_changes_makes_what_relies_on_it_unsafe(call: str) -> None:
    for line, follows_default in (
        ("torch.arange(0.0, 4096.0)", True),
        ("torch.arange(64) / 64", True),
        ("torch.arange(4096, dtype=torch.float64)", False),
    ):
        assert safe(f"t = {line}\n")
        assert safe(f"t = {line}\ndef f(d):\n    {call}\n") != follows_default


def test_lines_of_one_idiom_change_together_or_not_at_all() -> None:
    line = "    return torch.arange(n, dtype=torch.float32)\n"
    assert safe(f"def f(n: int):\n{line}def g(n: int):\n{line}")
    assert not safe(f"def f(n: int):\n{line}def g(n: int):\n{line}def h(n):\n{line}")


def test_whole_bounds_that_are_floats_become_integers() -> None:
    source = (
        b"import torch\nt = torch.arange(0.0, 960, 2.0)\n"
        b"u = torch.arange(-(4095 + 1.0), 0., dtype=torch.float32)\n"
    )
    edits = [edit for finding in analyze(source, "model.py") if finding.fix for edit in finding.fix.edits]
    assert apply_edits(source, edits) == (
        b"import torch\nt = torch.arange(0, 960, 2, dtype=torch.int64).to(torch.float32)\n"
        b"u = torch.arange(-4096, 0, dtype=torch.int64).to(torch.float32)\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(\n9.0  # nine)\n)", "(\n9  # nine)\n), dtype=torch.int64"),
        ("(9.0 \\\n),", "(9 \\\n), dtype=torch.int64,"),
        ("((9.0)),  # (all)\n", "((9)), dtype=torch.int64,  # (all)\n"),
    ],
)
def test_an_argument_is_added_behind_the_brackets_of_the_last_one(before: str, after: str) -> None:
    source = f"import torch\nt = torch.arange(900.0, {before}) / 9\n".encode()
    (finding,) = analyze(source, "model.py")
    assert finding.fix is not None
    fixed = apply_edits(source, finding.fix.edits)
    assert fixed == f"import torch\nt = torch.arange(900, {after}).to(torch.float32) / 9\n".encode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.arange(n) * d / 3", "(torch.arange(n) * d).to(torch.float32) / 3"),
        ("(torch.arange(n) + 16777217) * 0.5", "((torch.arange(n) + 16777217).to(torch.float32)) * 0.5"),
        ("-torch.arange(n) / d", "(-torch.arange(n)).to(torch.float32) / d"),
        ("torch.arange(n)[None] / d", "torch.arange(n)[None].to(torch.float32) / d"),
    ],
)
def test_integers_are_summed_and_multiplied_before_they_are_cast(before: str, after: str) -> None:
    source = f"import torch\ndef f(n: int, d: int):\n    return {before}\n".encode()
    (finding,) = analyze(source, "model.py")
    assert finding.fix is not None
    assert finding.fix.safe
    assert apply_edits(source, finding.fix.edits) == source.replace(before.encode(), after.encode())


@pytest.mark.parametrize(
    "source",
    [
        "def f(n: int, d: int, k):\n    t = torch.arange(n)\n    match k:\n        case [t]:\n"
        "            pass\n    return t / d\n",
        "def f(n: int, d: int, k):\n    t = torch.arange(n)\n    match k:\n        case {'a': 1, **t}:\n"
        "            pass\n    return t / d\n",
        "def f(n: int, d: int, x):\n    return torch.arange(n).max(x) / d\n",
        "def f(n: int, d: int):\n    return torch.arange(n).clamp(0.5) / d\n",
        "def f(n: int, d: int):\n    return torch.arange(n).view(torch.float64) / d\n",
        "def f(x):\n    return torch.arange(x.size(), dtype=torch.float32)\n",
        "t = torch.arange(1e20, 1e20 + 10, 5.0)\n",
        "def half(f):\n    return lambda: f() / 2\n@half\ndef k() -> int:\n    return 3\n"
        "t = torch.arange(k(), dtype=torch.float32)\n",
        "def f(n: int, d: int, x):\n    i = x\n    i = i + torch.arange(n)\n    return i / d\n",
        "def f(n: int):\n    return torch.arange(n, 0, -0.5, dtype=torch.float32)\n",
        "def f(n: int):\n    n /= 2\n    return torch.arange(n, dtype=torch.float32)\n",
        "def f(n: int, o):\n    torch.arange(n, dtype=torch.float32, out=o)\n",
        "def f(n: int, d: int, g):\n    t = torch.arange(n)\n    with g() as t:\n        return t / d\n",
        "def f(n: int):\n    return torch.arange(-0.0, -n, -1.0)\n",
        "def f(n: int):\n    return torch.arange(0.0 * -1, -n, -1, dtype=torch.float64)\n",
        "def f(n: int):\n    return torch.arange(n).type('torch.DoubleTensor') / 3\n",
        "def f(n: int):\n    return torch.arange(n).type(torch.cuda.DoubleTensor) / 3\n",
        "def f(pairs):\n    return [torch.arange(n, dtype=torch.float) for i, (n, m) in enumerate(pairs)]\n",
        "def f(pairs):\n    for i, (n, m) in enumerate(pairs):\n"
        "        return torch.arange(n, dtype=torch.float32)\n",
    ],
)
def test_what_a_name_or_a_call_may_stand_for_makes_no_safe_fix(source: str) -> None:
    assert not safe(source)


@pytest.mark.parametrize(
    "source",
    [
        "int = float\ndef f(n: int):\n    return COUNT\n",
        "from numpy import float64 as int\ndef f(n: int):\n    return COUNT\n",
        "def f(n: int = 2.5):\n    return COUNT\n",
        "def f(x):\n    n: int = x\n    return COUNT\n",
        "def g(x) -> int:\n    return x\ndef f(x):\n    n = g(x)\n    return COUNT\n",
        "import dataclasses\n@dataclasses.dataclass\nclass R:\n    n: int\n    def t(self):\n"
        "        n = self.n\n        return COUNT\nR(2.5).t()\n",
        "class Q:\n    def __floordiv__(self, other):\n        return 2.5\ndef f(h, s):\n"
        "    return torch.arange(h // s, dtype=torch.float32)\n",
    ],
)
def test_an_annotation_that_the_file_contradicts_proves_nothing(source: str) -> None:
    assert not safe(source.replace("COUNT", "torch.arange(n, dtype=torch.float32)"))


COUNTING = "torch.arange(n, dtype=torch.float32).to(torch.float64)"
COUNTED = "9.0 ** (torch.arange(0, n, 2, dtype=torch.int64) / n)"
GIVEN = {
    "a float": "def f(n: int):\n    return COUNT\ndef g():\n    return f(2.5)\n",
    "a quotient": "def f(n: int):\n    return COUNT\ndef g(k):\n    return f(k / 3)\n",
    "a tensor": "def f(n: int):\n    return COUNT\ndef g():\n    return f(torch.ones(1))\n",
    "a partial": "from functools import partial\ndef f(n: int):\n    return COUNT\ng = partial(f, 2.5)\n",
    "a method": "class R:\n    def f(self, n: int):\n        return COUNT\n"
    "    def g(self, k):\n        return self.f(k / 3)\n",
    "a keyword": "def f(*, n: int):\n    return COUNT\ndef g():\n    return f(n=2.5)\n",
    "a constructor": "class R:\n    def __init__(self, n: int):\n        self.t = COUNT\nr = R(2.5)\n",
    "a constructor of a base": "class R:\n    def __init__(self, n: int):\n        self.t = COUNT\n"
    "class S(R):\n    def __init__(self):\n        super().__init__(2.5)\n",
    "an inherited constructor": "class R:\n    def __init__(self, n: int):\n        self.t = COUNT\n"
    "class S(R):\n    pass\ns = S(2.5)\n",
    "elements": "def f(sizes: list[int] = (2.5, 4)):\n    n = sizes[0]\n    return COUNT\n",
    "a field": "import dataclasses\n@dataclasses.dataclass\nclass R:\n    n: int\n    def t(self):\n"
    "        n = self.n\n        return COUNT\ndef g(r):\n    return dataclasses.replace(r, n=2.5)\n",
    "a namespace": "from types import SimpleNamespace\ndef f(g):\n    n = g.shape[0]\n    return COUNT\n"
    "def h():\n    return f(SimpleNamespace(shape=(2.5, 1)))\n",
    "a named tuple": "from collections import namedtuple\nG = namedtuple('G', 'shape rank')\n"
    "def f(g):\n    n = g.shape[0]\n    return COUNT\n",
    "its own int": "def f(n: int):\n    return COUNT\ndef int(x):\n    return x\n",
    "a list": "def f(n: int):\n    return COUNT\ndef g():\n    return f(*[2.5])\n",
    "a list after another": "def f(a, n: int):\n    return COUNT\ns = (2.5,)\n"
    "def g():\n    return f(1, *s)\n",
    "a partial of a list": "from functools import partial\ndef f(n: int):\n    return COUNT\n"
    "g = partial(f, *[2.5])\n",
    "a field of a list": "@dataclass\nclass R:\n    n: int\n    def t(self):\n        n = self.n\n"
    "        return COUNT\ndef g():\n    return R(*[2.5])\n",
    "an item of a mapping": "def f(n: int):\n    return COUNT\ndef g():\n    d = {}\n    d['n'] = 2.5\n"
    "    return f(**d)\n",
    "an update of a mapping": "def f(n: int):\n    return COUNT\ndef g(d):\n    d.update(n=2.5)\n"
    "    return f(**d)\n",
    "one of two mappings": "def f(n: int):\n    return COUNT\ndef g(d):\n    return f(**(d | {'n': 2.5}))\n",
    "another name": "def f(n: int):\n    return COUNT\ng = f\ndef h():\n    return g(2.5)\n",
    "another name of a class": "class R:\n    def __init__(self, n: int):\n        self.t = COUNT\n"
    "S = R\ns = S(2.5)\n",
    "what calls it": "def f(n: int):\n    return COUNT\ndef call(g):\n    return g(2.5)\nt = call(g=f)\n",
    "what calls it with an argument": "def f(n: int):\n    return COUNT\nt = call(f, 2.5)\n",
    "what makes it": "class R:\n    def __init__(self, n: int):\n        self.t = COUNT\n"
    "r = make(R, n=2.5)\n",
    "a decorator": "def twice(f):\n    def g(k):\n        return f(2.5)\n    return g\n"
    "@twice\ndef f(n: int):\n    t = COUNT\n",
    "a registry": "KINDS = {}\n@register\nclass R:\n    def __init__(self, n: int):\n        self.t = COUNT\n"
    "r = KINDS['R'](2.5)\n",
    "a rounded number": "def f(n: int):\n    return COUNT\nf(round(2.5, 1))\n",
    "one of two numbers": "def f(n: int):\n    return COUNT\n"
    "def g(x):\n    k = 3\n    if x:\n        k = k / 3\n"
    "    return f(k)\n",
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_annotation_that_a_call_or_a_default_contradicts_proves_nothing(name: str) -> None:
    source = GIVEN[name].replace("COUNT", COUNTING)
    assert kinds("import torch\n" + source)
    assert not safe(source)


@pytest.mark.parametrize("name", [name for name in GIVEN if name not in ("elements", "its own int")])
def test_an_annotation_that_no_call_contradicts_does(name: str) -> None:
    source = GIVEN[name].replace("COUNT", COUNTING).replace("k / 3", "k")
    source = source.replace("2.5", "4").replace("torch.ones(1)", "len(x)")
    assert safe(source) != (name in ("a namespace", "a named tuple"))


def test_a_result_that_may_be_a_fraction_contradicts_its_annotation() -> None:
    source = "def g(x) -> int:\n    k = 3\n    if x:\n        k = k / 2\n    return k\n"
    source += "def f(x):\n    n = g(x)\n    return "
    assert not safe(source + COUNTING)
    assert safe(source.replace("/ 2", "// 2") + COUNTING)


@pytest.mark.parametrize("given", ["torch.ones(1, dtype=torch.float64)", "2j"])
def test_a_tensor_or_a_complex_number_contradicts_an_annotation_of_float(given: str) -> None:
    source = "def f(n: int, s: float):\n    return torch.arange(n) / s\ndef g(x):\n    return f(4, GIVEN)\n"
    assert not safe(source.replace("GIVEN", given))
    assert safe(source.replace("GIVEN", "0.5"))
    assert not safe(source.replace("s: float", f"s: float = {given}").replace(", GIVEN", ""))


# What gives the tensor a dtype that the call does not show; each was float64 and became float32.
UNPACKED = {
    "parameters": "def f(n: int, **kw):\n    return torch.arange(n, **kw) / 3\n",
    "a parameter": "def f(n: int, kw):\n    return torch.arange(n, **kw) * 0.1\n",
    "a partial": "from functools import partial\ndef f(n: int, **kw):\n    g = partial(torch.arange, **kw)\n"
    "    return g(n) / 3\n",
    "an item": "def f(n: int):\n    kw = {}\n    kw['dtype'] = torch.float64\n"
    "    return torch.arange(n, **kw) / 3\n",
    "an update": "KW = {}\nKW.update(dtype=torch.float64)\ndef f(n: int):\n"
    "    return torch.arange(n, **KW) / 3\n",
    "a default": "def f(n: int):\n    kw = dict(device='cpu')\n    kw.setdefault('dtype', torch.float64)\n"
    "    return torch.arange(n, **kw) / 3\n",
    "a function": "def f(n: int):\n    kw = {}\n    fill(kw)\n    return torch.arange(n, **kw) / 3\n",
    "a cast": "def f(n: int, **kw):\n    return torch.arange(n).to(**kw) / 3\n",
    "a cast of a list": "def f(n: int, *a):\n    return torch.arange(n).to(*a) / 3\n",
    "a view": "def f(n: int):\n    return torch.arange(n).view(dtype=torch.float64) / 3\n",
    "data": "def f(n: int):\n    t = torch.arange(n)\n    t.data = torch.ones(n, dtype=torch.float64)\n"
    "    return t / 3\n",
    "an attribute": "class R:\n    dtype = torch.long\n    def f(self, n: int):\n"
    "        return torch.arange(n, dtype=self.dtype) / 3\ndef g(r):\n    r.dtype = torch.float64\n",
    "a replaced function": "torch.arange = g\ndef f(n: int):\n    return torch.arange(n) / 3\n",
    "its own function": "from torch import arange\ndef arange(n):\n    return g(n)\ndef f(n: int):\n"
    "    return arange(n) / 3\n",
    "a later star": "from torch import *\nfrom numpy import *\ndef f(n: int):\n    return arange(n) / 3\n",
    "an attribute that is replaced": "class R:\n    def __init__(self):\n        self.g = torch.arange\n"
    "    def h(self, g):\n        self.g = g\n    def f(self, n: int):\n        return self.g(n) / 3\n",
}


@pytest.mark.parametrize("name", UNPACKED)
def test_a_dtype_that_the_call_does_not_show_makes_no_safe_fix(name: str) -> None:
    assert not safe(UNPACKED[name])


@pytest.mark.parametrize(
    "line",
    ["torch.arange(*s) / 3", "torch.arange(n, **KW) / 3", "torch.arange(n).view(*s) / 3",
     "torch.arange(n).to('cpu', **KW) / 3", "torch.arange(n, **{'device': 'cpu'}) / 3"],
)  # fmt: skip
def test_what_shows_that_no_dtype_is_unpacked_leaves_a_safe_fix(line: str) -> None:
    assert safe(f"KW = {{'device': 'cpu'}}\ndef f(n: int, s):\n    return {line}\n")


def test_a_complement_is_another_number() -> None:
    assert safe("t = torch.arange(3.0 + 1, 4096.0) / 3\n")
    assert not safe("t = torch.arange(3.0 + ~1, 4096.0) / 3\n")


# So large that functions are left out by the search for what can hold a finding.
PADDING = "".join(f"def f{n}(x):\n    # nothing of positions\n    return x\n\n\n" for n in range(99))
FAR = {
    "shape": "class G:\n    def __init__(self):\n        self.shape = (2.5, 1)\ndef f(g):\n"
    "    n = g.shape[0]\n    return COUNT\n",
    "size": "class G:\n    def size(self, d):\n        return 2.5\ndef f(g):\n"
    "    n = g.size(0)\n    return COUNT\n",
    "setattr": "class R:\n    def __init__(self, n: int):\n        self.n = n\n    def t(self):\n"
    "        n = self.n\n        return COUNT\ndef g(r):\n    setattr(r, 'n', 2.5)\n",
    "table of the module": "t = torch.arange(300, dtype=torch.float32)\ndef f():\n"
    "    return t.dot(torch.ones(300))\n",
    "tables of the module": "ts = [torch.arange(300, dtype=torch.float32)]\ndef f():\n"
    "    return ts[0].dot(torch.ones(300))\n",
}


@pytest.mark.parametrize("name", FAR)
def test_what_another_function_of_a_large_file_does_counts(name: str) -> None:
    source = FAR[name].replace("COUNT", COUNTING)
    for size in ("", PADDING):
        assert kinds(f"import torch\n{source}\n\n{size}")
        assert not safe(f"{source}\n\n{size}")
    assert safe(f"def f(n: int):\n    return {COUNTING}\n\n\n{PADDING}")


@pytest.mark.parametrize("size", ["", PADDING])
@pytest.mark.parametrize(
    "source",
    [
        f"def scaled(x, t):\n    return x * t.sin()\ndef f(x, n: int):\n    return scaled(x, {COUNTED})\n",
        f"class R:\n    def __init__(self, n: int):\n        self.t = {COUNTED}\n"
        "    def scaled(self, x, t):\n        return x * t.sin()\n"
        "    def f(self, x):\n        return self.scaled(x, self.t)\n",
    ],
)
def test_what_a_function_of_a_large_file_is_given_keeps_a_safe_fix(source: str, size: str) -> None:
    assert safe(f"{source}\n\n{size}")


def test_a_global_that_another_function_of_a_large_file_changes_is_reported() -> None:
    source = f"N = 3\ndef g():\n    global N\n    N = 700.5\ndef f():\n    n = N\n    return {COUNTING}\n\n\n"
    assert kinds(f"import torch\n{source}") == kinds(f"import torch\n{source}{PADDING}") == {("SR001", False)}


HELD = (
    "from operator import attrgetter\nclass R(torch.nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.register_buffer('t', torch.arange(4096, dtype=torch.float32))\n"
    "    def f(self, name):\n        "
)


@pytest.mark.parametrize(
    "source",
    [
        HELD + "return self.state_dict()\n",
        HELD + "return dict(self.named_buffers())\n",
        HELD + "return self.__dict__\n",
        HELD + "return attrgetter(name)(self)\n",
        HELD + "return attrgetter('rope.t')(name)\n",
        "def f():\n    t = torch.arange(4096, dtype=torch.float32)\n    return g(**locals())\n",
        "t = torch.arange(4096, dtype=torch.float32)\ndef f(name):\n    return globals()[name]\n",
        "def f():\n    t = torch.arange(4096, dtype=torch.float32)\n    return eval('t @ t')\n",
    ],
)
def test_what_is_read_without_its_name_is_out_of_sight(source: str) -> None:
    assert safe(HELD + "return 1\n")
    assert not safe(source)


CLASS = "class M:\n    def __init__(self):\n        self.n = 4\n"
METHOD = "    def f(self):\n        return OWN\n"
# What else a bound may be by the time it is used; each ran with 1.5 where only its 4 was seen.
REBOUND = {
    "walrus": "def f():\n    n = 4\n    if (n := 1.5):\n        pass\n    return COUNT\n",
    "walrus in its statement": "def f():\n    n = 4\n    return COUNT if (n := 1.5) else 0\n",
    "walrus in a comprehension": "def f():\n    n = 4\n    [n := x for x in (1.5,)]\n    return COUNT\n",
    "comprehension": "def f():\n    n = 1.5\n    [n for n in range(3)]\n    return COUNT\n",
    "comprehension beside": "def f():\n    n = 1.5\n    return [n for n in range(3)], COUNT\n",
    "global": "n = 4\ndef g():\n    global n\n    n = 1.5\ndef f():\n    g()\n    return COUNT\n",
    "global of a module": "n = 4\ndef g():\n    global n\n    n = 1.5\ng()\nt = COUNT\n"
    "def f():\n    return t\n",
    "nonlocal": "def f():\n    n = 4\n    def g():\n        nonlocal n\n        n = 1.5\n"
    "    g()\n    return COUNT\n",
    "packed arguments": "n = 4\ndef g(*n):\n    return COUNT\ndef f():\n    return g\n",
    "a list": "def f():\n    s = [4, 4]\n    s[0] = 1.5\n"
    "    return torch.arange(s[0], 900, dtype=torch.float32)\n",
    "try": "def f():\n    n = 4\n    try:\n        n = 1.5\n        raise ValueError\n        n = 3\n"
    "    except ValueError:\n        pass\n    return COUNT\n",
    "subclass": "class M:\n    n = 4\n    def f(self):\n        return OWN\nclass N(M):\n    n = 1.5\n"
    "def f():\n    return N().f()\n",
    "attribute from outside": "class M:\n    def __init__(self):\n        self.n = 4\n    def f(self):\n"
    "        return OWN\ndef f():\n    m = M()\n    m.n = 1.5\n    return m.f()\n",
    "setattr": "class M:\n    def __init__(self):\n        self.n = 4\n        setattr(self, 'n', 1.5)\n"
    "    def f(self):\n        return OWN\ndef f():\n    return M().f()\n",
    "setattr of names": f"{CLASS}        for k in ('n',):\n            setattr(self, k, 1.5)\n{METHOD}",
    "setattr of a made name": f"{CLASS}        setattr(self, f'{{chr(110)}}', 1.5)\n{METHOD}",
    "object's setattr": f"{CLASS}        object.__setattr__(self, 'n', 1.5)\n{METHOD}",
    "update": f"{CLASS}        self.__dict__.update(n=1.5)\n{METHOD}",
    "vars": f"{CLASS}        vars(self).update(n=1.5)\n{METHOD}",
    "an item of its dictionary": f"{CLASS}        self.__dict__['n'] = 1.5\n{METHOD}",
    "an item of vars": f"{CLASS}        vars(self)['n'] = 1.5\n{METHOD}",
    "a dictionary": f"{CLASS}        self.__dict__ = {{'n': 1.5}}\n{METHOD}",
    "a dictionary that is joined": f"{CLASS}        self.__dict__ |= {{'n': 1.5}}\n{METHOD}",
    "setattr of a percent sign": f"{CLASS}        setattr(self, '%s' % 'n', 1.5)\n{METHOD}",
    "setattr of a format": f"{CLASS}        setattr(self, '{{}}'.format('n'), 1.5)\n{METHOD}",
    "setattr of a tuple": f"{CLASS}        setattr(*(self, 'n', 1.5))\n{METHOD}",
    "property of a subclass": f"{CLASS}{METHOD}class N(M):\n    @property\n    def n(self):\n"
    "        return 1.5\n",
    "attribute of a part": f"{CLASS}{METHOD}class P:\n    def __init__(self):\n        self.m = M()\n"
    "        self.m.n = 1.5\ndef f():\n    return P().m.f()\n",
    "attribute of an item": f"{CLASS}{METHOD}def f():\n    ms = [M()]\n    ms[0].n = 1.5\n"
    "    return ms[0].f()\n",
    "attribute of the class": f"{CLASS}        type(self).n = 1.5\n        del self.n\n{METHOD}",
    "base": "class B:\n    def g(self):\n        self.n = 1.5\nclass M(B):\n    def __init__(self):\n"
    f"        self.n = 4\n        self.g()\n{METHOD}",
    "method of a subclass": "class M:\n    def n(self) -> int:\n        return 4\n    def f(self):\n"
    "        return OWN()\nclass N(M):\n    def n(self):\n        return 1.5\ndef f():\n    return N().f()\n",
    "import": "n = 4\ntry:\n    from sizes import n\nexcept ImportError:\n    pass\n"
    "def f():\n    return COUNT\n",
    "import before": "try:\n    from sizes import n\nexcept ImportError:\n    n = 4\n"
    "def f():\n    return COUNT\n",
    "star": "n = 4\nfrom sizes import *\ndef f():\n    return COUNT\n",
    "a list of a shape": "def f(x):\n    s = list(x.shape)\n    s[0] = 1.5\n"
    "    return torch.arange(s[0], 900, dtype=torch.float32)\n",
    "computed attribute": "class C:\n    def __getattr__(self, name):\n        return (1.5,)\n"
    "def f(c):\n    return torch.arange(c.shape[0], 900, dtype=torch.float32)\n",
    "shape of an own object": "class M(B):\n    def f(self):\n"
    "        return torch.arange(self.shape[0], 900, dtype=torch.float32)\n",
    "size of an own object": "class M(B):\n    def f(self):\n"
    "        return torch.arange(self.size(0), 900, dtype=torch.float32)\n",
    "a dtype as an annotation": "def f(n: torch.int):\n    return COUNT\n",
    "exception": "def f(n: int):\n    try:\n        g()\n    except E as n:\n        return COUNT\n",
    "function": "def f(n: int):\n    def n():\n        pass\n    return COUNT\n",
    "default of a maximum": "def f(s: list[int]):\n    n = max(s, default=1.5)\n    return COUNT\n",
    "field of a namespace": "def f(c):\n    return torch.arange(c.shape[0], 900, dtype=torch.float32)\n"
    "f(Namespace(**{'shape': (1.5,)}))\n",
}


@pytest.mark.parametrize("name", REBOUND)
def test_a_bound_that_something_else_may_rebind_makes_no_safe_fix(name: str) -> None:
    own = "torch.arange(self.n, 900, dtype=torch.float32)"
    source = REBOUND[name].replace("OWN()", own.replace("n,", "n(),")).replace("OWN", own)
    source = source.replace("COUNT", own.replace("self.", ""))
    assert kinds("import torch\n" + source)
    assert not safe(source)


@pytest.mark.parametrize(
    "source",
    [
        "from math import *\nn = 4\ndef f():\n    return torch.arange(n, 900, dtype=torch.float32)\n",
        "from sizes import n\ndef f(n: int):\n    return torch.arange(n, 900, dtype=torch.float32)\n",
        CLASS + METHOD.replace("OWN", "torch.arange(self.n, 900, dtype=torch.float32)")
        + "def g(self, i):\n    setattr(self, f'layer_{i}', 1.5)\n    setattr(self, 'layer_%d' % i, 1.5)\n"
        + "    setattr(self, 'layer_{}'.format(i), 1.5)\n    setattr(self, 'layer_' + i, 1.5)\n",
        CLASS + METHOD.replace("OWN", "torch.arange(self.n, 900, dtype=torch.float32)")
        + "class N:\n    def g(self, k):\n        setattr(self, k, 1.5)\n",
        "class B:\n    def __init__(self, n: int):\n        self.n = n\n"
        "class M(B):\n    def __init__(self, n: int):\n        self.n = n\n"
        + METHOD.replace("OWN", "torch.arange(self.n, 900, dtype=torch.float32)"),
    ],
)  # fmt: skip
def test_what_cannot_rebind_a_bound_leaves_its_fix_safe(source: str) -> None:
    assert safe(source)


# What a name stands for besides torch: the edit would call `.to` of a numpy array.
@pytest.mark.parametrize(
    "source",
    [
        "if fast:\n    import numpy as xp\nelse:\n    import torch as xp\n"
        "def f(n: int):\n    return xp.arange(n, dtype=xp.float32)\n",
        "try:\n    from numpy import arange\nexcept ImportError:\n    from torch import arange\n"
        "import torch\ndef f(n: int):\n    return arange(n, dtype=torch.float32)\n",
        "import numpy, torch\ndef f(n: int, fast):\n    arange = numpy.arange\n    if fast:\n"
        "        arange = torch.arange\n    return arange(n) / 3\n",
        "import torch\nfrom torch import arange, float32\ndel torch\n"
        "def f(n: int):\n    return arange(n, dtype=float32)\n",
    ],
)
def test_there_is_no_fix_where_a_name_may_not_be_torchs(source: str) -> None:
    assert {fix for _, fix in kinds(source)} == {None}


def test_a_dtype_that_is_one_of_two_leaves_an_unsafe_fix() -> None:
    source = "def f(n, dtype):\n    if dtype is torch.bool:\n        dtype = torch.uint8\n"
    assert kinds(f"import torch\n{source}    return torch.arange(n, dtype=dtype)\n") == {("SR002", False)}


@pytest.mark.parametrize(
    ("source", "fixed"),
    [
        ("import torch\ndef g():\n    global torch\n    import numpy as torch\ndef f():\n", None),
        ("def g():\n    global torch\n    import torch\ndef f():\n", True),
        ("import numpy as torch\nclass A:\n    import torch\ndef f():\n", None),
        ("import torch as t\ntorch = t\ndef f():\n    import numpy as torch\n", None),
    ],
    ids=["global", "global torch", "class", "function under a module's name"],
)
def test_an_import_counts_where_it_binds(source: str, fixed: bool | None) -> None:
    body = "    return torch.cos(torch.arange(9999) * 0.5)\n"
    assert kinds(source + body) == ({("SR004", fixed)} if fixed else set())
    if "class" in source:
        method = source.replace("def f():", "    def f():")
        assert kinds(method + "    " + body) == set()


def test_an_import_in_a_function_is_that_functions() -> None:
    source = (
        "def f(n: int):\n    import numpy as xp\n    return xp.arange(n, dtype=xp.float32)\n"
        "def g(n: int):\n    import torch as xp\n    t = xp.arange(n, dtype=xp.float32)\n    return t\n"
    )
    (finding,) = analyze(source.encode(), "model.py")
    assert finding.fix is not None
    assert (finding.line, finding.fix.safe) == (6, True)


# An int satisfies an annotation of float: `torch.arange(3) * 2` is of integers, before a fix.
FLOATS = {
    "parameter": "def f(n: int, s: float):\n    return torch.arange(n) * s\n",
    "default": "def f(n: int, s: float = 0.5):\n    return torch.arange(n) * s\n",
    "function": "def f(n: int, s: float):\n    return torch.pow(s, torch.arange(n))\n",
    "sum": "def f(n: int, s: float):\n    return torch.arange(n) * (s + 1)\n",
    "larger": "def f(n: int, k: int):\n    return torch.arange(n) * max(k, 0.5)\n",
    "attribute": "class P:\n    def __init__(self, s: float = 0.5):\n        self.s = s\n"
    "    def f(self, n: int):\n        return torch.arange(n) * self.s\n",
    "field": "@dataclass\nclass P:\n    s: float = 0.5\n    def f(self, n: int):\n"
    "        return torch.arange(n) * self.s\n",
    "result": "def s() -> float:\n    return g()\ndef f(n: int):\n    return torch.arange(n) * s()\n",
}


@pytest.mark.parametrize("name", FLOATS)
def test_an_annotation_of_float_makes_no_integers_floating(name: str) -> None:
    assert kinds("import torch\n" + FLOATS[name])
    assert not safe(FLOATS[name])


@pytest.mark.parametrize(
    "operation",
    ["torch.arange(n) / s", "torch.div(torch.arange(n), s)", "torch.arange(n) * (s * 0.5)",
     "torch.arange(n) * (1 / s)", "torch.arange(n) * float(s)", "torch.arange(n) * -math.log(s)"],
)  # fmt: skip
def test_what_is_floating_whatever_is_given_has_a_safe_fix(operation: str) -> None:
    assert safe(f"import math\ndef f(n: int, s: float):\n    return {operation}\n")


def test_a_call_with_floats_contradicts_an_annotation_of_an_integer_tensor() -> None:
    source = "def f(t: torch.LongTensor, d: int):\n    return (t + torch.arange(3)) / d\n"
    assert safe(source)
    assert not safe(source + "f(torch.ones(3, dtype=torch.float64), 3)\n")


def test_a_tensor_of_a_range_is_counted_safely_in_integers() -> None:
    source = b"import torch\nt = torch.tensor(list(range(a, b, c)), dtype=torch.float32)\n"
    (finding,) = analyze(source, "model.py")
    assert finding.fix is not None
    assert finding.fix.safe
    fixed = apply_edits(source, finding.fix.edits)
    assert fixed == source.replace(b"float32)", b"int64).to(torch.float32)")


@pytest.mark.parametrize(
    "line",
    [
        "torch.tensor(range(2**63, 2**63 + 2), dtype=torch.float32)",
        "torch.tensor(range(n), dtype=torch.float32, pin_memory=True)",
        "torch.tensor([i for i in range(n) for i in (0.5, i)], dtype=torch.float32)",
        "torch.tensor([i / 2 for i in range(n)], dtype=torch.float32)",
    ],
)
def test_a_tensor_of_other_numbers_is_not(line: str) -> None:
    assert not safe(f"t = {line}\n")


def test_what_a_file_calls_range_itself_is_no_count() -> None:
    own = "def range(n):\n    return [0.5]\n"
    assert not kinds(f"import torch\n{own}t = torch.tensor(range(n), dtype=torch.float32)\n")


COUNT = "torch.arange(n, n + 4, dtype=torch.float32)"
OBJECT = "class P:\n    def __init__(self, n: int):\n        self.n = n\n        {}\n    def t(self):\n"
OBJECT += "        return torch.arange(self.n, dtype=torch.float32)\n"
NOT_WHOLE = {
    "goes on after an error": "def f(x):\n    n = 0.5\n    with suppress(TypeError):\n        n = len(x)\n"
    "    return {}\n",
    "finally": "def f(x):\n    n = 0.5\n    try:\n        n = len(x)\n    finally:\n        return {}\n",
    "no round of a loop": "def f(k):\n    n = 0.5\n    for n in range(k):\n        pass\n    return {}\n",
    "after a loop": "def f(x):\n    n = 3\n    for _ in x:\n        n = 0.5\n    else:\n        return {}\n",
    "guard": "def f(x, n: int):\n    match x:\n        case 1 if (n := 0.5):\n            pass\n"
    "    return {}\n",
    "lambda": "def f(n: int):\n    return (lambda *n: torch.arange(n[0], dtype=torch.float32))(0.5)\n",
    "module": "class M(nn.Module):\n    def forward(self, n: int):\n        return {} > 2\nM()(0.5)\n",
    "operator": "class M:\n    def __getitem__(self, n: int):\n        return {} > 2\n",
    "setter": "class M:\n    @n.setter\n    def n(self, n: int):\n        self.r = {} > 2\n",
    "metaclass": "class K(type):\n    def __call__(cls):\n        return super().__call__(0.5)\n"
    "class M(metaclass=K):\n    def __init__(self, n: int):\n        self.r = {} > 2\n",
    "thread": "def f(n: int):\n    g({} > 2)\nThread(target=f, args=(0.5,))\n",
    "thread, by name": "def f(n: int):\n    g({} > 2)\nThread(target=f, kwargs=dict(n=0.5))\n",
    "method of a class": "class C:\n    def f(self, n: int):\n        return {}\nC.f(C(), 0.5)\n",
    "comprehension": OBJECT.format("[0 for self.n in (0.5,)]"),
    "private": OBJECT.replace("self.n", "self.__n").format("") + "P(1)._P__n = 0.5\n",
    "hook": OBJECT.format("") + "    def __getattribute__(self, name):\n        return 0.5\n",
    "dictionary": OBJECT.format("d = self.__dict__"),
    "dictionary, given": OBJECT.format("put(vars(self))"),
    "round": "class Q:\n    def __round__(self):\n        return 0.5\ndef f(q):\n    n = round(q)\n"
    "    return {}\n",
    "builtin": "import builtins\nbuiltins.len = half\ndef f(x):\n    n = len(x)\n    return {}\n",
    "global": "def f(x):\n    n = len(x)\n    return {}\nglobals()['len'] = half\n",
    "initial variable": "class C:\n    k: InitVar[int] = 1\n    def __post_init__(self, n: int):\n"
    "        self.r = {} > 2\n",
    "deleted": OBJECT.format("del self.n"),
    "descriptor": OBJECT.format("C.n.__set__(self, 0.5)"),
    "mangled": "class C:\n    def __init__(self, n: int):\n        self.__n = n\n    def f(self):\n"
    "        n = self.__n\n        return {}\nclass D(C):\n    def g(self):\n        self._C__n = 0.5\n",
    "mangled, computed": "class C:\n    def __init__(self, n: int):\n        self.__n = n\n    def f(self):\n"
    "        n = self.__n\n        return {}\ndef g(c, name):\n    setattr(c, '_C' + name, 0.5)\n",
    "listed": "def f(m: int, n: int):\n    g({} > 2)\naccumulate([1, 0.5], f)\n",
    "keywords": "def f(n: int):\n    return {}\ndef g(**k):\n    return f(**k)\ng(n=0.5)\n",
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_a_bound_that_something_else_may_give_is_not_whole(name: str) -> None:
    source = NOT_WHOLE[name].replace("{}", COUNT)
    assert kinds("import torch\nfrom torch import nn\n" + source)
    assert not safe(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    with torch.no_grad():\n        n = len(x)\n    return {}\n",
        "def f(k: int):\n    for n in range(k):\n        g({} > 2)\n",
        "class M(nn.Module):\n    def forward(self, n: int):\n        return {} > 2\nM()(4)\n",
        "class M(nn.Module):\n    def forward(self, n: int):\n        return {} > 2\nx.mul(0.5)\n",
        "def f(n: int):\n    g({} > 2)\nThread(target=f, args=(5,))\n",
        "class C:\n    def f(self, n: int):\n        return {}\nC.f(C(), 5)\n",
        OBJECT.format("g(dict(self.__dict__))"),
        OBJECT.format("for name in self.__dict__:\n            print(name)"),
    ],
)
def test_a_bound_that_only_whole_numbers_reach_is(source: str) -> None:
    assert safe(source.replace("{}", COUNT))


@pytest.mark.parametrize(
    "source",
    [
        "with mock.patch('torch.arange', g):\n    t = {}\n",
        "with mock.patch.object(torch, 'arange', g):\n    t = {}\n",
        "def put(of, name, given):\n    setattr(of, name, given)\nput(torch, 'arange', g)\nt = {}\n",
        "torch.__dict__['arange'] = g\nt = {}\n",
        "globals()['torch'] = numpy\nt = {}\n",
        "exec('torch = numpy')\nt = {}\n",
        "def f(n: int):\n    return {}\nt = eval('f(600.5)')\n",
        "import builtins\ndef f(n: int):\n    return {}\nt = builtins.eval('f(600.5)')\n",
        "torch.Tensor.to = g\nt = {}\n",
        "torch.int64 = torch.int8\nt = {}\n",
        "class Mode(TorchFunctionMode):\n    def __torch_function__(self, *given):\n        pass\nt = {}\n",
        "class M:\n    xp = torch\n    def f(self):\n"
        "        return self.xp.arange(4096, dtype=torch.float32)\nM().xp = numpy\n",
        "t = torch.arange(4096, dtype=(kind := torch.float32), device=g(kind))\n",
        "t = f'{{}=}'\n",
    ],
)
def test_a_fix_of_what_a_file_replaces_is_not_safe(source: str) -> None:
    assert safe("t = torch.arange(4096, dtype=torch.float32)\n")
    assert not safe(source.replace("{}", "torch.arange(4096, dtype=torch.float32)"))


def test_eval_of_a_model_runs_no_text() -> None:
    assert safe("model.eval()\nt = torch.arange(4096, dtype=torch.float32)\n")


@pytest.mark.parametrize(
    "made",
    [
        "arange(n, out=b)",
        "floor_divide(torch.arange(n), 2, out=b)",
        "arange(n, **{'out': b})",
        "arange(n, **o)",
    ],
)
def test_what_is_written_into_a_tensor_has_its_dtype(made: str) -> None:
    body = "    b = torch.empty(n, dtype=torch.float64)\n    o = dict(out=b)\n"
    assert not safe(f"def f(n: int):\n{body}    return torch.{made} / 3\n")


def test_what_a_walrus_calls_is_as_certain_as_its_value() -> None:
    method = "    def f(self, n: int):\n        t = {}(n) / 3\n"
    source = f"class M:\n    def __init__(self):\n        self.a = torch.arange\n{method}"
    for called in ("self.a", "(a := self.a)"):
        assert safe(source.format(called))
        assert not safe(source.format(called) + "    def g(self, a):\n        self.a = a\n")


@pytest.mark.parametrize(
    ("made", "called"),
    [
        ("torch.arange", "    a = self.a\n        t = a(n) / 3\n"),
        ("functools.partial(torch.arange, device=None)", "    t = self.a(n) / 3\n"),
    ],
)
def test_what_a_name_calls_is_as_certain_as_what_it_is_assigned(made: str, called: str) -> None:
    source = f"class M:\n    def __init__(self):\n        self.a = {made}\n"
    source = f"import functools\n{source}    def f(self, n: int):\n    {called}"
    assert safe(source)
    assert not safe(source + "    def g(self, a):\n        self.a = a\n")


@pytest.mark.parametrize(
    "changes",
    [
        "o['dtype'], x = torch.float64, 1",
        "for o['dtype'] in (torch.float64,): pass",
        "with enter(torch.float64) as o['dtype']: pass",
        "[0 for o['dtype'] in (torch.float64,)]",
        "p = o; p['dtype'] = torch.float64",
        "p, x = o, 1; p['dtype'] = torch.float64",
        "for p in (o,): p['dtype'] = torch.float64",
        "(p := o)['dtype'] = torch.float64",
        "def g(p=o): p['dtype'] = torch.float64",
        "o.__ior__({'dtype': torch.float64})",
        "p = o = dict(device=None); p['dtype'] = torch.float64",
        "o = dict(**g())",
        "from x import o",
    ],
)
def test_a_mapping_that_is_not_only_unpacked_may_hold_another_dtype(changes: str) -> None:
    source = "def f(n: int):\n    o = dict(device=None)\n    {}\n    return torch.arange(n, **o) / 3\n"
    assert safe(source.format("x = o['device'], {**o}"))
    assert safe(source.format("x.a = x.b = o['device']").replace("**o", "**dict(device=None)"))
    assert not safe(source.format(changes))


@pytest.mark.parametrize(
    ("prepares", "otherwise"),
    [
        ("p(self.a)", "class N(M):\n    a = p(torch.arange, dtype=torch.float64)\n"),
        (
            "p(torch.arange)",
            "try:\n    from x import p\nexcept ImportError:\n    from functools import partial as p\n",
        ),
        ("p(torch.arange)", "def p(f):\n    return g\n"),
    ],
)
def test_what_a_partial_prepares_is_as_certain_as_its_parts(prepares: str, otherwise: str) -> None:
    source = "from functools import partial as p\nclass M:\n    a = torch.arange\n    def f(self, n: int):\n"
    source += f"        b = {prepares}\n        t = b(n) / 3\n"
    assert safe(source)
    assert not safe(source + otherwise)


@pytest.mark.parametrize(
    "other",
    [
        "class B:\n    def g(self):\n        self.a = p\nclass M(B):\n    a = torch.arange\n",
        "class B:\n    def g(self):\n        self.a = p\nclass M(B):\n"
        "    def g(self):\n        self.a = torch.arange\n",
        "@dataclass\nclass M:\n    a: Callable = torch.arange\n",
    ],
)
def test_what_a_base_assigns_or_a_constructor_is_given_may_be_another_function(other: str) -> None:
    method = "    def f(self, n: int):\n        t = self.a(n) / 3\n"
    assert safe("class M:\n    a = torch.arange\n" + method)
    assert not safe(other + method)


@pytest.mark.parametrize(
    "made",
    [
        "class D(C):\n    def like(self):\n        return type(self)(2.5)\n",
        "class D(C):\n    def like(self):\n        return self.__class__(2.5)\n",
        "D = C\nD(2.5)\n",
        "{'c': C}['c'](2.5)\n",
        "partial(C, n=2.5)\n",
        "def make(kind, n):\n    return kind(2.5)\nmake(C, 1)\n",
    ],
)
def test_a_field_is_whole_only_where_all_that_may_construct_its_class_says_so(made: str) -> None:
    method = "    def f(self):\n        return torch.arange(self.n, dtype=torch.float32)\n"
    for source in (
        f"@dataclass\nclass C:\n    n: int\n{method}",
        f"class C:\n    def __init__(self, n: int):\n        self.n = n\n{method}",
    ):
        assert safe(source + made.replace("2.5", "2"))
        assert not safe(source + made)


def test_a_named_tuple_may_be_made_of_a_list() -> None:
    source = "class C(NamedTuple):\n    n: int\n    def f(self):\n"
    source += "        return torch.arange(self.n, dtype=torch.float32)\n"
    assert safe(source + "C(2)\n")
    assert not safe(source + "C._make([2.5])\n")


def test_what_is_unpacked_through_several_functions_may_be_a_fraction() -> None:
    source = "def f(n: int):\n    return torch.arange(n, dtype=torch.float32)\ndef g(*a):\n    return f(*a)\n"
    source += "def h(*a):\n    return g(*a)\ndef i(*a):\n    return i(*a) + h(*a)\n"
    assert safe(source + "i(2)\n")
    assert not safe(source + "i(2.5)\n")


@pytest.mark.parametrize(
    "sets",
    [
        "setattr(sys.modules['m'], 'N', 2.5)",
        "sys.modules['m'].N = 2.5",
        "sys.modules['m'].__dict__['N'] = 2.5",
        "vars(sys.modules['m'])['N'] = 2.5",
        "g = globals(); g['N'] = 2.5",
        "g.__globals__['N'] = 2.5",
        "g.__globals__.update(N=2.5)",
        "mock.patch('m.N', 2.5).start()",
        "patch.object(m, 'N', 2.5).start()",
        "def g():\n    global N\n    return [N := k for k in (2.5,)]",
    ],
)
def test_a_constant_that_is_set_as_an_attribute_of_its_module_is_not_known(sets: str) -> None:
    source = "N = 600\ndef f():\n    return torch.arange(N, dtype=torch.float32)\n"
    assert safe(source)
    assert not safe(source + sets + "\n")


def test_a_fix_writes_no_name_that_is_imported_later() -> None:
    source = "from torch import arange, float32\nt = arange(4096, dtype=float32)\nfrom torch import int64\n"
    (finding,) = analyze(source.encode(), "model.py")
    assert finding.fix is None


OF_SELF = "    def f(self):\n        n = self.n\n        return {}\n"
OF_CALLS = "def f(n: int):\n    return len({})\n"


@pytest.mark.parametrize(
    "source",
    [
        "n = 4096\ndef f():\n    from settings import n\n    return {}\n",
        "n = 4096\ndef f():\n    from settings import n\n    def g():\n        return {}\n    return g()\n",
        "class B:\n    n = 4096\n" + OF_SELF + "class C(B):\n    from settings import n\n",
        "n = 4096\nglobals().update(settings)\ndef f():\n    return {}\n",
        "n = 4096\nfor k, v in settings.items():\n    globals()[k] = v\ndef f():\n    return {}\n",
        OF_CALLS + "g = numpy.vectorize(f)\ng([2.5])\n",
        OF_CALLS + "g: object = functools.lru_cache(f)\ng(2.5)\n",
        OF_CALLS + "g = f if f else None\ng(2.5)\n",
        OF_CALLS + "g = getattr(module, 'f')\ng(2.5)\n",
        OF_CALLS + "def g(*given):\n    return f(*given)\ng(2.5)\n",
        "def g(h):\n    return lambda: h(2.5)\n@g\n" + OF_CALLS,
        "def g(h):\n    H.append(h)\n    return h\n@g\n" + OF_CALLS + "for h in H:\n    h(2.5)\n",
        "def g(h):\n    return wraps(h)\ndef wraps(h):\n    return lambda: h(2.5)\n@g\n" + OF_CALLS,
        "def g(h):\n    return k(h)\ndef k(h):\n    return lambda: h(2.5)\n@g\n" + OF_CALLS,
        "class C:\n    n: int = 4096\n" + OF_SELF + "C(n=2.5)\n",
        "class C:\n    n: int = 4096\n" + OF_SELF + "C(2.5)\n",
        "class C:\n    n: int\n" + OF_SELF + "def g(**k):\n    return C(**k)\ng(n=2.5)\n",
        "class C:\n    n: int = 4096\n" + OF_SELF + "def g(*k):\n    return C(*k)\ng(2.5)\n",
    ],
)
def test_a_bound_that_is_given_in_another_way_is_not_whole(source: str) -> None:
    source = source.replace("{}", COUNT)
    if "2.5" in source:
        assert safe(source.replace("2.5", "4096"))
    assert not safe(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(n: int):\n    return {}\n",
        "def f(x):\n    return torch.arange(len(x), dtype=torch.float32)\n",
        "def f(x):\n    return torch.arange(math.ceil(x), dtype=torch.float32)\n",
        "def f(n: int):\n    return torch.tensor(list(range(n)), dtype=torch.float32)\n",
        "def f(n: int):\n    return torch.arange(n) / 3\n",
    ],
)
def test_a_star_may_give_torch_and_what_is_built_in_another_meaning(source: str) -> None:
    source = "import math\n{star}" + source.replace("{}", COUNT)
    for known in ("", "from numpy import *\n", "from torch.nn import *\n", "from typing import *\n"):
        assert safe(source.replace("{star}", known))
    for other in ("from .types import *\n", "from sizes import *\n", "globals().update(settings)\n"):
        assert kinds("import torch\n" + source.replace("{star}", other))
        assert not safe(source.replace("{star}", other))


def test_an_attribute_that_is_a_float_may_be_an_int_in_a_class_of_another_file() -> None:
    source = (
        "class C:\n    scale = 0.5\n    def f(self, n: int):\n        return torch.arange(n) {} self.scale\n"
    )
    assert not safe(source.format("*"))
    assert safe(source.format("/"))
