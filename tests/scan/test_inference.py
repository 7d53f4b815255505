"""What the analysis knows of names, numbers and dtypes. Needs no torch."""

from __future__ import annotations

import pytest

from safe_rope.scan.run.analyze import analyze


def found(source: str) -> list[tuple[str, bool | None]]:
    findings = analyze(("import torch\n" + source).encode(), "model.py", ["SR001", "SR002", "SR003"])
    return [(finding.rule, None if finding.fix is None else finding.fix.safe) for finding in findings]


@pytest.mark.parametrize(
    "bound",
    [
        "4096", "len(x)", "x.shape[1]", "x.size(-1)", "x.shape[0] * 2 + 1", "n // 2", "int(n)",
        "math.ceil(n)",
        "max(len(x), 7)", "config.hidden_size // config.num_attention_heads",
        "0.0, 4096.0, 2.0", "0, len(x), 2",
        "2**12",
        "-len(x), len(x)", "round(n)",
    ],
)  # fmt: skip
def test_a_provably_whole_bound_is_fixed_safely(bound: str) -> None:
    assert found(f"t = torch.arange({bound}, dtype=torch.float32)\n") == [("SR001", True)]


@pytest.mark.parametrize(
    "bound", ["0, 1, 0.25", "0.5, 400", "0, 1000.5, 2", "0, 1, 4 / d", "float(n) / 3", "n * 0.5"]
)
def test_fractions_never_become_integers(bound: str) -> None:
    assert found(f"t = torch.arange({bound}, dtype=torch.float32)\n") == [("SR001", None)]


@pytest.mark.parametrize(
    "bound",
    [
        "n", "n + 1", "f(x)", "self.anything", "config.max_position_embeddings",
        "getattr(config, 'head_dim', None) or config.hidden_size",
    ],
)  # fmt: skip
def test_what_is_not_known_to_be_whole_is_fixed_only_on_demand(bound: str) -> None:
    assert found(f"t = torch.arange({bound}, dtype=torch.float32)\n") == [("SR001", False)]


@pytest.mark.parametrize(
    "source",
    [
        "def f(n: int):\n    return torch.arange(n, dtype=torch.float32)\n",
        "def f(x):\n    b, n = x.shape\n    return torch.arange(n, dtype=torch.float32)\n",
        "def f(x):\n    n = x.size(1)\n    n += 2\n    return torch.arange(n, dtype=torch.float32)\n",
        "for n in range(5000):\n    t = torch.arange(n, dtype=torch.float32)\n",
        "class R:\n    def __init__(self, n: int):\n        self.k = n\n"
        "    def f(self):\n        return torch.arange(0, self.k, 2, dtype=torch.float32)\n",
    ],
)
def test_whole_numbers_are_followed_through_variables_and_attributes(source: str) -> None:
    assert found(source) == [("SR001", True)]


@pytest.mark.parametrize(
    "source",
    [
        "def f(n):\n    return torch.arange(min(n, 200), dtype=torch.float32)\nf(len(x))\n",
        "class R:\n    def __init__(self, n=4096):\n"
        "        self.t = torch.arange(n % 200, dtype=torch.float32)\nR(4096)\n",
        "class R:\n    def __init__(self, c):\n        self.k = c.head_dim % 200\n"
        "    def f(self):\n        return torch.arange(0, self.k, dtype=torch.float32)\n",
    ],
)
def test_names_defaults_and_calls_make_a_number_whole_as_far_as_findings_go(source: str) -> None:
    assert found(source) == []
    assert found(source.replace(" % 200", "").replace("min(n, 200)", "n")) == [("SR001", False)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch as th\nt = th.arange(n, dtype=th.float32)\n",
        "from torch import arange\nt = arange(n, dtype=torch.half)\n",
        "from torch import arange as count\nt = count(n, dtype=torch.float32)\n",
        "count = torch.arange\nt = count(n, dtype=torch.float32)\n",
        "import functools\ncount = functools.partial(torch.arange, dtype=torch.float32)\nt = count(n)\n",
        "options = dict(dtype=torch.float32)\nt = torch.arange(n, **options)\n",
        "DTYPE = torch.float32\ndef f(n):\n    return torch.arange(n, dtype=DTYPE)\n",
        "def f(n, dtype=torch.float32):\n    return torch.arange(n, dtype=dtype)\n",
        "def f(n, dtype):\n    return torch.arange(n, dtype=dtype)\nf(4096, torch.float32)\n",
        "from torch import *\nt = arange(n, dtype=torch.float32)\n",
    ],
)
def test_names_and_dtypes_resolve(source: str) -> None:
    assert [rule for rule, _ in found(source)] == ["SR001"]


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as torch\nt = torch.arange(n, dtype=torch.float32)\n",
        "def arange(n, dtype): ...\nt = arange(n, dtype=torch.float32)\n",
        "def f(n, dtype=torch.int64):\n    return torch.arange(n, dtype=dtype)\n",
        "def f(n, dtype):\n    return torch.arange(n, dtype=dtype)\nf(4096, torch.int64)\n",
        "def f(ids, n):\n    dtype, device = ids.dtype, ids.device\n"
        "    return torch.arange(n, dtype=dtype)\n",
        "def f(a, n):\n    m = a.ne(1).long()\n    return torch.arange(n, dtype=m.dtype)\n",
        "t = torch.arange(min(n, 256), dtype=torch.float32)\n",
        "t = torch.arange(n % 100, dtype=torch.float32)\n",
    ],
)
def test_integers_other_libraries_and_bounded_counts_are_not_reported(source: str) -> None:
    assert found(source) == []


def test_a_bounded_grid_of_exponents_is_still_reported() -> None:
    assert found("f = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 96)\n") == [("SR001", True)]


def test_the_last_assignment_that_reaches_a_call_counts() -> None:
    source = "def f(n, x):\n    dtype = torch.int64\n    {}\n    return torch.arange(n, dtype=dtype)\n"
    assert found(source.format("pass")) == []
    assert found(source.format("dtype = torch.float32")) == [("SR001", False)]
    assert found(source.format("if n: dtype = x.dtype")) == [("SR002", False)]
    branches = "def f(n, c):\n    if c:\n        d = torch.float32\n    else:\n        d = torch.int64\n"
    assert found(branches + "        torch.arange(n, dtype=d)\n") == []


def test_an_integer_arange_is_followed_through_variables_to_the_cast() -> None:
    source = (
        "import torch\ndef f(x, n):\n    t = torch.arange(n, device=x.device)\n    t = t.expand(2, -1)\n"
        "    return g(t[..., None].to(x.dtype))\n"
    )
    assert [finding.rule for finding in analyze(source.encode(), "m.py")] == ["SR005"]


def test_all_names_of_torch_are_known_beside_those_of_another_module() -> None:
    source = b"from torch import *\nfrom math import *\nt = arange(9999, dtype=float)\n"
    assert [finding.rule for finding in analyze(source, "model.py")] == ["SR001"]


@pytest.mark.parametrize(
    "dtype",
    [
        "torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype",
        "x.dtype if x.dtype not in [torch.half, torch.bfloat16] else torch.float32",
        "x.dtype if x.dtype == torch.float64 else torch.float32",
        "torch.float32 if x.dtype != torch.float64 else x.dtype",
    ],
)
def test_a_dtype_chosen_because_the_other_is_low_is_not_low(dtype: str) -> None:
    source = f"import torch\ndef forward(self, x, n):\n    pos_emb = torch.arange(n, dtype={dtype})\n"
    (found,) = analyze(source.encode(), "model.py")
    assert (found.rule, found.severity) == ("SR001", "note")


@pytest.mark.parametrize(
    "dtype",
    [
        "torch.float32 if x.dtype == torch.bfloat16 else x.dtype",
        "torch.bfloat16 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype",
        "torch.float32 if y.dtype in (torch.float16, torch.bfloat16) else x.dtype",
        "torch.float32 if x.dtype not in (torch.float16, torch.bfloat16) else x.dtype",
        "x.dtype if x.dtype in (torch.float32, torch.bfloat16) else torch.float32",
    ],
)
def test_a_dtype_that_may_still_be_low_is_followed(dtype: str) -> None:
    source = f"import torch\ndef forward(self, x, y, n):\n    pos_emb = torch.arange(n, dtype={dtype})\n"
    (found,) = analyze(source.encode(), "model.py")
    assert (found.rule, found.severity) == ("SR002", "error")


DTYPES = "DT = {'a': torch.bfloat16, 'b': torch.int64}\n"


def test_a_dtype_of_a_dict_that_nothing_changes_is_known() -> None:
    assert found(DTYPES + "t = torch.arange(4096, dtype=DT['a'])\n")[0][0] == "SR001"
    assert found(DTYPES + "t = torch.arange(4096, dtype=DT['b'])\n") == []


@pytest.mark.parametrize("change", ["DT['a'] = x\n", "DT.update(a=x)\n", "f(DT)\n", "DT = x\n", "DT |= x\n"])
def test_a_dtype_of_a_dict_that_may_change_is_not(change: str) -> None:
    assert found(DTYPES + change + "t = torch.arange(4096, dtype=DT['a'])\n")[0][0] == "SR002"


@pytest.mark.parametrize(
    "bound",
    [str(10**400), f"{10**300} * {10**300}", "1e400", "int(1e400)", str(-(10**400)), f"float({10**400})"],
)
def test_a_number_that_no_float_holds_stops_nothing(bound: str) -> None:
    counts = f"a = {bound} ** torch.arange(9, dtype=torch.float32)\n"
    assert len(found(counts + f"t = torch.arange({bound}, dtype=torch.float32)\n")) == 2


@pytest.mark.parametrize("powers", ["(-1.0) ** {}", "torch.pow(-1, {})", "(-1) ** {} * x", "1.0 ** {}"])
def test_signs_are_no_frequencies(powers: str) -> None:
    def said(count: int) -> list[str]:
        source = f"import torch\ns = {powers.format(f'torch.arange({count}, dtype=torch.float32)')}\n"
        return [finding.message for finding in analyze(source.encode(), "model.py", ["SR001"])]

    assert said(200) == []  # BF16 holds each of them
    (message,) = said(2000)
    assert "1,999 rounds to 2,000" in message
