"""Runs the Triton kernels: interpreted on the CPU, or compiled as far as PTX."""

from __future__ import annotations

import sys
from typing import Any

import torch
from support.rotary_cases import Case, cases

from safe_rope._base.triton import interpreted
from safe_rope.rotation.kernels import Form
from safe_rope.tables._exact import ExactLookup


def interpret() -> int:
    assert interpreted()
    count = 0
    # Every seventh: interpreted, the kernel takes a tenth of a second.
    for case in list(cases((torch.bfloat16, torch.float16, torch.float32)))[::7]:
        assert not case.differs(Case.by_triton), case
        count += 1
    # Under vmap one of the two may have a row for each sample, and the other one for all.
    x, rows = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 8)
    for cos, sin in ((rows, rows[:1]), (rows[1:], rows)):
        case = Case(x, cos, sin, Form("half", "half", "shared"), 16, conjugate=False)
        assert not case.differs(Case.by_triton), case
        count += 1
    return count


def look_up() -> int:
    """Positions of one, two and three digits, of both signs, and those that have no row."""
    assert interpreted()
    positions = torch.tensor(
        [0, 1, -1, 4095, 4096, -4097, 10_027_007, 10_027_008, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**63)]
    )
    count = 0
    for half, scaling in ((1, 1.0), (5, 1.3), (64, 1.0)):
        exact = ExactLookup(tuple((1e4 ** -(torch.arange(half) / half)).tolist()), scaling, 1.0)
        parts = [rows.float() for _, rows in exact._on_accelerator(positions)]
        cos, sin = torch.full((2, len(positions), half), 7.0)
        exact.store_by_kernel(positions, cos, sin)
        for got, expected in zip((cos, sin), torch.cat(parts, 1), strict=True):
            assert torch.equal(got.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))
            count += 1
    return count


def ptx(dtype: str, conjugate: bool, **options: Any) -> str:
    """The kernel's PTX for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from safe_rope.rotation.kernels._triton_kernel import rotate_kernel

    constants = {"HEADS": 32, "HALF": 64, "REST": 0, "X_IN_HALVES": True, "OUT_IN_HALVES": True, "TABLE": 1}
    constants |= {"CONJUGATE": conjugate, "ROUND_BF16": False}
    pointers = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    pointers |= dict.fromkeys(("out_ptr", "x_ptr", "other_out_ptr", "other_x_ptr"), f"*{dtype}")
    names = rotate_kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(rotate_kernel, signature, constexprs=constants)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def lookup_ptx(**options: Any) -> str:
    """The PTX of the tables' lookup for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from safe_rope.tables import _levels
    from safe_rope.tables._triton_kernel import lookup_kernel

    pointers = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64"}
    pointers |= dict.fromkeys(("fine_ptr", "coarse_ptr", "top_ptr"), "*fp64")
    constants = {
        name: 64 if name == "HALF" else getattr(_levels, name)
        for name in lookup_kernel.arg_names
        if name.isupper()
    }
    names = lookup_kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(lookup_kernel, signature, constexprs=constants)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def count_fma() -> int:
    count = 0
    for dtype in ("bf16", "fp16", "fp32"):
        for conjugate in (False, True):
            assert "fma.rn.f32" not in ptx(dtype, conjugate, enable_fp_fusion=False)
            count += 1
    assert "fma.rn.f32" in ptx("bf16", False, enable_fp_fusion=True)
    assert "fma.rn.f64" not in lookup_ptx(enable_fp_fusion=False)
    assert "fma.rn.f64" in lookup_ptx(enable_fp_fusion=True)
    return count + 1


if __name__ == "__main__":
    print({"interpret": interpret, "look_up": look_up, "ptx": count_fma}[sys.argv[1]](), "agree")
