"""The cos and sin tables of a model as a file, so that two environments can be compared."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope import constructors
from safe_rope._audit.forward import UnmeasurableError, call
from safe_rope._audit.reference import Reference, halves
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import calling_convention, is_position_module, layer_types, position_buffers
from safe_rope.errors import ConfigError, SafeRopeError
from safe_rope.registry import find

Tables = dict[str, dict[str, Tensor]]
"""For each rotary embedding of a model: "positions" int64 [n], "cos" and "sin" [n, rotary_dim // 2]."""

FORMAT = "safe_rope.tables/1"


def gather(model: nn.Module, positions: Iterable[int], dtype: torch.dtype = torch.float32) -> Tables:
    """Return what each rotary module hands out for ``positions``, called with an ``x`` of ``dtype``.

    The values are widened to FP32, which changes none; a module's copy answers, and nothing is changed.
    """
    asked = sorted(set(positions))
    tables: Tables = {}
    with constructors.pristine(), torch.inference_mode(False), torch.no_grad():
        for path, module in model.named_modules():
            patch = find(module)
            convention = calling_convention(stock_class(module))
            if convention is None or (patch is None and not is_position_module(module)):
                continue
            for layer_type in layer_types(module):
                name = path if layer_type is None else f"{path}:{layer_type}"
                try:
                    reference = Reference(module, patch, layer_type, convention)
                    parts = call(module, reference, asked, _device_of(module), dtype)
                except (UnmeasurableError, SafeRopeError):
                    continue  # the audit says why
                pairs, layout = len(reference.base), reference.layouts[0]
                tables[name] = {
                    "positions": torch.cat([part.positions for part in parts]),
                    "cos": torch.cat([_first_of_pairs(part.cos, pairs, layout) for part in parts]),
                    "sin": torch.cat([_first_of_pairs(part.sin, pairs, layout) for part in parts]),
                }
    return tables


def _device_of(module: nn.Module) -> torch.device:
    tensors = (getattr(module, name) for name in position_buffers(module))
    return next((t.device for t in tensors if isinstance(t, Tensor) and not t.is_meta), torch.device("cpu"))


def _first_of_pairs(table: Tensor, pairs: int, layout: str) -> Tensor:
    return halves(table, pairs, layout)[0].to("cpu", torch.float32).contiguous()


def save(file: Path, groups: Mapping[str, Tables]) -> None:
    """Write ``groups`` (a name for each set of tables) as safetensors, at once or not at all."""
    from safetensors.torch import save_file

    tensors = {
        f"{group}/{name}/{part}": tensor
        for group, tables in groups.items()
        for name, table in tables.items()
        for part, tensor in table.items()
    }
    notes = {"format": FORMAT, "environment": json.dumps(environment())}
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial, metadata=notes)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def load(file: Path) -> tuple[dict[str, Tables], dict[str, Any]]:
    """Return the groups of a file that `save` wrote, and the environment that it was written in.

    Raises:
        ConfigError: the file is none of these.
    """
    from safetensors import SafetensorError, safe_open

    groups: dict[str, Tables] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata() or {}
            if notes.get("format") != FORMAT:
                raise ConfigError(f"{file} is not a dump of tables; write one with safe-rope audit --dump")
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                rest, _, part = key.rpartition("/")
                group, _, name = rest.partition("/")
                groups.setdefault(group, {}).setdefault(name, {})[part] = opened.get_tensor(key)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; expected a dump of tables") from None
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
    return groups, json.loads(notes.get("environment", "{}"))


def merge(files: Iterable[Path], target: Path) -> None:
    """Put the groups of several files into one."""
    groups: dict[str, Tables] = {}
    for file in files:
        groups.update(load(file)[0])
    save(target, groups)


def environment() -> dict[str, str]:
    """What the tables may depend on: versions, processor."""
    import importlib.metadata

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "deepspeed", "safe-rope"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
