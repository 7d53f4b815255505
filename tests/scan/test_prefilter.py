"""The byte search only saves time: what it passes over holds no finding. Needs no torch."""

from __future__ import annotations

import textwrap

import pytest

from safe_rope.scan.engine import prefilter
from safe_rope.scan.rules import RULES
from safe_rope.scan.run.analyze import analyze

# So large that functions are left out, and without anything to find.
PADDING = "".join(f"class C{n}:\n    def f{n}(self, x):\n        return x\n\n" for n in range(99))
INVALID = [(rule.id, source) for rule in RULES.values() for source in rule.INVALID]


def rules(source: str) -> set[str]:
    return {finding.rule for finding in analyze(source.encode(), "model.py")}


@pytest.mark.parametrize(("rule", "source"), INVALID)
def test_an_example_is_found_in_a_large_file(rule: str, source: str) -> None:
    assert rule in rules(f"{PADDING}{source}\n{PADDING}")


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("SR001", "t = torch.arange(\n    n,\n    dtype=torch.float32,\n)"),
        ("SR001", "t = torch.arange(\n    n, dtype=(\n        torch.float32\n    ),\n)"),
        ("SR002", "t = torch.arange(\n    n,\n    dtype=x\n    .dtype,\n)"),
        ("SR003", "half = d / 2\nt = torch.arange(half)"),
        ("SR003", "step = 0.5\nt = torch.arange(0, n, step)"),
        ("SR004", "t = torch.arange(0, d, 2)\ny = (\n    t\n    / d\n)"),
        ("SR004", "t = torch.arange(0, d, 2)\ny = (\n    10000.0 **\n    (\n        t / d)\n)"),
        ("SR004", "t = torch.arange(n)\ny = (\n  t[\n  None\n  ]\n  .view(\n  -1\n  )\n  / d\n)"),
        ("SR004", "t = torch.arange(n)\ny = torch.exp(\n    t\n)"),
        ("SR005", "t = torch.arange(n)\ny = (\n    t\n    .to(\n        x.dtype\n    )\n)"),
        ("SR005", "y = position_ids.to(\n    device=x.device,\n    dtype=x.dtype,\n)"),
        ("SR006", "y = torch.linspace(\n    0,\n    n - 1,\n    n,\n)"),
        ("SR007", "m = torch.ones(\n    n,\n)\ny = (\n    m\n    .cumsum(\n        0\n    )\n)"),
        ("SR008", "self.register_buffer(\n    'inv_freq',\n    inv_freq,\n)"),
        ("SR009", "y = slopes.view(\n    n, 1\n).to(\n    torch.bfloat16\n)"),
        ("SR010", "y = torch.mm(\n    t,\n    self.inv_freq,\n)"),
        ("SR010", "y = (\n    inv_freq\n    @ t\n)"),
        ("SR011", "self.register_buffer(\n    'freqs_cos',\n    c,\n)"),
    ],
)  # fmt: skip
def test_a_construct_may_be_spread_over_several_lines(rule: str, body: str) -> None:
    function = "def forward(self, x, t, c, n, d, inv_freq, slopes, position_ids):\n"
    source = "import torch\n\n\nclass Rotary:\n" + textwrap.indent(
        function + textwrap.indent(body, "    ") + "\n    return y\n", "    "
    )
    assert rule in rules(source)
    assert rule in rules(f"{PADDING}{source}\n\n{PADDING}")


def test_what_only_counts_is_passed_over() -> None:
    source = b"import torch\ndef f(n, device):\n    ids = torch.arange(n, device=device)\n    return x[ids]\n"
    assert prefilter.occurrences(source) == []
