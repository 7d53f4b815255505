"""Each rule against the examples in its own file. Needs no torch."""

from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from safe_rope.scan.engine.finding import Finding, apply_edits
from safe_rope.scan.rules import RULES
from safe_rope.scan.run.analyze import SourceError, analyze, generated_from

ROOT = Path(__file__).resolve().parents[2]
VALID = [(rule.id, source) for rule in RULES.values() for source in rule.VALID]
INVALID = [(rule.id, source) for rule in RULES.values() for source in rule.INVALID]


def scan(source: str, rule: str | None = None, path: str = "model.py") -> list[Finding]:
    return analyze(source.encode(), path, None if rule is None else [rule])


@pytest.mark.parametrize(("rule", "source"), VALID)
def test_a_valid_example_has_no_finding(rule: str, source: str) -> None:
    assert scan(source, rule) == []


@pytest.mark.parametrize(("rule", "source"), INVALID)
def test_an_invalid_example_has_a_finding_of_its_rule(rule: str, source: str) -> None:
    assert {finding.rule for finding in scan(source, rule)} == {rule}


@pytest.mark.parametrize(("rule", "source"), VALID + INVALID)
def test_examples_are_source(rule: str, source: str) -> None:
    ast.parse(source)


@pytest.mark.parametrize(("rule", "source"), INVALID)
def test_a_fixed_example_parses_and_has_nothing_fixable_left(rule: str, source: str) -> None:
    before = source.encode()
    edits = {edit for found in analyze(before, "model.py", [rule]) if found.fix for edit in found.fix.edits}
    after = apply_edits(before, edits)
    ast.parse(after)
    assert [found for found in analyze(after, "model.py", [rule]) if found.fix is not None] == []


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_rule_explains_itself(rule: object) -> None:
    for text in (rule.name, rule.summary, rule.explanation):  # type: ignore[attr-defined]
        assert text
    assert rule.VALID  # type: ignore[attr-defined]
    assert rule.INVALID  # type: ignore[attr-defined]


def test_there_are_thirteen_rules_in_order() -> None:
    assert list(RULES) == [f"SR{number:03}" for number in range(1, 14)]


def test_messages_say_what_a_value_becomes() -> None:
    (position,) = scan("import torch\nt = torch.arange(4097, dtype=torch.float32)[None]\n", "SR001")
    assert "257 rounds to 256 in bfloat16" in position.message
    (last,) = scan("import torch\nt = torch.arange(1002, dtype=torch.float32)[None]\n", "SR001")
    assert "1,001 rounds to 1,000 in bfloat16" in last.message
    (factor,) = scan("import torch\ndef rope_init():\n    factor = torch.tensor(1.3)\n", "SR012")
    assert "makes 1.3 1.29688" in factor.message
    (factor,) = scan("import torch\ndef rope_init(c):\n    factor = torch.tensor(c.factor)\n", "SR012")
    assert not re.search(r"\d\.\d", factor.message)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("torch.arange(0, 1 - 1e-6, 1 / n)", "fractions keep 8 bits in bfloat16"),
        ("torch.arange(0, 1, 1 / n, dtype=torch.float16)", "fractions keep 11 bits in float16"),
        ("torch.arange(0.0, 3000, 2.0)", "2,998 rounds to 2,992 in bfloat16"),
        ("torch.arange(0.0, 3000, 0.5)", "2,999.5 rounds to 2,992 in bfloat16"),
        ("torch.arange(0.0, 2e6, 0.5)", "1,999,999.5 rounds to 1,998,848 in bfloat16"),
        ("torch.arange(0.0, 1.0, 1e-320)", "fractions keep 8 bits in bfloat16"),
    ],
)
def test_a_message_names_no_number_that_the_table_cannot_hold(call: str, says: str) -> None:
    (found,) = scan(f"import torch\ndef f(n):\n    return {call}\n")
    assert says in found.message


def test_a_long_sum_of_means_is_no_deep_search() -> None:
    source = "import torch\ndef pos_embed(n, x):\n    pe = torch.zeros(n)\n    pe[0] = "
    source += "x.mean() + " * 400 + "torch.arange(n)\n    return pe\n"
    assert [finding.rule for finding in scan(source, "SR013")] == ["SR013"]


@pytest.mark.parametrize(("base", "dimension"), [(10000.0, 128), (500000, 64), (100.0, 32)])
def test_messages_have_the_numbers_of_the_code(base: float, dimension: int) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.arange(0, dimension, 2)
    low = 1.0 / (base ** (counts.bfloat16() / dimension))
    off = (low.double() - base ** (-counts.double() / dimension)).abs().max().item() * 4095
    grid = "torch.arange(0, d, 2, dtype=torch.float32) / d"
    code = f"import torch\nbase, d = {{}}, {{}}\nf = 1.0 / (base ** ({grid}))\n"
    (known,) = scan(code.format(base, dimension), "SR001")
    assert f", {off:.0f} rad at position 4,095" in known.message
    for unknown in (
        code.format("c.base", dimension),
        code.format(base, "c.d"),
        code.replace("base **", "b **"),
    ):
        (finding,) = scan(unknown.format(base, dimension), "SR001")
        assert "8 bits" in finding.message
        assert " rad" not in finding.message


def test_a_class_is_told_once_of_its_inverse_frequencies() -> None:
    one = "class {}(torch.nn.Module):\n    def __init__(self, a):\n"
    body = "        self.register_buffer('inv_freq', a)\n        self.register_buffer('other_inv_freq', a)\n"
    found = scan("import torch\n" + one.format("A") + body + one.format("B") + body, "SR008")
    assert [finding.line for finding in found] == [4, 8]


def test_a_class_that_may_learn_its_inverse_frequencies_is_told_of_the_buffer() -> None:
    head = "import torch\nclass A(torch.nn.Module):\n    def __init__(self, inv_freq, learned):\n"
    learned = "        if learned:\n            self.inv_freq = torch.nn.Parameter(inv_freq)\n"
    kept = "        if not learned:\n            self.register_buffer('inv_freq', inv_freq)\n"
    for body, line in ((learned + kept, 7), (kept + learned, 5)):
        (finding,) = scan(head + body, "SR008")
        assert (finding.line, finding.severity) == (line, "warning")


def test_severity_follows_the_place_of_the_call() -> None:
    call = "torch.arange(n, dtype=torch.float32)"
    for head, severity in (
        ("def __init__(self, n)", "error"),
        ("def build_rope_cache(n)", "error"),
        ("def forward(self, n)", "note"),
    ):
        (finding,) = scan(f"import torch\n{head}:\n    t = {call}\n", "SR001")
        assert finding.severity == severity
    source = f"import torch\ndef __init__(self, n):\n    t = {call}\n"
    (finding,) = scan(source, "SR001", "models/convert_checkpoint_to_hf.py")
    assert finding.severity == "note"
    (finding,) = scan("import torch\ndef forward(self, x, n):\n    return torch.arange(n, dtype=x.dtype)\n")
    assert (finding.rule, finding.severity) == ("SR002", "error")


@pytest.mark.parametrize(
    ("head", "call", "severity"),
    [
        ("from torch import arange", "arange(n, dtype=torch.float32)", "warning"),
        ("from torch import *", "arange(n, dtype=torch.float32)", "warning"),
        ("arange = torch.arange", "arange(n, dtype=torch.float32)", "warning"),
        ("@torch.jit.script", "torch.arange(n, dtype=torch.float32)", "warning"),
        ("from torch import arange", "arange(n, dtype=torch.bfloat16)", "error"),
        ("import torch", "torch.arange(n, dtype=torch.float32)", "error"),
        ("", "from torch import arange; t = arange(n, dtype=torch.float32)", "error"),
    ],
)
def test_what_a_module_holds_since_its_import_is_a_warning(head: str, call: str, severity: str) -> None:
    statement = call if "import" in call else f"t = {call}"
    source = f"import torch\n{head}\ndef rope_positions(n: int):\n    {statement}\n    return t\n"
    (finding,) = scan(source, "SR001")
    assert finding.severity == severity
    assert ("module is imported" in finding.message) == (severity == "warning")


@pytest.mark.parametrize(
    ("statement", "severity"),
    [
        ("POSITIONS = {}", "warning"),
        ("class RotaryEmbedding(torch.nn.Module):\n    positions = {}", "warning"),
        ("rope = lambda: torch.outer({}, inv_freq).cos()", "error"),
        ("with zero.Init():\n    positions = {}", "error"),
        ("def rope(n):\n    class Rotary:\n        positions = {}\n    return Rotary", "error"),
        ("class Rotary(torch.nn.Module):\n    def __init__(self):\n        positions = {}", "error"),
    ],
)
def test_what_the_import_itself_calls_is_a_warning(statement: str, severity: str) -> None:
    call = "torch.arange(2048, dtype=torch.float32)"
    (finding,) = scan(f"import torch\n{statement.format(call)}\n", "SR001")
    assert finding.severity == severity
    assert ("module is imported" in finding.message) == (severity == "warning")


@pytest.mark.parametrize(("dtype", "severity"), [(", dtype=torch.float32", "warning"), ("", "error")])
def test_powers_that_the_import_itself_lists_are_a_warning(dtype: str, severity: str) -> None:
    powers = f"torch.tensor([1e4 ** (-i / 64) for i in range(0, 64, 2)]{dtype})"
    (finding,) = scan(f"import torch\nINV_FREQ = {powers}\n", "SR012")
    assert finding.severity == severity
    assert ("module is imported" in finding.message) == (severity == "warning")


@pytest.mark.parametrize(
    ("written", "severity"),
    [
        ("torch.arange(n)", "error"),
        ("torch.arange(n).float() / 2", "error"),
        ("torch.sin(torch.arange(n) * f)", "note"),
        ("torch.rand(n)", None),
    ],
)
def test_what_is_written_into_a_table_decides(written: str, severity: str | None) -> None:
    head = "import torch\nclass {}(torch.nn.Module):\n    def __init__(self, n: int, f):\n"
    source = head + f"        x = torch.zeros(n, 2)\n        x[:, 0] = {written}\n        self.x = x\n"
    found = scan(source.format("PositionalEncoding"), "SR013")
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    elsewhere = [finding.severity for finding in scan(source.format("Camera"), "SR013")]
    assert elsewhere == (["note"] if severity == "error" else [])


def test_powers_that_are_no_frequencies_are_not_called_so() -> None:
    head = "import torch\nclass M(torch.nn.Module):\n    def __init__(self, n: int):\n"
    code = "        x = (torch.arange(2**n) // 2 ** torch.arange(n)[:, None] % 2).float()\n"
    keep = "        self.register_buffer('codes', x)\n"
    assert scan(head + code + keep, "SR008") == []
    code = "        x = torch.exp(torch.linspace(0.0, 4.0, n))\n"
    (finding,) = scan(head + code + keep, "SR008")
    assert (finding.severity, "powers of a grid" in finding.message) == ("note", True)


@pytest.mark.parametrize(
    ("callers", "severity"),
    [
        ("class M(Module):\n    def __init__(self):\n        self.t = table(9999)\n", "error"),
        ("class M(Module):\n    def forward(self, x):\n        return table(9999)\n", "note"),
        ("class M(Module):\n    def __init__(self):\n        self.t = table(9)\n    def forward(self):\n"
         "        return table(9999)\n", "error"),
        ("def f(n):\n    return table(n)\n"
         "class M(Module):\n    def __init__(self):\n        f(9)\n", "error"),
        ("class Loss:\n    def __init__(self):\n        self.t = table(9999)\n", "note"),
        ("class Table:\n    def __init__(self):\n        self.t = table(9999)\n"
         "class M(Module):\n    def __init__(self):\n        self.table = Table()\n", "error"),
        ("if __name__ == '__main__':\n    table(9999)\n", "note"),
        ("", "note"),
    ],
)  # fmt: skip
def test_who_calls_a_function_decides_its_severity(callers: str, severity: str) -> None:
    body = "(n: int):\n    return torch.arange(n, dtype=torch.float32)\n"
    (finding,) = scan(f"import torch\ndef table{body}{callers}", "SR001")
    assert finding.severity == severity
    if callers:
        (finding,) = scan(
            f"import torch\ndef build_rope{body}{callers}".replace("table(", "build_rope("), "SR001"
        )
        assert finding.severity == severity


def test_what_rounds_no_more_than_what_follows_is_a_note() -> None:
    cast = "import torch\nclass Rotary(torch.nn.Module):\n    def f(self, x, n):\n        return {}\n"
    for code, severity in (
        ("x * torch.arange(n).to(x)", "note"),
        ("torch.arange(n).to(x).view(1, -1) * x.log()", "note"),
        ("torch.arange(n).to(x)", "warning"),
        ("x.shape[0] * torch.arange(n).to(x.dtype)", "warning"),
    ):
        (finding,) = scan(cast.format(code), "SR005")
        assert finding.severity == severity, code
    for code, severity in (
        ("torch.arange(n) / n", "note"),
        ("2 ** (torch.arange(n) / n)", "warning"),
        ("torch.arange(n) / 2", "warning"),
    ):
        (finding,) = scan(f"import torch\npos_embed = {code}\n", "SR004")
        assert finding.severity == severity, code


def test_a_value_that_some_branches_know_is_followed() -> None:
    source = (
        "import torch\nclass R(torch.nn.Module):\n    def __init__(self, dim, custom):\n"
        "        if custom is not None:\n            freqs = custom\n"
        "        else:\n            freqs = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))\n"
        "        self.freqs = torch.nn.Parameter(freqs, requires_grad=False)\n"
    )
    assert [finding.rule for finding in scan(source)] == ["SR008"]
    source = (
        "import torch\nclass R(torch.nn.Module):\n"
        "    def path(self, duration: torch.Tensor):\n        return torch.cumsum(duration, -1)\n"
        "    def forward(self, log):\n        return self.path(torch.ceil(torch.exp(log)))\n"
    )
    assert [finding.rule for finding in scan(source)] == ["SR007"]


def test_where_a_learned_parameter_starts_is_a_note() -> None:
    source = (
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def __init__(self, n: int):\n"
        "        A = torch.arange(1, n + 1, dtype=torch.float32)[None, :].expand(8, -1)\n"
        "        self.A_log = nn.Parameter(torch.log(A))\n"
    )
    (finding,) = scan(source, "SR001")
    assert finding.severity == "note"
    (finding,) = scan(source.replace("torch.log(A)", "A, requires_grad=False"), "SR001")
    assert finding.severity == "error"
    buffer = "        if n < 9:\n            self.register_buffer('A', A)\n        else:\n    "
    (finding,) = scan(source.replace("        self.A_log", f"{buffer}        self.A_log"), "SR001")
    assert finding.severity == "error"


def test_positions_count_characters_from_one() -> None:
    (finding,) = scan("import torch\nx = ['é'], torch.arange(9999, dtype=torch.float32)\n")
    assert (finding.line, finding.column, finding.end_line, finding.end_column) == (2, 12, 2, 51)


def test_every_line_ending_and_encoding_gives_the_same_finding_and_exact_edits() -> None:
    source = "import torch\r\n# é\r\nt = torch.arange(len(x), dtype=torch.float32)\r\n"
    fixed = "import torch\r\n# é\r\nt = torch.arange(len(x), dtype=torch.int64).to(torch.float32)\r\n"
    latin = "# -*- coding: latin-1 -*-\n"
    for prefix, encoding in (("", "utf-8"), ("", "utf-8-sig"), (latin, "latin-1")):
        data = (prefix + source).encode(encoding)
        (finding,) = analyze(data, "model.py")
        assert finding.fix is not None
        assert apply_edits(data, finding.fix.edits) == (prefix + fixed).encode(encoding)


@pytest.mark.parametrize(
    "data",
    [b"import torch\nx = torch.arange(\n", b"# coding: nonsense\n", b"\xff\xfe", b"x = '\0'\n", b"(" * 9999],
    ids=["syntax", "codec", "bytes", "null", "depth"],
)
def test_source_that_does_not_parse_gives_one_error_with_its_place(data: bytes) -> None:
    data = data if len(data) < 512 else b"import torch\ntorch.arange(9, dtype=torch.float)\n" + data
    with pytest.raises(SourceError) as raised:
        analyze(data, "broken.py")
    if data.endswith(b"arange(\n"):
        told = f"read by Python {platform.python_version()}; newer syntax needs a newer one"
        assert told in raised.value.diagnostic.message
    assert raised.value.diagnostic.path == "broken.py"
    assert raised.value.diagnostic.line >= 1
    assert raised.value.diagnostic.column >= 1


def test_a_large_file_gives_what_its_functions_give_alone() -> None:
    body = "".join(
        f"class C{n}:\n    '''Text.\nclass no: pass\n'''\n    def f{n}(self, x):\n        return x\n\n"
        for n in range(99)
    )
    source = (
        f"import torch\n{body}def table(n: int):\n    return torch.arange(n, dtype=torch.float32)\n{body}"
    )
    (finding,) = scan(source)
    assert source.splitlines()[finding.line - 1].endswith("torch.float32)")
    assert finding.fix is not None
    assert finding.fix.safe


def test_a_chain_of_elif_longer_than_the_stack_is_analyzed() -> None:
    chain = "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(2000))
    source = (
        f"import torch\nif x:\n    y = 1\n{chain}else:\n    t = torch.arange(len(x), dtype=torch.float32)\n"
    )
    assert [finding.rule for finding in scan(source)] == ["SR001"]


def test_a_generated_file_names_its_source() -> None:
    header = b"# This file was automatically generated from src/transformers/models/a/modular_a.py.\n"
    assert generated_from(header) == "modular_a.py"
    assert generated_from(b"import torch\n") is None


def test_scanning_imports_neither_torch_nor_anything_outside_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import safe_rope.scan.run.analyze as a;"
        "a.analyze(b'import torch\\nt = torch.arange(9999, dtype=torch.float32)\\n', 'm.py');"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['safe_rope']"


def test_what_runs_as_a_program_is_a_note() -> None:
    source = "import torch\nif __name__ == '__main__':\n    t = torch.arange(9999, dtype=torch.float32)\n"
    (finding,) = scan(source, "SR001")
    assert finding.severity == "note"
