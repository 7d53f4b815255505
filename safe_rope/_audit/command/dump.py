"""The cos and sin tables of a model as a file, so that two environments can be compared."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from safe_rope import constructors
from safe_rope._audit.forward import UnmeasurableError, call
from safe_rope._audit.reference import PhaseReference, compare, halves
from safe_rope._protection.rewrite import stock_class
from safe_rope._recognition.specs import calling_convention, is_position_module, layer_types
from safe_rope.errors import ConfigError, SafeRopeError
from safe_rope.registry import find

Tables = dict[str, dict[str, Tensor]]
"""For each rotary embedding: "positions" int64 [n], rising, "cos" and "sin" FP32 [n, rotary_dim // 2]."""

FORMAT = "safe_rope.tables/1"


def gather(model: nn.Module, positions: Iterable[int]) -> Tables:
    """Return what each rotary module hands out for ``positions``, called with an FP32 ``x``.

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
                    reference = PhaseReference(module, patch, layer_type, convention)
                    parts = call(module, reference, asked, torch.float32)
                except (UnmeasurableError, SafeRopeError):
                    continue  # the audit says why
                _, layout = compare(reference, parts[-1])  # at position 0, every layout fits
                tables[name] = {
                    "positions": torch.cat([part.positions for part in parts]),
                    "cos": torch.cat([_first_of_pairs(part.cos, reference, layout) for part in parts]),
                    "sin": torch.cat([_first_of_pairs(part.sin, reference, layout) for part in parts]),
                }
    return tables


def _first_of_pairs(table: Tensor, reference: PhaseReference, layout: str) -> Tensor:
    first = halves(table, len(reference.base), layout)[0]
    return first.to("cpu", torch.float32).contiguous()


def save(file: Path, groups: Mapping[str, Tables]) -> None:
    """Write ``groups`` (a name for each set of tables) as safetensors."""
    tensors = {
        f"{group}/{name}/{part}": tensor
        for group, tables in groups.items()
        for name, table in tables.items()
        for part, tensor in table.items()
    }
    _write(file, tensors)


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, file, metadata={"format": FORMAT, "environment": json.dumps(environment())})


def merge(files: Iterable[Path], target: Path) -> None:
    """Put the groups of several files into one."""
    _write(target, {key: tensor for file in files for key, tensor in load_file(file).items()})


def load(file: Path) -> tuple[dict[str, Tables], dict[str, Any]]:
    """Return the groups of a file that `save` wrote, and the environment that it was written in.

    Raises:
        ConfigError: the file is none of these.
    """
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
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
    return groups, json.loads(notes.get("environment", "{}"))


def environment() -> dict[str, str]:
    """What the tables may depend on: versions, processor."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "deepspeed", "safe-rope"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
