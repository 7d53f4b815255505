"""Inductor's code for a CUDA device: made without one, run by Triton's interpreter or compiled as far as PTX.

What torch would ask a device is answered here. This process can do nothing else with CUDA.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from safe_rope._base.triton import interpreted
from safe_rope.rotation.kernels import Form

HOPPER = SimpleNamespace(
    major=9,
    minor=0,
    name="a Hopper GPU",
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
)
FORMS = (
    Form("half", "half", "half"),
    Form("interleaved", "interleaved", "interleaved"),
    Form("interleaved", "half", "first"),
    Form("half", "interleaved", "shared"),
)
Region = Callable[..., tuple[Tensor, ...]]


class _Driver:
    """What Triton asks of the device that a kernel is for."""

    utils = None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def pretend() -> None:
    """Let torch believe in a device that answers nothing but what it is."""
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": HOPPER,
        "get_compute_capability": 90,
    }
    for name, answer in answers.items():
        for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
            if hasattr(place, name):
                setattr(place, name, staticmethod(lambda *_, answer=answer: answer))
    put(fake_tensor, init_gpu_context=lambda *_: None)
    put(torch.cuda, get_device_capability=lambda *_: (9, 0), _lazy_init=lambda: None)
    driver.set_active(_Driver())


def put(place: Any, **values: Any) -> None:
    """Set attributes of a module of torch's."""
    for name, value in values.items():
        setattr(place, name, value)


def generated(region: Region, inputs: list[Tensor]) -> str:
    """The module that inductor writes for ``region`` on CUDA."""
    mode = fake_tensor.FakeTensorMode()
    with mode:
        there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]
        traced = make_fx(region, decomposition_table=select_decomp_table(), tracing_mode="fake")(*there)
    options = torch._inductor.config.patch({"compile_threads": 1, "triton.cudagraphs": False})
    with V.set_fake_mode(mode), torch.no_grad(), options:
        graph = GraphLowering(traced)
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*there)
            code = graph.codegen()[0]
            return str(getattr(code, "value", code))  # a string before torch 2.7


def kernel_in(source: str) -> Any:
    """The function of one kernel of a generated module. Triton reads it from a file."""
    found = re.search(r"@triton\.jit\ndef (triton_\w+).*", source, re.DOTALL)
    assert found is not None
    imports = "import triton, triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(imports + found[0])
    _files.append(file.name)
    return runpy.run_path(file.name)[found[1]]


_files: list[str] = []
atexit.register(lambda: [os.unlink(name) for name in _files])


# ---- interpreted ---------------------------------------------------------------------------------------

_PRODUCT = re.compile(r"tl\.inline_asm_elementwise\('mul\.rn\.f32 [^']*', '[^']*', \[(\w+), (\w+)\][^)]*\)")


class _Kernel:
    """What stands in a generated module for a kernel: it is interpreted, with tensors on the CPU."""

    def __init__(self, name: str, source: str, **_: Any) -> None:
        # The interpreter rounds each operation by itself, and knows no PTX.
        self._function = kernel_in(_PRODUCT.sub(r"(\1 * \2)", source))

    def run(self, *arguments: Any, **_: Any) -> None:
        sizes = [one for one in arguments if isinstance(one, int)]
        blocks = [f"{axis}BLOCK" for axis in "XYZ" if f"{axis}BLOCK" in self._function.arg_names]
        # A tiled kernel has its last axis first.
        size = dict(zip(reversed(blocks), sizes, strict=True)) if len(blocks) > 1 else {blocks[0]: sizes[0]}
        grid = tuple(math.ceil(size[name] / 16) for name in blocks)
        self._function[grid](*arguments, **dict.fromkeys(blocks, 16))


def interpret(code: str, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What a generated module makes of ``inputs``."""
    unneeded = (
        r"^async_compile\.wait.*|^del async_compile|^from torch\._C import _cuda.*|^.*= get_raw_stream\(.*"
    )
    code = re.sub(unneeded, "", code, flags=re.MULTILINE)
    code = re.sub(r", stream=\w+", "", code)
    names: dict[str, Any] = {"__name__": "generated"}
    head, _, rest = code.partition("async_compile = AsyncCompile()")
    exec(head, names)
    names["async_compile"] = SimpleNamespace(triton=_Kernel)
    names["empty_strided_cuda"] = names["empty_strided_cpu"]
    put(torch.cuda, _DeviceGuard=lambda _: nullcontext(), set_device=lambda _: None)
    exec(rest, names)
    return tuple(names["call"](list(inputs)))


# ---- what is asked -------------------------------------------------------------------------------------


def regions(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[Region, list[Tensor]]]:
    """Rotations between neighbours that inductor fuses with, and whose roundings it would leave out."""
    torch.manual_seed(0)
    for form, (dtype, head_dim), conjugate in itertools.product(
        FORMS, zip(dtypes, (16, 20, 20), strict=False), (False, True)
    ):
        width = 8 if form.table == "shared" else 16
        x = [torch.randn(2, 5, heads, head_dim).to(dtype) for heads in (3, 1)]
        yield (
            functools.partial(_region, form=form, conjugate=conjugate),
            [*x, torch.randn(2, 1, 5, width), torch.randn(2, 1, 5, width)],
        )


def _region(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, form: Form, conjugate: bool
) -> tuple[Tensor, ...]:
    q, k = ((x.float() * 0.7).to(x.dtype).transpose(1, 2) for x in (q, k))
    rotated = torch.ops.safe_rope.rotary((q, k), cos, sin, form.key, conjugate)
    return tuple((one.float() * 1.3).to(one.dtype) for one in rotated)


def run() -> int:
    """Interpreted, inductor's loops have the eager bits."""
    assert interpreted()
    count = 0
    for region, inputs in regions((torch.float32, torch.float16)):
        code = generated(region, inputs)
        assert "safe_rope.rotary.default(" not in code, "the operator is called"
        for one, other in zip(interpret(code, inputs), region(*inputs), strict=True):
            assert torch.equal(one, other), region
            count += 1
    return count


def ptx() -> int:
    """Compiled, they fuse no product with a sum, and round where memory would."""
    count = 0
    for region, inputs in regions((torch.bfloat16, torch.float16)):
        code = generated(region, inputs)
        for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL):
            text = _compiled(source)
            assert "fma.rn" not in text
            assert "mul.rn.f32" in text or "inline_asm" not in source
            assert ("cvt.rn.bf16" in text) or "bf16" not in source
            count += 1
    return count


def _compiled(source: str) -> str:
    kernel = kernel_in(source)
    signature = re.search(r"'signature': (\{.*?\})", source)
    assert signature is not None
    kinds = dict(eval(signature[1]))
    constants = {name: 16 for name in kernel.arg_names if name.endswith("BLOCK")}
    kinds |= dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(kernel, kinds, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    return str(made.asm["ptx"])


if __name__ == "__main__":
    pretend()
    print({"run": run, "ptx": ptx}[sys.argv[1]](), "agree")
