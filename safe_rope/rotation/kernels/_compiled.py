"""The rotation as one inductor kernel for the CPU.

Inductor compiles C++ with ``-ffp-contract=off`` unless it is told otherwise. Here it is told so, which keeps
every product and every sum a separate operation.
"""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from safe_rope._base.inductor import inductor_cpp
from safe_rope._base.torch_private import can_compile, mark_static

logger = logging.getLogger(__name__)

SMALLEST = 1 << 18
"""Elements from which on a compiled kernel is made; below, the dispatch costs more than the arithmetic."""

_lock = threading.RLock()
_broken = False


def worthwhile(x: Tensor) -> bool:
    """Whether a compiled kernel can be made for ``x`` and saves time."""
    return x.is_cpu and x.numel() >= SMALLEST and not _broken and _has_compiler()


def rotate_planes(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    """Write the rotation of ``x`` into ``out``, to the bits of `_eager.rotated`.

    Args:
        out: where to write, [2, ..., rotary_dim // 2]: the two elements of every pair; not ``x``.
        x: the same shape and dtype: bfloat16, float16 or float32.
        cos: FP32, the same rank, each dimension that of x or 1.
        sin: as cos.
        conjugate: rotate by the negative angle.
    """
    global _broken
    tensors = [out.detach(), x.detach(), cos.detach(), sin.detach()]
    while tensors[1].dim() < 5:  # one kernel for every rank up to [2, batch, heads, length, half]
        tensors = [t.unsqueeze(1) for t in tensors]
    for t in tensors:
        mark_static(t, 0)
        mark_static(t, t.dim() - 1)
    # What a compiler specialises on in any case makes a kernel of its own.
    key = tuple((t.dtype, t.dim(), t.shape[-1], *(n == 1 for n in t.shape), t.stride(-1)) for t in tensors)
    try:
        with _lock, torch.no_grad():
            _kernel(key, conjugate)(*tensors)
    except Exception as error:  # noqa: BLE001 - a compiler fails in any way, and is not needed
        _broken = True
        warnings.warn(
            f"torch.compile cannot make the rotation's kernel ({type(error).__name__}: {error}); the eager "
            "one, which gives the same bits, is used from now on",
            RuntimeWarning,
            stacklevel=2,
        )
        with torch.no_grad():
            (_backward if conjugate else _forward)(*tensors)


def _forward(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = x[0].float(), x[1].float()
    out[0].copy_(first * cos[0] - second * sin[0])
    out[1].copy_(second * cos[1] + first * sin[1])


def _backward(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = x[0].float(), x[1].float()
    out[0].copy_(first * cos[0] + second * sin[1])
    out[1].copy_(second * cos[1] - first * sin[0])


@functools.cache
def _kernel(key: tuple[Any, ...], conjugate: bool) -> Callable[..., None]:
    function = _backward if conjugate else _forward
    # A code object of its own for each key: a compiler counts recompilations by it, and gives up at 8.
    name = f"rotary_{'backward' if conjugate else 'forward'}"
    own = types.FunctionType(function.__code__.replace(co_name=name), globals(), name)
    logger.debug("compiling a rotation for %s", key)
    kernel: Callable[..., None] = torch.compile(own, fullgraph=True, dynamic=True, options=_options())
    return kernel


def _options() -> dict[str, Any]:
    name = "cpp.enable_floating_point_contract_flag"
    default = inductor_cpp().enable_floating_point_contract_flag
    # A switch before torch 2.6, gcc's own word since.
    return {name: False if isinstance(default, bool) else "off"}


@functools.cache
def _has_compiler() -> bool:
    if not can_compile():
        return False
    candidates = inductor_cpp().cxx
    names = candidates if isinstance(candidates, (list, tuple)) else (candidates,)
    return any(name is not None and shutil.which(name) is not None for name in names)
