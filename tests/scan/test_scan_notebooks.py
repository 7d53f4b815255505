from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
from scan_examples import CALL

CELLS = [
    ["# Title\n", "import torch"],
    ["%matplotlib inline\n", "!pip install x\n", "files = !ls\n", "torch.arange?\n", "import torch"],
    ["def f(max_positions: int):\n", f"    é = '\"日本', {CALL}\n", "    return é"],
]


def _notebook(*cells: Any, indent: int | None = 1, ascii_only: bool = False, **metadata: Any) -> str:
    """Return a notebook whose first cell is text and whose others are code."""
    listed = [
        {"cell_type": "code" if number else "markdown", "metadata": {}, "source": source, "outputs": []}
        for number, source in enumerate(cells)
    ]
    document = {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=indent, ensure_ascii=ascii_only) + "\n"


def test_a_finding_is_placed_in_the_file_and_says_its_cell(project: Path, findings) -> None:
    text = _notebook(*CELLS)
    (project / "n.ipynb").write_text(text, encoding="utf-8")
    (found,) = findings(".")
    lines = text.splitlines()
    number = next(index for index, line in enumerate(lines, 1) if "arange(max" in line)
    start = lines[number - 1].index("torch.arange(") + 1
    place = [found[key] for key in ("line", "column", "end_line", "end_column")]
    assert place == [number, start, number, start + len(CALL)]
    assert found["message"].endswith("(code cell 2, line 2)")


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_fix_changes_its_characters_and_nothing_else(
    project: Path, scan, indent: int | None, ascii_only: bool, joined: bool, bom: bytes
) -> None:
    cells = ["".join(cell) for cell in CELLS] if joined else CELLS
    before = bom + _notebook(*cells, indent=indent, ascii_only=ascii_only).encode()
    (project / "n.ipynb").write_bytes(before)
    assert scan("n.ipynb", "--fix", "--select", "SR001").exit_code == 0
    after = (project / "n.ipynb").read_bytes()
    assert after == before.replace(b"dtype=torch.float32)", b"dtype=torch.int64).to(torch.float32)")
    assert after != before


def test_a_call_over_several_lines_is_fixed_in_its_lines(project: Path, scan) -> None:
    call = [
        "def f(n: int):\n",
        "    return torch.arange(\n",
        "        n,\n",
        "        dtype=torch.float32,\n",
        "    )",
    ]
    (project / "n.ipynb").write_text(_notebook([], ["import torch"], call))
    assert scan("n.ipynb", "--fix", "--select", "SR001").exit_code == 0
    source = json.loads((project / "n.ipynb").read_text())["cells"][2]["source"]
    assert source == [*call[:3], "        dtype=torch.int64,\n", "    ).to(torch.float32)"]


def test_names_of_one_cell_count_in_the_next(project: Path, findings) -> None:
    cells = ([], ["import torch as th"], ["def f(n: int):\n", "    return th.arange(n, dtype=th.float32)"])
    (project / "n.ipynb").write_text(_notebook(*cells))
    assert len(findings("n.ipynb")) == 1


@pytest.mark.parametrize("indent", [None, 1])
def test_a_comment_silences_its_statement_only(project: Path, findings, indent: int | None) -> None:
    cell = ["def f(n: int):\n", "    a = torch.arange(n, dtype=torch.float32)  # noqa: SR001 small\n"]
    cell += ["    b = torch.arange(n, dtype=torch.float32)"]
    (project / "n.ipynb").write_text(_notebook([], ["import torch"], cell, indent=indent))
    (found,) = findings("n.ipynb")
    assert "line 3" in found["message"]


def test_a_cell_that_is_not_python_does_not_hide_the_others(project: Path, scan) -> None:
    bash = ["%%bash\n", "for f in *; do echo $f; done"]
    timed = ["%%time\n", "def g(n: int): return torch.arange(n, dtype=torch.float32)"]
    (project / "n.ipynb").write_text(_notebook([], ["import torch"], bash, ["def broken(:"], timed))
    result = scan("n.ipynb", "--format", "json", "--select", "SR001")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert len(document["findings"]) == 1
    (error,) = document["errors"]
    assert error["message"].startswith("code cell 3: syntax error")
    assert f"read by Python {platform.python_version()}; newer syntax needs a newer one" in error["message"]
    assert error["line"] > 1


def test_a_fix_beside_a_cell_that_was_not_read_is_unsafe(project: Path, scan) -> None:
    counts = ["def g(n: int): return torch.arange(n, dtype=torch.float32)"]
    for others, is_safe in (["x = 1"], True), (["x = g(4.5) :"], False):
        (project / "n.ipynb").write_text(_notebook([], ["import torch"], others, counts))
        (found,) = json.loads(scan("n.ipynb", "--format", "json").stdout)["findings"]
        assert found["fix"]["safe"] is is_safe


@pytest.mark.parametrize(
    ("magic", "is_safe"),
    [
        ("%matplotlib inline\n%load_ext autoreload\n!pip install x > y\nfiles = !ls {path}", True),
        ("%%writefile g.py\ng(4.5)", True),
        ("%%time\nx = g(4)", True),
        ("%run other.py", False),
        ("%time x = g(4.5)", False),
        ("x = %timeit -o g(4.5)", False),
        ("%%timeit -n1 x = g(4.5)\ny = 1", False),
        ("%%px\nx = g(4.5)", False),
        ("!echo {g(4.5)}", False),
    ],
)
def test_a_fix_beside_a_magic_that_may_run_code_is_unsafe(
    project: Path, scan, magic: str, is_safe: bool
) -> None:
    counts = ["def g(n: int): return torch.arange(n, dtype=torch.float32)"]
    (project / "n.ipynb").write_text(_notebook([], ["import torch"], magic, counts))
    (found,) = json.loads(scan("n.ipynb", "--format", "json").stdout)["findings"]
    assert found["fix"]["safe"] is is_safe


@pytest.mark.parametrize(
    "lines",
    [
        "s = ('%s'\n     % 3)",
        "t = [\n  7  # ([\n  % 4, '(',\n]",
        "s = '''it's\n%d items \\''' %\n!bang'''",
        's = """a\n % "\n%s"""',
        "t = 7 \\\n  % 4",
        "files = {}\nfiles['a'] = !ls 'b='",
    ],
)
def test_only_what_begins_a_statement_is_a_magic(project: Path, findings, lines: str) -> None:
    counts = "def g(n: int): return torch.arange(n, dtype=torch.float32)"
    cell = f"!echo it's\n%matplotlib inline\n{lines}\n{counts}"
    (project / "n.ipynb").write_text(_notebook([], ["import torch"], cell))
    (found,) = findings("n.ipynb")
    assert found["fix"]["safe"]


def test_a_notebook_of_another_language_has_no_findings(project: Path, scan) -> None:
    text = _notebook(*CELLS, language_info={"name": "julia"})
    (project / "n.ipynb").write_text(text)
    assert scan("n.ipynb").exit_code == 0


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"cells": 3}', '{"worksheets": []}', "[" * 100_000, '{"cells": [1, {}]}x', "\xff"],
)
def test_what_is_no_notebook_is_one_diagnostic(project: Path, scan, content: str) -> None:
    (project / "n.ipynb").write_bytes(content.encode("latin-1"))
    result = scan("n.ipynb", "-q")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: n.ipynb: not a notebook")


def test_strange_cells_are_passed_over(project: Path, scan) -> None:
    cells: list[Any] = [1, None, {}, {"cell_type": "code"}, {"cell_type": "code", "source": [1, None, ""]}]
    cells += [{"cell_type": "code", "source": "x = '\ud800'\n"}]
    (project / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert scan("n.ipynb").exit_code == 0


def test_the_diff_of_a_notebook_is_of_its_file(project: Path, scan) -> None:
    (project / "n.ipynb").write_text(_notebook(*CELLS), encoding="utf-8")
    lines = scan("n.ipynb", "--diff", "--select", "SR001").stdout.splitlines()
    assert sum(line.startswith("+") for line in lines) == 2
    assert '+    "    é = ' in "\n".join(lines)
