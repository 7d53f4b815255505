"""Runs the Triton kernel: interpreted on the CPU, or compiled as far as PTX."""

from __future__ import annotations

import sys
from typing import Any

import torch
from support.rotary_cases import cases

from safe_rope.rotation.kernels import _triton


def interpret() -> int:
    assert _triton.interpreted()
    count = 0
    # Every seventh: interpreted, the kernel takes a tenth of a second.
    for case in list(cases((torch.bfloat16, torch.float16, torch.float32)))[::7]:
        assert not case.differs(_triton.rotate_planes), case
        count += 1
    return count


def ptx(dtype: str, conjugate: bool, **options: Any) -> str:
    """The kernel's PTX for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from safe_rope.rotation.kernels._triton_kernel import rotate_kernel

    constants = {"HEADS": 32, "HALF": 64, "CONJUGATE": conjugate, "ROUND_BF16": False}
    pointers = {"out_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    names = rotate_kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(rotate_kernel, signature, constexprs=constants)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def count_fma() -> int:
    count = 0
    for dtype in ("bf16", "fp16", "fp32"):
        for conjugate in (False, True):
            assert "fma.rn.f32" not in ptx(dtype, conjugate, enable_fp_fusion=False)
            count += 1
    assert "fma.rn.f32" in ptx("bf16", False, enable_fp_fusion=True)
    return count


if __name__ == "__main__":
    print({"interpret": interpret, "ptx": count_fma}[sys.argv[1]](), "agree")
