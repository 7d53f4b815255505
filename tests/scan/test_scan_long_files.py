"""What a scan of a long file asks grows with the file and not with its square."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_rope.scan.engine.names import Argument, Call, Names
from safe_rope.scan.engine.tree import Tree

FUNCTIONS = """
def f{0}(n: int):
    return torch.arange(n) / 2
reg['a{0}']({0})
f{0}({0})
"""
ATTRIBUTES = """
        self.n{0}: int = n
        self.__dict__['x{0}'] = 3
        setattr(self, 'p%d' % {0}, 0.5)
        self.y{0} = torch.arange(self.n{0}) / 3
"""

COMPUTED = """
    def m{0}(self, k, n: int):
        self.t{0} = torch.arange(n, dtype=torch.float32)
        return getattr(self, f'a{{k}}_{0}')
"""

DECORATED = """
def g{0}(call):
    @wraps(call)
    def inner(*given):
        return call(*given)
    return inner
@g{0}
def f{0}(n: int):
    return torch.arange(n, dtype=torch.float32)
"""

RING = """
def f{0}(n: int, k: int):
    if k:
        return f{1}(n, k - 1)
    return torch.arange(n, dtype=torch.float32) * 2.0
"""

REPEATED = """
    x = x + torch.arange(n) / {0}
"""


CLASSES = """
class D{0}:
    def __init__(self, call):
        self.call = call
    def __call__(self, n):
        return self.call(n)
    @D0
    def same(self, n: int):
        return torch.arange(n, dtype=torch.float32)
"""


def counted(function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return function(*args, **kwargs)

    return count


def asked(project: Path, scan: Any, text: str, counts: list[int]) -> int:
    (project / "long.py").write_text(text)
    counts.append(0)
    result = scan("long.py", "--jobs", "1", "--no-cache")
    assert result.exit_code in (0, 1), result.stderr
    return counts[-1]


def test_calls_are_looked_at_once(project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Names, "call", counted(Names.call, counts))
    texts = ["import torch\n" + "".join(FUNCTIONS.format(i) for i in range(n)) for n in (100, 300)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_computed_names_are_compiled_once(project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(re, "fullmatch", counted(re.fullmatch, counts))
    head = "import torch\nclass A:\n    def __init__(self, n: int):"
    texts = [head + "".join(ATTRIBUTES.format(i) for i in range(n)) for n in (100, 300)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert many <= 4 * max(few, 10)


def test_where_a_variable_is_read_is_looked_up_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Names, "bindings", counted(Names.bindings, counts))
    head = "import torch\ndef f(n: int, x):"
    texts = [head + "".join(REPEATED.format(i) for i in range(1, n)) for n in (20, 60)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_numbers_that_one_expression_binds_many_times_are_few(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Names, "qualify", counted(Names.qualify, counts))
    inner = "[torch.arange(i, dtype=torch.float32) / 3 for i in range(n)]"
    texts = [f"import torch\ndef f(n: int):\n    return {', '.join([inner] * n)}\n" for n in (100, 300)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_names_of_attributes_that_are_computed_are_read_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(ast, "unparse", counted(ast.unparse, counts))
    texts = ["import torch\nclass A:" + "".join(COMPUTED.format(i) for i in range(n)) for n in (60, 180)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_where_a_sum_goes_on_is_looked_up_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Names, "bindings", counted(Names.bindings, counts))
    head = "import torch\ndef f(n: int):\n    t = torch.arange(n, dtype=torch.float32)\n"
    texts = [head + "    t += 1\n" * n for n in (100, 300)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_what_decorators_call_is_of_their_own_functions(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Call, "argument", counted(Call.argument, counts))
    texts = ["import torch\n" + "".join(DECORATED.format(i) for i in range(n)) for n in (40, 120)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_a_name_that_many_functions_share_has_each_other_name_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Call, "argument", counted(Call.argument, counts))
    texts = ["import torch\n" + "".join(CLASSES.format(i) for i in range(n)) for n in (20, 60)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 10 * few  # each may be called as all others are, but not by each of these names


def test_a_call_with_many_arguments_is_read_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Argument, "__init__", counted(Argument.__init__, counts))
    given = "torch.arange(n, dtype=torch.float32), "
    texts = [f"import torch\ndef f(n: int):\n    return g({given * n})\n" for n in (200, 600)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few


def test_what_follows_a_value_in_a_ring_of_functions_is_looked_at_once(
    project: Path, scan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Tree, "place", counted(Tree.place, counts))
    texts = ["import torch\n" + "".join(RING.format(i, (i + 1) % n) for i in range(n)) for n in (40, 120)]
    few, many = (asked(project, scan, text, counts) for text in texts)
    assert 0 < many <= 4 * few
