"""Every place that an expression can stand in is looked at."""

from __future__ import annotations

import sys

import pytest

from safe_rope.scan.run.analyze import analyze

CALL = "torch.arange(n, dtype=torch.float32)"
PLACES = {
    "default": "def f(x, base=10000, y=CALL): return base",
    "constant default": "def f(n, base=10000): return CALL",
    "keyword default": "def f(n, *, base=1.0, y=CALL): pass",
    "lambda": "f = lambda n, base=1: CALL",
    "decorator": "@register(CALL)\ndef f(): pass",
    "class keyword": "class A(B, table=CALL): pass",
    "comprehension": "x = [i * a for i, a in enumerate(CALL) if i]",
    "f-string": "x = f'{CALL!r:>{n}}'",
    "walrus": "if (x := CALL) is not None: pass",
    "while": "while CALL.any(): pass",
    "for": "for x in CALL: pass",
    "with": "with hold(CALL) as x: pass",
    "match": "match CALL:\n    case [1, *_]: pass\n    case {'a': 1, **rest}: pass\n    case A(x=1): pass",
    "try": "try:\n    x = CALL\nexcept OSError as e:\n    pass\nelse:\n    y = 1\nfinally:\n    z = 2",
    "try group": "try:\n    x = CALL\nexcept* ValueError as e:\n    pass",
    "assert": "assert CALL.any(), 'no'",
    "raise": "raise ValueError(CALL)",
    "delete": "del d[CALL]",
    "augmented": "x += CALL",
    "annotated": "x: torch.Tensor = CALL",
    "slice": "y = x[..., 1:CALL:2]",
    "starred": "f(*CALL, **{'a': 1})",
    "conditional": "x = CALL if n > 2 and not m else -n",
    "await": "async def f(n):\n    async with a: await g(CALL)",
    "yield": "def f(n):\n    yield from CALL",
    "return": "def f(n):\n    return CALL",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_call_is_found_wherever_it_stands(place: str) -> None:
    if place == "try group" and sys.version_info < (3, 11):
        pytest.skip("except* came with Python 3.11")
    source = "import torch\n" + PLACES[place].replace("CALL", CALL) + "\n"
    (found,) = analyze(source.encode(), "modeling_x.py")
    lines = source.encode().splitlines(True)
    start = sum(map(len, lines[: found.line - 1])) + found.column - 1
    assert found.rule == "SR001"
    assert source[start:].startswith("torch.arange(")


@pytest.mark.parametrize(("asks", "severity"), [("", "error"), ("    n = index.shape[0]\n", "note")])
def test_a_function_of_tensors_is_no_constructors_because_a_helpers_name_calls_it(
    asks: str, severity: str
) -> None:
    source = (
        f"import torch\ndef offsets(index, n=900):\n{asks}    table = torch.zeros(n, n)\n"
        "    table[0] = torch.arange(n)\n    return table\n"
        "def relpos(batch):\n    return offsets(batch['index'])\n"
    )
    (found,) = analyze(source.encode(), "relpos.py")
    assert (found.rule, found.severity) == ("SR013", severity)
