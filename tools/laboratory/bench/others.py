"""Other libraries' rotations, where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class _Library(NamedTuple):
    """A package, whether its rotation runs on a CPU, where that is, and how it is called."""

    package: str
    needs_gpu: bool
    load: Callable[[], ModuleType]
    make: Callable[[ModuleType, Any], Rotate]


def others(inputs: Any) -> dict[str, Rotate]:
    """Return the rotations that can run here, by name."""
    return {
        name: library.make(library.load(), inputs)
        for name, library in _LIBRARIES.items()
        if _obstacle(library, inputs.device) is None
    }


def availability(device: str) -> dict[str, str]:
    """Say of each library the version that is measured, or why it is not."""
    found = {}
    for name, library in _LIBRARIES.items():
        obstacle = _obstacle(library, device)
        found[name] = obstacle or f"measured, {library.package} {importlib.metadata.version(library.package)}"
    return found


def _obstacle(library: _Library, device: str) -> str | None:
    if library.needs_gpu and not device.startswith("cuda"):
        return "not measured: its kernel needs a GPU (--device cuda)"
    try:
        importlib.metadata.version(library.package)
    except importlib.metadata.PackageNotFoundError:
        return f"not measured: {library.package} is not installed (pip install --no-deps {library.package})"
    try:
        library.load()
    except ImportError as error:
        return f"not measured: it is installed, and cannot be imported ({error})"
    return None


def _liger(module: ModuleType, inputs: Any) -> Rotate:
    # It writes into q and k, whose length stays what it is: they serve again.
    return lambda q, k: module.liger_rotary_pos_emb(q, k, *inputs.wide)


def _flash_attention(module: ModuleType, inputs: Any) -> Rotate:
    cos, sin = inputs.cos[0], inputs.sin[0]

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # It takes [batch, length, heads, head_dim].
        return tuple(module.apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

    return run


@functools.cache
def _torchtune_module() -> ModuleType:
    # The file alone, which needs only torch: the package imports a module that torchao no longer has.
    package = importlib.util.find_spec("torchtune")
    if package is None or not package.submodule_search_locations:
        raise ImportError("no package torchtune")
    path = Path(package.submodule_search_locations[0], "modules", "position_embeddings.py")
    spec = importlib.util.spec_from_file_location("torchtune_position_embeddings", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torchtune(module: ModuleType, inputs: Any) -> Rotate:
    rotary = module.RotaryPositionalEmbeddings(inputs.shape.head_dim, inputs.shape.length, base=500000)
    rotary = rotary.to(inputs.device)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # It takes [batch, length, heads, head_dim], and pairs neighbours.
        return tuple(rotary(x.transpose(1, 2)).transpose(1, 2) for x in (q, k))

    return run


def _rotary_embedding_torch(module: ModuleType, inputs: Any) -> Rotate:
    rotary = module.RotaryEmbedding(inputs.shape.head_dim, theta=500000).to(inputs.device)
    # It pairs neighbours, and keeps the angles of the first call.
    return lambda q, k: tuple(rotary.rotate_queries_or_keys(x) for x in (q, k))


def _module(name: str) -> Callable[[], ModuleType]:
    return functools.partial(importlib.import_module, name)


_LIBRARIES = {
    "Liger-Kernel": _Library("liger-kernel", True, _module("liger_kernel.transformers.rope"), _liger),
    "flash-attn": _Library("flash-attn", True, _module("flash_attn.layers.rotary"), _flash_attention),
    "torchtune": _Library("torchtune", False, _torchtune_module, _torchtune),
    "rotary-embedding-torch": _Library(
        "rotary-embedding-torch", False, _module("rotary_embedding_torch"), _rotary_embedding_torch
    ),
}
