"""Builds the rotary classes of the transformers on sys.path, plainly and under DeepSpeed's tensor wrapper.

Reads a JSON list of modules from stdin; prints {class: {"plain": digest, "zero": digest}} of FP32 buffers.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters

WRAPPED = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")


@contextmanager
def wrapped() -> Iterator[None]:
    """Replace the constructors that zero.Init replaces, in the way it does."""
    originals = {name: getattr(torch, name) for name in WRAPPED}
    try:
        for name, function in originals.items():
            wrapper = partition_parameters.zero_wrapper_for_fp_tensor_constructor(
                function, torch.bfloat16, None
            )
            setattr(torch, name, wrapper)
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)


def config_of(module: Any, cls: type) -> Any:
    """Return a default configuration of the class that the constructor's annotation, or its module, names."""
    annotation = inspect.signature(cls.__init__).parameters["config"].annotation  # type: ignore
    if isinstance(annotation, str):
        annotation = getattr(module, annotation)
    return annotation()


def digest(instance: torch.nn.Module) -> str:
    """Hash the floating buffers, names, dtypes and bits."""
    result = hashlib.sha256()
    found = 0
    for name, buffer in sorted(instance.named_buffers()):
        if buffer.is_floating_point():
            found += 1
            result.update(
                f"{name} {buffer.dtype}".encode() + buffer.contiguous().view(torch.uint8).numpy().tobytes()
            )
    if not found:
        raise ValueError("no floating buffer")
    return result.hexdigest()


def main() -> None:
    """Build what can be built with a default configuration alone."""
    built: dict[str, dict[str, str]] = {}
    for name in json.load(sys.stdin):
        try:
            module = importlib.import_module(name)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != name or "Rotary" not in cls.__name__:
                continue
            try:
                plain = digest(cls(config_of(module, cls)))  # type: ignore
                with wrapped():
                    zero = digest(cls(config_of(module, cls)))  # type: ignore
            except Exception as error:
                print(f"{name}.{cls.__name__}: {error}", file=sys.stderr)
                continue
            built[f"{name}.{cls.__name__}"] = {"plain": plain, "zero": zero}
    print(json.dumps(built))


main()
