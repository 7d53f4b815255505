"""On a CUDA device the rotation has the bits of the CPU: forward, backward, eager and compiled."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support.rotary_cases import Case, cases

from safe_rope._base import triton
from safe_rope.rotation import apply_rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_triton_kernel_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    assert triton.available()
    for case in cases((dtype,)):
        assert not case.differs(Case.by_triton, "cuda"), case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_torch_on_the_gpu_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    for case in cases((dtype,)):
        assert not case.differs(Case.eager, "cuda"), case


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_and_gradients_of_real_sizes_have_the_bits_of_the_cpu(compiled: bool) -> None:
    torch.manual_seed(0)
    phase = torch.randn(4, 1024, 64)
    cos, sin = phase.cos(), phase.sin()
    q, k = torch.randn(4, 32, 1024, 128).bfloat16(), torch.randn(4, 8, 1024, 128).bfloat16()
    weights = torch.randn(q.shape).bfloat16(), torch.randn(k.shape).bfloat16()
    results: list[list[Any]] = []
    for device in ("cpu", "cuda"):
        states = [x.to(device).requires_grad_() for x in (q, k)]
        run: Any = torch.compile(apply_rotary) if compiled and device == "cuda" else apply_rotary
        outputs = run(*states, cos.to(device), sin.to(device))
        gradients = torch.autograd.grad(outputs, states, [weight.to(device) for weight in weights])
        results.append([t.cpu() for t in (*outputs, *gradients)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
