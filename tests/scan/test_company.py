"""A fix beside what is not fixed: some operations take tensors of one dtype only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from safe_rope.scan.engine.callees import ANY_DTYPES
from safe_rope.scan.engine.finding import Finding, apply_edits
from safe_rope.scan.run.analyze import analyze

torch = pytest.importorskip("torch")
parameters = pytest.importorskip("deepspeed.runtime.zero.partition_parameters")

COUNT = "torch.arange(n, dtype=torch.float32)"
DEF = "def f(n: int, m):\n    "
# Each runs in FP32, and in the low dtype that zero.Init and the default give its tensors.
MIXED = {
    "meshgrid": f"{DEF}return torch.meshgrid({COUNT}, torch.arange(m, dtype=torch.float32))\n",
    "fractions": f"{DEF}return torch.cartesian_prod({COUNT}, torch.arange(0.5, m))\n",
    "variables": f"{DEF}y = {COUNT}\n    x = torch.ones(n, m)\n    return y[None] @ x\n",
    "a list": f"{DEF}g = [{COUNT}]\n    g.append(torch.ones(m))\n    return torch.meshgrid(*g)\n",
    "a dict": f"{DEF}d = {{'t': {COUNT}}}\n    return d['t'] @ torch.ones(n)\n",
    "a branch": f"{DEF}t = {COUNT}\n    if m:\n        t = t / 2\n    return t.dot(torch.ones(n))\n",
    "an index": f"{DEF}x = torch.full((n, n), 0.0)\n    x[0, torch.arange(n)] = {COUNT}\n    return x\n",
    "scatter": f"{DEF}return torch.zeros(n).scatter_(0, torch.arange(n), {COUNT})\n",
    "lerp": f"{DEF}return torch.lerp(torch.zeros(n), {COUNT}, 0.5)\n",
    "an alias": f"mm = torch.matmul\ndef f(n: int, m):\n    return mm({COUNT}, torch.ones(n))\n",
    "a sum": f"{DEF}return torch.einsum('i,ij->j', {COUNT}, torch.ones(n, m))\n",
    "a helper": f"def count(n: int):\n    return {COUNT}\n"
    "def f(n, m):\n    return torch.meshgrid(count(n), torch.arange(m, dtype=torch.float32))\n",
    "a parameter": f"def mix(t, n):\n    return t @ torch.ones(n)\n{DEF}return mix({COUNT}, n)\n",
    "an attribute": "class M:\n    def __init__(self, n: int):\n"
    f"        self.t = {COUNT}\n        self.w = torch.ones(n, n)\n        self.t = self.t @ self.w\n"
    "def f(n, m):\n    return M(n).t\n",
    "a layer": "class M(torch.nn.Module):\n    def __init__(self, n: int):\n        super().__init__()\n"
    "        self.layer = torch.nn.Linear(n, n)\n        self.layer.to(torch.ones(1).dtype)\n"
    f"        self.t = self.layer({COUNT})\ndef f(n, m):\n    return M(n).t\n",
    "functional": f"{DEF}return torch.nn.functional.linear({COUNT}, torch.ones(m, n))\n",
    "an attribute of another": f"class M:\n    def __init__(self, n: int):\n        self.t = {COUNT}\n"
    f"{DEF}return M(n).t @ torch.ones(n)\n",
    "a property": "class M:\n    @property\n    def t(self):\n"
    "        return torch.arange(3000, dtype=torch.float32)\n"
    f"{DEF}return M().t @ torch.ones(3000)\n",
    "a method of a base": f"class B:\n    def table(self, n: int):\n        return {COUNT}\nclass M(B):\n"
    f"    def f(self, n):\n        return super().table(n) @ torch.ones(n)\n{DEF}return M().f(n)\n",
    "an item": f"{DEF}d = {{}}\n    d['t'] = {COUNT}\n    return d['t'] @ torch.ones(n)\n",
    "in place": f"{DEF}t = {COUNT}\n    t @= torch.ones(n, n)\n    return t\n",
    "a list of layers": f"{DEF}x = {COUNT}\n    for layer in [torch.nn.Linear(n, n)]:\n"
    "        x = layer.to(torch.ones(1).dtype)(x)\n        x = layer(x)\n    return x\n",
    "the default": f"{DEF}return torch.meshgrid(torch.arange(n) / n, torch.linspace(0, 1, m))\n",
    **{
        f"a function: {call}": f"import functools\n{DEF}t, w = {COUNT}, torch.ones(n)\n    return {call}\n"
        for call in (
            "torch.conv1d(t[None, None], torch.ones(1, 1, 3))",
            "torch.layer_norm(t, (n,), w)",
            "torch.prelu(t[None], w)",
            "torch.bilinear(t[None], w[None], torch.ones(1, n, n))",
            "torch.Tensor.dot(t, w)",
            "t.__matmul__(w)",
            "(lambda a, b: a @ b)(t, w)",
            "(torch.matmul if m else torch.dot)(t, w)",
            "functools.partial(torch.matmul, t)(w)",
            "functools.reduce(torch.matmul, [t, torch.ones(n, n)])",
            "list(map(torch.dot, [t], [w]))",
            "list(map(lambda a: a @ w, [t]))",
            "torch.vmap(torch.dot)(t[None], w[None])",
            "torch.nn.Linear(n, n).to(w.dtype)(t)",
            "torch.allclose(t, w)",
            "t.allclose(w)",
            "w.isclose(t)",
        )
    },
    "a variable that holds a function": f"{DEF}product = lambda a: a @ torch.ones(n)\n"
    f"    return product({COUNT})\n",
    "a parameter that holds a function": f"def apply(g, *a):\n    return g(*a)\n"
    f"{DEF}return apply(torch.dot, {COUNT}, torch.ones(n))\n",
    "one of two functions": f"{DEF}g = torch.mul\n    if m:\n        g = torch.dot\n"
    f"    return g({COUNT}, torch.ones(n))\n",
    **{
        f"an inherited layer: {layer}": "class B:\n    def __init__(self, n: int):\n"
        "        setattr(self, 'proj', torch.nn.Linear(n, n).to(torch.ones(1).dtype))\n"
        f"class M(B):\n    def f(self, n: int):\n        return {layer}({COUNT})\n"
        f"{DEF}return M(n).f(n)\n"
        for layer in ("self.proj", "getattr(self, 'proj')", "self.proj.forward")
    },
    **{
        f"one object of several classes: {head}": f"class B:\n    def __init__(self, n: int):\n"
        f"        self.t, self.w = {COUNT}, torch.ones(n)\n{head}\n"
        f"    def f(self):\n        return self.t @ self.w\n{foot}{DEF}return M(n).f()\n"
        for head, foot in (
            ("class A:", "class M(B, A):\n    pass\n"),
            ("C = B\nclass M(C):", ""),
            ("from typing import Generic, TypeVar\nT = TypeVar('T')\nclass M(B, Generic[T]):", ""),
            ("class M(type('D', (B,), {})):", ""),
            ("class A:", "class M(B):\n    f = A.f\n"),
        )
    },
    **{
        f"a method of several classes: {head}": "class B:\n    def t(self, n: int):\n"
        f"        return {COUNT}\n{head}\n    def f(self, n):\n"
        f"        return self.{name}(n) @ torch.ones(n)\n{foot}{DEF}return M().f(n)\n"
        for head, name, foot in (
            ("class A:", "t", "class M(B, A):\n    pass\n"),
            ("    s = t\nclass M(B):", "s", ""),
        )
    },
    "a property of several classes": f"class B:\n    n = 4\n    @property\n    def t(self):\n"
    "        return torch.arange(4, dtype=torch.float32)\n    @t.setter\n    def t(self, t):\n        pass\n"
    f"class A:\n    def f(self, n):\n        return self.t @ torch.ones(n)\nclass M(B, A):\n    pass\n"
    f"{DEF}return M().f(n)\n",
    **{
        f"a method of a derived class: {body}": "class B:\n    def __init__(self, n: int):\n"
        f"        self.t = self.put({COUNT})\n    def put(self, t):\n        return t\n"
        f"class M(B):\n    {body}\n{DEF}return M(n).t\n"
        for body in ("def put(self, t): return t @ torch.ones(4)", "put = lambda _, t: t @ torch.ones(4)")
    },
    **{
        f"a constructor of a base: {base}": "class B:\n    def __init__(self, t):\n"
        f"        self.t = t @ torch.ones(4)\n{name}class M({base}):\n    def __init__(self, n: int):\n"
        f"        super().__init__({COUNT})\n{DEF}return M(n).t\n"
        for base, name in (("B", ""), ("C", "C = B\n"))
    },
    "an item by a tuple": f"{DEF}d = {{}}\n    d[n, m] = {COUNT}\n    return d[n, m] @ torch.ones(n)\n",
    "items by a slice": f"{DEF}d = [n]\n    d[0:1] = [{COUNT}]\n    return d[0] @ torch.ones(n)\n",
    **{
        f"items by {index}": f"{DEF}x = next(iter([torch.zeros(n)]))\n    i = torch.arange(n)\n"
        f"    x[{index}] = {COUNT}\n    return x\n"
        for index in ("i", "x == 0", "~(x > 0)")
    },
    "items of the default dtype": f"{DEF}x = torch.zeros(n, dtype=torch.get_default_dtype())\n"
    f"    x[torch.arange(n)] = {COUNT}\n    return x\n",
}
OWN = "class M(torch.nn.Module):\n    def __init__(self, n: int):\n        super().__init__()\n"
NOT_FOLLOWED = {
    **{
        f"a function: {call}": f"import operator\n{DEF}t, w = {COUNT}, torch.ones(n)\n    return {call}\n"
        for call in (
            "operator.matmul(t, w)",
            "[v @ w for v in {'t': t}.values()]",
            "[a @ b for a, b in zip([t], [w])]",
            "{}.setdefault('t', t) @ w",
            "[v @ w for v in dict(t=t).values()]",
            "[v @ w for v, *_ in [(t, m, m)]]",
        )
    },
    **{
        f"a buffer: {read}": f"{OWN}        self.register_buffer({name}, {COUNT})\n"
        f"    def forward(self, x):\n        return x @ {read}\n{DEF}return M(n)(torch.ones(2, n))\n"
        for name, read in (
            ("'w'", "getattr(self, 'w')"),
            ("'w'", "self.get_buffer('w')"),
            ("'w'", "self._buffers['w']"),
            ("f'w_{n}'", "getattr(self, 'w_4')"),
        )
    },
    **{
        f"an attribute: {put}": f"{OWN}        {put}\n    def forward(self, x):\n        return x @ self.w\n"
        f"{DEF}return M(n)(torch.ones(2, n))\n"
        for put in (f"setattr(self, 'w', {COUNT})", f"self.__dict__['w'] = {COUNT}")
    },
    **{
        f"what another holds: {put}": f"{DEF}layer, x = torch.nn.Linear(n, n), torch.ones(n)\n"
        f"    layer.to(x.dtype)\n    {put}\n    return layer(x) @ x\n"
        for put in (
            f"x.data = {COUNT}",
            f"layer.bias.data = {COUNT}",
            f"layer.bias = torch.nn.Parameter({COUNT})",
            f"t = {COUNT}\n    layer.register_forward_pre_hook(lambda m, a: (a[0] + t,))",
        )
    },
    "a default": f"{DEF}def g(t={COUNT}):\n        return t @ torch.ones(n)\n    return g()\n",
    "a generator": f"def g(n: int):\n    yield {COUNT}\n{DEF}return next(g(n)) @ torch.ones(n)\n",
    "a delegated generator": f"def g(n: int):\n    yield from [{COUNT}]\n"
    f"{DEF}a, = g(n)\n    return a @ torch.ones(n)\n",
    "a context": "from contextlib import contextmanager\n@contextmanager\n"
    f"def g(n: int):\n    yield {COUNT}\n"
    f"{DEF}with g(n) as t:\n        return t @ torch.ones(n)\n",
    "a pattern": f"{DEF}match [{COUNT}, 1]:\n        case [t, _]:\n            return t @ torch.ones(n)\n",
    "a decorator": "def deco(g):\n    return lambda n, m: g(n, m) @ torch.ones(n)\n@deco\n"
    f"{DEF}return {COUNT}\n",
    **{
        f"a method: {call}": f"class K:\n{how}    def {name}(self, n: int):\n        return {COUNT}\n"
        f"{DEF}return {call} @ torch.ones(n)\n"
        for call, name, how in (
            ("K.g(K(), n)", "g", ""),
            ("K()(n)", "__call__", ""),
            ("K()[n]", "__getitem__", ""),
            ("(K() * n)", "__mul__", ""),
        )
    },
    **{
        f"a module's result: {net}": f"class P(torch.nn.Module):\n    def __init__(self, n: int):\n"
        f"        super().__init__()\n        self.register_buffer('pe', {COUNT})\n"
        "    def forward(self, x):\n        return x + self.pe\n"
        f"{DEF}layer, x = torch.nn.Linear(n, n), torch.ones(n)\n    layer.to(x.dtype)\n    return {net}\n"
        for net in ("layer(P(n)(x))", "torch.nn.Sequential(P(n), layer)(x)")
    },
    **{
        f"an attribute: {read}": f"import functools\n{OWN}        self.w = {COUNT}\n"
        f"{DEF}{read} @ torch.ones(n)\n"
        for read in (
            "match M(n):\n        case M(w=t):\n            return t",
            "M.__match_args__ = ('w',)\n    match M(n):\n        case M(t):\n            return t",
            "return [*map(getattr, [M(n)], ['w'])][0]",
            "return functools.reduce(getattr, ['w'], M(n))",
        )
    },
    **{
        f"a function by its name: {call}": f"def count(n: int):\n    return {COUNT}\n"
        f"{DEF}return {call}(n) @ torch.ones(n)\n"
        for call in ("globals()['count']",)
    },
    **{
        f"an object: {use}": f"class K(list):\n    def {name}(self, *a):\n"
        "        kept.append(a[-1] @ torch.ones(4))\n"
        f"{DEF}global kept\n    kept, k, t = [], K(), {COUNT}\n    {use}\n    return kept[0]\n"
        for use, name in (
            ("k + t", "__add__"),
            ("k < t", "__lt__"),
            ("t in k", "__contains__"),
            ("k[t]", "__getitem__"),
            ("k.append(t)", "append"),
            ("k[0] = t", "__setitem__"),
        )
    },
    **{
        f"a class that sets: {how}": f"class K:\n    def __init__(self, n: int):\n"
        f"        self.w = {COUNT}\n    {how}\n"
        "        self.__class__.kept = v @ torch.ones(4)\n"
        f"{DEF}return K(n).kept\n"
        for how in (
            "def __setattr__(self, k, v):",
            "w = property()\n    @w.setter\n    def w(self, v):",
        )
    },
    "a key": f"{DEF}return max([{COUNT}], key=lambda t: t @ torch.ones(n))\n",
    "a type that is compared": f"{DEF}t, w = {COUNT}, torch.ones(n)\n    if t.type() != w.type():\n"
    "        raise RuntimeError\n    return t\n",
    "bits": f"{DEF}t, w = {COUNT}, torch.ones(n)\n    t.view(torch.uint8).numel() == w.nbytes or 1 / 0\n"
    "    return t\n",
    "dtypes that are compared": f"{DEF}t, w = {COUNT}, torch.ones(n)\n    if t.dtype != w.dtype:\n"
    "        raise RuntimeError\n    return t\n",
}
INTS = DEF.replace("m)", "m: int)")
TOGETHER = {
    "meshgrid": f"{INTS}return torch.meshgrid({COUNT}, torch.arange(m, dtype=torch.float32))\n",
    "a list": f"{INTS}g = [{COUNT}]\n    g.append(torch.arange(0.0, m))\n    return torch.meshgrid(*g)\n",
    "views": f"{INTS}y, x = {COUNT}, torch.arange(m, dtype=torch.float32)\n"
    "    return (y[:, None] + 0.5).exp() @ x.view(1, -1)\n",
    "the default": f"{INTS}return torch.meshgrid(torch.arange(n) / n, torch.arange(m) / m)\n",
    "a table": f"{INTS}x = torch.zeros(n, n)\n    x[0, torch.arange(n)] = {COUNT}\n    return x\n",
}


@contextmanager
def lowered(zero_init: bool, default: bool) -> Iterator[None]:
    """Replace what zero.Init replaces, as it does, and lower the default dtype."""
    with ExitStack() as stack:
        for name in (
            ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn") if zero_init else ()
        ):
            original = getattr(torch, name)
            stack.callback(setattr, torch, name, original)
            wrap = parameters.zero_wrapper_for_fp_tensor_constructor
            setattr(torch, name, wrap(original, torch.bfloat16, None))
        stack.callback(torch.set_default_dtype, torch.float32)
        torch.set_default_dtype(torch.bfloat16 if default else torch.float32)
        yield


def runs(source: str, *how: bool) -> bool:
    names: dict[str, object] = {}
    with lowered(*how):
        exec(f"import torch\n{source}", names)
        try:
            names["f"](4, 4)  # type: ignore[operator]
        except RuntimeError:
            return False
    return True


def fixes(source: str) -> list[Finding]:
    found = analyze(f"import torch\n{source}".encode(), "model.py")
    return [finding for finding in found if finding.fix is not None and finding.fix.safe]


@pytest.mark.parametrize("name", MIXED)
def test_what_meets_a_tensor_that_is_not_fixed_is_not_fixed_either(name: str) -> None:
    source = MIXED[name]
    assert runs(source, False, False)
    assert runs(source, True, True)
    assert not fixes(source)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_goes_where_the_file_does_not_show_what_meets_it_is_not_fixed(name: str) -> None:
    source = NOT_FOLLOWED[name]
    assert runs(source, False, False)
    assert runs(source, True, True)
    assert not fixes(source)


@pytest.mark.parametrize(
    "end",
    ["cos.to(x.dtype), sin.to(dtype=x.dtype)", "(x * cos).type_as(x), x.copy_(sin)", "cos > x, sin.shape"],
)
def test_a_table_that_ends_in_a_cast_is_fixed(end: str) -> None:
    source = (
        f"{OWN}        self.register_buffer('inv_freq', self.frequencies(n), persistent=False)\n"
        f"    @staticmethod\n    def frequencies(n: int):\n        return 1.0 / 9.0 ** ({COUNT} / n)\n"
        "    def forward(self, x, ids):\n        freqs = ids[:, None].float() * self.inv_freq\n"
        f"        cos, sin = freqs.cos(), freqs.sin()\n        return {end}\n"
    )
    assert len(fixes(source)) == 1


@pytest.mark.parametrize("name", TOGETHER)
def test_what_meets_is_one_fix(name: str) -> None:
    source = TOGETHER[name]
    one, other = fixes(source)
    assert one.fix == other.fix or {*one.fix.edits} == {*other.fix.edits}  # type: ignore[union-attr]
    fixed = apply_edits(f"import torch\n{source}".encode(), one.fix.edits).decode()  # type: ignore[union-attr]
    for how in ((False, False), (True, False), (False, True), (True, True)):
        assert runs(fixed, *how)


@pytest.mark.parametrize(
    "line",
    [
        "torch.outer(t, w)", "torch.einsum('i,j->ij', t, w)", "torch.cat([t, w])", "torch.where(t > 1, t, w)",
        "w.copy_(t)", "w.add_(t)", "torch.bucketize(t, w)", "t @ w.float()", "t.to(w.dtype) @ w",
        "torch.ones(t.shape[0]) @ w", "torch.polar(torch.ones_like(t), t)", "t.to(w.device).add(w)",
        "torch.roll(t, m)", "torch.meshgrid(t, torch.linspace(0, 1, n, dtype=torch.float32))",
    ],
)  # fmt: skip
def test_an_operation_that_takes_any_dtypes_asks_for_no_company(line: str) -> None:
    source = f"{DEF}t = {COUNT}\n    w = torch.ones(n)\n    return {line}\n"
    (finding,) = fixes(source)
    fixed = apply_edits(f"import torch\n{source}".encode(), finding.fix.edits).decode()  # type: ignore[union-attr]
    for how in ((False, False), (True, False), (False, True), (True, True)):
        assert runs(fixed, *how) or not runs(source, *how)


@pytest.mark.parametrize("equation", ["i,j->ij", "...i,j->...ij", "i,j->ji", "ai,j->ij"])
def test_autocast_leaves_an_einsum_that_sums_nothing_of_both_sides(equation: str) -> None:
    t, w = torch.tensor([0.0, 257.0, 4097.0]), torch.tensor([1.0, 0.73, 0.0123])
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.einsum(equation, t[None] if equation.startswith("a") else t, w)
    outer = t[:, None] * w
    assert torch.equal(product, outer.T if equation.endswith("ji") else outer)


def asks_for_one_dtype(function: Callable[..., object], *given: object) -> bool:
    try:
        function(*given)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return "same dtype" in str(error) or "scalar type" in str(error)
    return False


def test_torch_asks_for_one_dtype_in_no_function_that_takes_any() -> None:
    low, high = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    functions = [getattr(of, name, None) for name in sorted(ANY_DTYPES) for of in (torch, torch.Tensor)]
    for one in filter(callable, functions):
        for given in ((low, high), (high, low), (low, high, high), ((low, high),)):
            assert not asks_for_one_dtype(one, *given), one


def test_a_line_that_a_comment_keeps_keeps_what_it_meets(project: Path, scan) -> None:
    source = (
        "import torch\ndef f(n: int, m: int):\n    y = torch.arange(n, dtype=torch.float32)\n"
        "    x = torch.arange(m, dtype=torch.float32)  # noqa: SR001\n    return torch.meshgrid(y, x)\n"
    )
    (project / "a.py").write_text(source)
    result = scan("a.py", "--fix", "--format", "json")
    assert (project / "a.py").read_text() == source
    assert len(json.loads(result.stdout)["findings"]) == 1
    (project / "a.py").write_text(source.replace("  # noqa: SR001", ""))
    scan("a.py", "--fix")
    assert (project / "a.py").read_text().count("torch.int64") == 2
