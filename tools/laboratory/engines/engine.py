"""The rotary modules of inference engines, as their own factories make them on a CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD_DIM = 128
LONGEST = 32768
Rotate = Callable[[Tensor, Tensor], Tensor]
"""Of positions [tokens] and q or k [tokens, heads, head_dim] in BF16, in the order of NeoX's halves."""


class Engine(NamedTuple):
    """A way in which an engine rotates: its name, what makes its module, and what rotates with that."""

    name: str
    make: Callable[[dict[str, Any]], Any]
    rotate_with: Callable[[Any], Rotate]

    def rotation(self, rope: dict[str, Any]) -> Rotate:
        """Return the rotation of a ``rope_parameters`` of transformers."""
        return self.rotate_with(self.make(rope))


def installed() -> tuple[list[Engine], list[str]]:
    """Return the ways of the engines that can be imported, and a line for each engine that cannot."""
    engines, absent = [], []
    for package, load in _PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
            make = load()
        except ImportError as error:
            absent.append(f"{package}: not measured, it cannot be imported ({error})")
            continue
        engines += [Engine(f"{package} {version}, {name}", make, way) for name, way in _WAYS.items()]
    return engines, absent


def _its_own(rotary: Any) -> Rotate:
    def rotate(positions: Tensor, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return rotary.forward_native(positions, flat, flat.clone())[0].view(x.shape)  # type: ignore[no-any-return]

    return rotate


def _in_fp32(rotary: Any) -> Rotate:
    """The arithmetic of the engines' CUDA kernels: products and sums in FP32, one rounding at the end."""

    def rotate(positions: Tensor, x: Tensor) -> Tensor:
        cos, sin = rotary.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return rotate


def _vllm() -> Any:
    # Without a GPU it refuses to guess what it runs on.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    config = importlib.import_module("vllm.config")
    module = importlib.import_module("vllm.model_executor.layers.rotary_embedding")

    def make(rope: dict[str, Any]) -> Any:
        with config.set_current_vllm_config(config.VllmConfig()):
            return module.get_rope(HEAD_DIM, LONGEST, rope_parameters=dict(rope), dtype=torch.bfloat16)

    return make


def _sglang() -> Any:
    envs = importlib.import_module("sglang.srt.environ").envs
    module = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")

    def make(rope: dict[str, Any]) -> Any:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        is_scaled = scaling["rope_type"] != "default"
        # On CUDA the cache is FP32 whatever this variable says.
        with envs.SGLANG_ROPE_CACHE_FP32.override(True):
            return module.get_rope(
                HEAD_DIM,
                HEAD_DIM,
                LONGEST,
                int(rope["rope_theta"]),
                rope_scaling=scaling if is_scaled else None,
                dtype=torch.bfloat16,
            )

    return make


_WAYS = {"its code in torch": _its_own, "its cache, in FP32 as its CUDA kernel": _in_fp32}
_PACKAGES = {"vllm": _vllm, "sglang": _sglang}
