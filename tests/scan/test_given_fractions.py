"""A fraction that the file gives to an ``int`` by a way around leaves no safe fix; a whole number does."""

from __future__ import annotations

import pytest

from safe_rope.scan.run.analyze import analyze

COUNTING = "torch.arange(n, dtype=torch.float32).to(torch.float64)"
FUNCTION = f"def f(n: int):\n    return {COUNTING}\n"
METHOD = f"class R:\n    def f(self, n: int):\n        return {COUNTING}\n"


def safe(source: str) -> bool:
    found = analyze(f"import torch\n{source}".encode(), "model.py")
    return any(one.fix is not None and one.fix.safe for one in found)


HELD = {
    "a loop": "for g in [f]:\n    g(2.5)\n",
    "a loop and a variable": "y = 2.5\nfor g in [f]:\n    g(y)\n",
    "a comprehension": "t = [g(2.5) for g in (f,)]\n",
    "a list": "[g] = [f]\ng(2.5)\n",
    "the rest of a list": "g, *_ = f, 1\ng(2.5)\n",
    "a pattern": "match f:\n    case g:\n        g(2.5)\n",
    "a context": "with nullcontext(f) as g:\n    g(2.5)\n",
    "a registry": "KEPT = []\nKEPT.append(f)\nfor g in KEPT:\n    g(2.5)\n",
    "a mapping": "KEPT = dict(a=f)\ng = KEPT['a']\ng(2.5)\n",
    "a result": "def h():\n    return f\ng = h()\ng(2.5)\n",
    "a task": "TASKS = [(f, 2.5)]\nfor g, x in TASKS:\n    g(x)\n",
    "a task with its name": "TASKS = [('count', f, (2.5,))]\nfor _, g, x in TASKS:\n    g(*x)\n",
    "a test of another's result": "def g(x, h=f):\n    return h(x)\ng(2.5)\n",
}


# Each gives an ``int`` a fraction that the scanner does not see as one, and that no whole number replaces.
UNSEEN = {
    "what another function computes": "import struct\nf(struct.unpack('f', x)[0])\n",
    "what a text says": "import json\nf(json.loads('2.5'))\n",
    "a field of a named tuple": "A = namedtuple('A', 'n')\nf(A(2.5).n)\n",
    "a field of a namespace": "c = SimpleNamespace(n=2.5)\nf(c.n)\n",
    "a field of a made class": "A = make_dataclass('A', ['n'])\nf(A(2.5).n)\n",
    "a default of a field": "f(fields(A)[0].default)\n",
    "a pattern": "match 2.5:\n    case x:\n        f(x)\n",
    "a context": "with nullcontext(2.5) as x:\n    f(x)\n",
    "a count": "import itertools\nfor x in itertools.count(2.5):\n    f(x)\n",
    "a function for reduce": "f(functools.reduce(operator.truediv, [5, 2]))\n",
    "a property that says int": "class A:\n    @property\n    def k(self) -> int:\n        return 5 / 2\n"
    "f(A().k)\n",
    "a result that says int": "def g(x) -> int:\n    if x:\n        return 4\n    return 2.5\nf(g(0))\n",
    "a generator": "def g():\n    yield 2.5\nf(next(g()))\n",
    "a mapping of a library": "d = ChainMap({}, {'n': 2.5})\nf(d['n'])\n",
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_in_the_file_makes_may_be_a_fraction(name: str) -> None:
    assert not safe(FUNCTION + UNSEEN[name])


@pytest.mark.parametrize(
    "given",
    ["config.hidden_size", "len(x)", "torch_int(x)", "x.shape[0]", "x.size(0)", "next(iter([4]))", "k // m"],
)
def test_what_a_configuration_a_tensor_or_a_name_gives_is_whole_by_the_annotation(given: str) -> None:
    assert safe(FUNCTION + f"def g(x, k, m, config):\n    return f({given})\n")


def test_a_default_that_a_function_computes_may_be_a_fraction() -> None:
    source = "def half(k: int):\n    return k / 2\n" + FUNCTION.replace("n: int", "n: int = half(5)")
    assert not safe(source)
    assert safe(source.replace("k / 2", "k + 2"))


@pytest.mark.parametrize("name", HELD)
def test_what_a_variable_calls_may_be_the_function(name: str) -> None:
    assert not safe(FUNCTION + HELD[name])
    assert safe(FUNCTION + HELD[name].replace("2.5", "4"))


@pytest.mark.parametrize("call", ["g(2.5)", "g(n=2.5)"])
def test_a_lambda_passes_on_what_it_is_given(call: str) -> None:
    source = f"class R:\n    def __init__(self, n: int):\n        self.t = {COUNTING}\n"
    source += f"g = lambda n: R(n).t\n{call}\n"
    assert not safe(source)
    assert safe(source.replace("2.5", "4"))


COMPUTED = {
    "an attribute of a class": "class C:\n    ratio = 2.5\nf(C.ratio)\n",
    "an attribute of an object": "class C:\n    def __init__(self, r=2.5):\n        self.ratio = r\n"
    "def g(c):\n    return f(c.ratio)\n",
    "a field": "@dataclass\nclass C:\n    ratio: float\ndef g(c):\n    return f(c.ratio)\n",
    "a member": "class C(Enum):\n    A = 2.5\nf(C.A.value)\n",
    "a property": "class C:\n    @property\n    def ratio(self):\n        return 2.5\n"
    "def g(c):\n    return f(c.ratio)\n",
    "a result": "def half(k):\n    return k * 2.5\nf(half(3))\n",
    "a result by its annotation": "def half(k) -> float:\n    return k\nf(half(3))\n",
    "a default": "def g(k, scale=2.5):\n    return f(k * scale)\n",
    "an item of a mapping": "KEPT = {'a': 2.5}\nf(KEPT['a'])\n",
    "an item that is asked for": "KEPT = {'a': 2.5}\nf(KEPT.get('a'))\n",
    "an item that is numbered": "t = [f(x) for _, x in enumerate([2.5, 4])]\n",
    "a mean": "import numpy as np\nf(np.mean([2, 3]))\n",
    "an item of an array": "import numpy as np\nf(np.array([2.5])[0])\n",
    "an item that is drawn": "import random\nf(random.choice([2.5]))\n",
    "a key": "for k in {2.5: 1}:\n    f(k)\n",
    "what a lambda makes": "for k in map(lambda x: x * 2.5, [3]):\n    f(k)\n",
    "a part of a number": "import math\nf(math.modf(2.5)[1])\n",
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_file_computes_may_be_a_fraction(name: str) -> None:
    source = FUNCTION + COMPUTED[name]
    assert not safe(source)
    whole = source.replace("2.5", "4").replace("float\n", "int\n").replace("-> float", "-> int")
    assert safe(whole.replace("np.mean", "len"))


@pytest.mark.parametrize(
    "call",
    [
        "math.copysign(3, x)",
        "math.fmod(x, 3)",
        "math.ldexp(5, -1)",
        "math.fsum(x)",
        "np.float64(x)",
        "operator.truediv(x, 2)",
    ],
)
def test_what_gives_floats_gives_no_whole_number(call: str) -> None:
    assert not safe(f"import math\nimport operator\nimport numpy as np\n{FUNCTION}f({call})\n")


DECORATED = {
    "a lambda": "@lambda f: lambda n: f(n / 2)\n",
    "a function with a lambda": "def half(f):\n    return lambda n: f(n / 2)\n@half\n",
    "a function with two lambdas": "def half(by):\n    return lambda f: lambda n: f(n / 2)\n@half(2)\n",
    "what dispatches": "@singledispatch\ndef g(n):\n    pass\ng(5 / 2)\n@g.register\n",
    "a registry": "KEPT = []\ndef keep(f):\n    KEPT.append(f)\n    return f\n"
    "def g():\n    for h in KEPT:\n        h(5 / 2)\n@keep\n",
}


@pytest.mark.parametrize("name", DECORATED)
def test_what_a_decorator_makes_of_a_function_may_call_it(name: str) -> None:
    assert not safe(DECORATED[name] + FUNCTION)
    assert safe(DECORATED[name].replace(" / 2)", ")") + FUNCTION)


UNBOUND = {
    "a descriptor": "class half:\n    def __init__(self, fn):\n        self.fn = fn\n"
    "    def __get__(self, o, t=None):\n        return lambda n: self.fn(o, n / 2)\n"
    f"class R:\n    @half\n    def f(self, n: int):\n        return {COUNTING}\n",
    "a dictionary": f"{METHOD}def g(r):\n    return R.__dict__['f'](r, 5 / 2)\n",
}


@pytest.mark.parametrize("name", UNBOUND)
def test_a_method_may_be_given_its_object(name: str) -> None:
    assert not safe(UNBOUND[name])
    assert safe(UNBOUND[name].replace(" / 2)", ")"))


# What stands between a class and its base; each gives the base's number a fraction.
DERIVED = {
    "a call of a generic": "class S(R[str]):\n    pass\ns = S(2.5)\n",
    "an attribute of a generic": "class S(R[str]):\n    def __init__(self):\n        self.n = 2.5\n",
    "a nested class": "class O:\n    R = R\nclass S(O.R):\n    pass\ns = S(2.5)\n",
    "another name": "X = R\nclass S(X):\n    pass\ns = S(2.5)\n",
    "another name of a generic": "X = R[str]\nclass S(X):\n    n = 2.5\n",
    "what a function makes": "class S(with_metaclass(M, R)):\n    n = 2.5\n",
    "a list": "BASES = (R,)\nclass S(*BASES):\n    n = 2.5\n",
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_class_derives_from_a_base_by_any_name(name: str) -> None:
    base = "class R(Generic[T]):\n    def __init__(self, n: int):\n        self.n = n\n"
    base += f"    def f(self):\n        n = self.n\n        return {COUNTING}\n"
    assert not safe(base + DERIVED[name])
    assert safe(base + DERIVED[name].replace("2.5", "2"))


@pytest.mark.parametrize("line", ["f.__defaults__ = (2.5,)\n", "f.__code__ = g.__code__\n"])
def test_other_defaults_or_another_body_leave_no_safe_fix(line: str) -> None:
    assert not safe(FUNCTION.replace("n: int", "n: int = 3") + line)


@pytest.mark.parametrize(
    "line", ["r.k = lambda: 2.5\n", "R.k = g\n", "    def h(self, g):\n        self.k = g\n"]
)
def test_a_method_that_is_assigned_gives_no_whole_number(line: str) -> None:
    source = "class R:\n    def k(self) -> int:\n        return 3\n    def f(self):\n        n = self.k()\n"
    source += f"        return {COUNTING}\n"
    assert safe(source)
    assert not safe(source + line)


@pytest.mark.parametrize(
    "late", ["g = lambda: COUNT\n", "g = (COUNT for _ in range(2))\n", "g = map(lambda _: COUNT, [1])\n"]
)
def test_what_runs_later_reads_what_is_bound_in_between(late: str) -> None:
    count = "torch.arange(n, dtype=torch.float32).tolist()"
    source = f"def f(n: int):\n    {late.replace('COUNT', count)}    n /= 2\n    return g\n"
    assert not safe(source)
    assert safe(source.replace("    n /= 2\n", ""))


@pytest.mark.parametrize(
    "other",
    ["t.prod(dtype=torch.float64)", "t.cumprod(0, dtype=torch.float64)", "torch.bincount(t, x)",
     "torch.bincount(t, weights=x)", "g()"],
)  # fmt: skip
def test_a_dtype_that_is_asked_for_or_comes_of_weights_is_no_integer_one(other: str) -> None:
    source = "def g() -> torch.LongTensor:\n    return torch.ones(1, dtype=torch.float64)\n"
    source += "def f(x):\n    t = torch.arange(9)\n    return torch.exp(-OTHER * torch.arange(9)).tolist()\n"
    assert not safe(source.replace("OTHER", other))
    assert safe(source.replace("OTHER", "torch.bincount(t)"))


def test_what_is_computed_of_too_much_may_be_a_fraction() -> None:
    own = "class C{0}:\n    def __init__(self, x):\n        self.x = x.x + x.x\n"
    source = FUNCTION + "def g(c):\n    return f(c.x)\n"
    assert safe("".join(map(own.format, range(9))) + source)
    assert not safe("".join(map(own.format, range(300))) + source)
