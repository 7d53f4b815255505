"""A safe fix keeps every FP32 bit, also under DeepSpeed's wrapper, and is made once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_rope.scan.engine.finding import Edit, apply_edits
from safe_rope.scan.run.analyze import analyze

torch = pytest.importorskip("torch")


def fixed(source: str, *, unsafe: bool = False) -> str:
    """Apply the safe fixes, or all."""
    data = source.encode()
    fixes = [finding.fix for finding in analyze(data, "model.py") if finding.fix]
    edits = {edit for fix in fixes if fix.safe or unsafe for edit in fix.edits}
    assert edits
    return apply_edits(data, edits).decode()


def table(source: str) -> bytes:
    """Run a source and return dtype and bits of its ``t``."""
    names: dict[str, object] = {}
    exec(source, names)
    result = names["t"]
    assert isinstance(result, torch.Tensor)
    return str(result.dtype).encode() + result.contiguous().view(torch.uint8).numpy().tobytes()


WRAPPED = ("arange", "zeros", "ones", "tensor")


@pytest.fixture
def lowered() -> Iterator[None]:
    """What zero.Init does to some constructors of torch, and a low default dtype."""
    originals = {name: getattr(torch, name) for name in WRAPPED}

    def lowering(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: object, **keywords: object) -> object:
            result = original(*arguments, **keywords)
            return result.to(torch.bfloat16) if result.is_floating_point() else result

        return made

    for name, original in originals.items():
        setattr(torch, name, lowering(original))
    yield
    for name, original in originals.items():
        setattr(torch, name, original)


SAFE = (
    "t = 1.0 / (10000 ** (torch.arange(0, 128, 2, dtype=torch.float) / 128))",
    "t = torch.arange(4096, dtype=torch.float32)",
    "t = torch.arange(4096.0, 0.0, -1.0, dtype=torch.float64)",
    "t = 1 / (10000 ** (torch.arange(0.0, 96, 2.0) / 96))",
    "t = 1 / (10000 ** (torch.arange(0, 96, 2) / 96))",
    "t = torch.exp(torch.arange(0, 96, 2) * -0.095)",
    "t = torch.exp(torch.arange(77))",
    "n = torch.arange(500)\nt = (n[None, :] + 0.5) / 7",
    "t = torch.arange(\n    0,\n    4096,  # (all)\n    dtype=torch.float32,\n)  # end",
    "dtype = torch.float32\nt = torch.arange(4096, dtype=dtype)",
    "t = torch.arange((4095 + 1.0))",
    "t = torch.arange(4e3)",
    "t = torch.tensor([float(i) for i in range(4096)])",
    "t = torch.zeros(4096, 2)\nt[:, 1] = torch.arange(4096)",
    "t = torch.zeros((4096, 2), dtype=torch.float64)\nt[:, 1] = torch.arange(4096)",
    "pe = torch.ones(  # (all)\n    4096, 2\n)\npe[:, 1] = torch.sin(torch.arange(4096) / 7)\nt = pe",
)


@pytest.mark.parametrize("source", SAFE)
def test_a_safe_fix_keeps_the_bits_and_survives_what_lowers_them(source: str, lowered: None) -> None:
    source = f"import torch\n{source}\n"
    after = fixed(source)
    assert after != source
    with pytest.MonkeyPatch.context() as plain:
        for name in WRAPPED:
            plain.setattr(torch, name, getattr(torch._C._VariableFunctions, name))
        expected = table(source)
        assert table(after) == expected
    assert table(after) == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert table(after) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(-300, 300),
    length=st.integers(700, 5000),
    step=st.integers(1, 5),
    as_floats=st.booleans(),
    dtype=st.sampled_from(["torch.float32", "torch.float64", "torch.float"]),
    tail=st.sampled_from(["", " / 96", ".unsqueeze(0)", "[None] * 0.5", "  # text"]),
)
def test_any_whole_bounds_give_the_same_bits(
    start: int, length: int, step: int, as_floats: bool, dtype: str, tail: str
) -> None:
    number = float if as_floats else int
    bounds = f"{number(start)}, {number(start + length)}, {number(step)}"
    source = f"import torch\nt = torch.arange({bounds}, dtype={dtype}){tail}\n"
    after = fixed(source)
    assert "torch.int64" in after
    assert table(after) == table(source)
    assert not any(finding.fix for finding in analyze(after.encode(), "model.py"))


def test_a_product_of_phases_keeps_its_bits() -> None:
    source = (
        "import torch\ninv_freq = 1.0 / (10000 ** (torch.arange(0, 128, 2).float() / 128))\n"
        "position_ids = torch.arange(5000)[None].expand(2, -1)\n"
        "inv_freq_expanded = inv_freq[None, :, None].float().expand(2, -1, 1)\n"
        "position_ids_expanded = position_ids[:, None, :].float()\n"
        "t = inv_freq_expanded @ position_ids_expanded\n"
    )
    after = fixed(source, unsafe=True)
    assert "inv_freq_expanded * position_ids_expanded" in after
    assert table(after) == table(source)


def test_edits_that_overlap_are_refused_and_equal_ones_made_once() -> None:
    assert apply_edits(b"abc", [Edit(1, 2, "X"), Edit(1, 2, "X")]) == b"aXc"
    with pytest.raises(ValueError, match="overlap"):
        apply_edits(b"abc", [Edit(0, 2, "X"), Edit(1, 3, "Y")])


def test_bfloat16_is_rounded_as_torch_does() -> None:
    from safe_rope.scan.rules.messages import in_bfloat16

    for value in (1.1, 257.0, 258.0, 259.0, 4095.0, 1e-30, struct.unpack("<f", b"\xff\xff\x7f\x3f")[0]):
        assert in_bfloat16(value) == torch.tensor(value).to(torch.bfloat16).item()


@pytest.mark.parametrize(
    ("cast", "expected"),
    [
        (
            "(torch.arange(1, n + 1)).type_as(x)",
            "(torch.arange(1, n + 1)).to(device=x.device, dtype=torch.float32)",
        ),
        (
            "(torch.arange(1, n + 1)  # all\n     ).bfloat16()",
            "(torch.arange(1, n + 1)  # all\n     ).to(torch.float32)",
        ),
        (
            "(torch.arange(n)).type(dtype=x.settings)[None]",
            "(torch.arange(n)).type(dtype=torch.float32)[None]",
        ),
    ],
)
def test_a_cast_of_what_stands_in_brackets_is_replaced_behind_them(cast: str, expected: str) -> None:
    source = "import torch\ndef f(x, n):\n    return "
    assert fixed(f"{source}{cast}\n", unsafe=True) == f"{source}{expected}\n"


@pytest.mark.parametrize(
    "line",
    [
        "torch.arange(n).to(x)",  # a tensor, a dtype or a device
        "torch.arange(n).type(torch.HalfTensor)",  # on CPU
        "torch.meshgrid(torch.arange(n, dtype=x.dtype), x)",
        "torch.arange(n).type_as(x) @ x",
    ],
)
def test_no_fix_writes_what_may_never_run(line: str) -> None:
    found = analyze(f"import torch\ndef f(x, n):\n    return {line}\n".encode(), "model.py")
    assert [finding.fix for finding in found] == [None]


def test_a_cast_to_what_is_used_as_a_tensor_is_replaced() -> None:
    source = "import torch\ndef f(x, n):\n    return torch.arange(n).to(x) / x.shape[0]\n"
    assert "to(device=x.device, dtype=torch.float32)" in fixed(source, unsafe=True)
