"""The cos and sin tables of an audit as a file, so that two environments can be compared."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialized
from torch import Tensor

from safe_rope._audit.layers import LAYERS
from safe_rope._audit.report import Tables
from safe_rope._base.files import write_atomically
from safe_rope._base.version import installed
from safe_rope.errors import ConfigError

FORMAT = "safe_rope.tables/1"
_PARTS = ("positions", "cos", "sin")


def save(file: Path, groups: Mapping[str, Tables], model: str) -> None:
    """Write ``groups`` (a name for each set of tables) of a model as safetensors, at once or not at all."""
    tensors = {
        f"{group}/{name}/{part}": tensor.clone()  # layers can share one
        for group, tables in groups.items()
        for name, table in tables.items()
        for part, tensor in table.items()
    }
    _write(file, tensors, model)


def _write(file: Path, tensors: dict[str, Tensor], model: str) -> None:
    notes = {"format": FORMAT, "environment": json.dumps(environment(model))}
    write_atomically(str(file), serialized(tensors, metadata=notes))


def merge(files: Iterable[Path], target: Path, model: str) -> None:
    """Put the groups of several files of a model into one."""
    _write(target, {key: tensor for file in files for key, tensor in load_file(file).items()}, model)


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
            made = json.loads(notes.get("environment", "{}"))
            if not isinstance(made, dict):
                raise ConfigError(f"{file} must name its environment as a JSON object, got {made!r}")
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                rest, _, part = key.rpartition("/")
                group, _, name = rest.partition("/")
                groups.setdefault(group, {}).setdefault(name, {})[part] = opened.get_tensor(key)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
    if not groups:
        raise ConfigError(f"{file} holds no tables")
    for tables in groups.values():
        tables.update({name: _in_order(file, name, table) for name, table in tables.items()})
    return groups, made


def _in_order(file: Path, name: str, table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a table with its positions rising.

    Raises:
        ConfigError: it is not whole.
    """
    rows = [len(table[part]) if part in table and table[part].dim() else -1 for part in _PARTS]
    if (
        len(set(rows)) > 1
        or rows[0] < 1
        or table["cos"].dim() != 2
        or table["cos"].shape != table["sin"].shape
    ):
        said = ", ".join(f"{part} {list(one.shape)}" for part, one in sorted(table.items()))
        raise ConfigError(f"{file} holds no whole table for {name}: {said}; write it again")
    order = table["positions"].argsort()
    layers = {part: one for part, one in table.items() if part == LAYERS}
    return {part: table[part][order] for part in _PARTS} | layers


def environment(model: str) -> dict[str, str]:
    """What the tables may depend on: the model, versions, processor."""
    found = {"model": model, "python": platform.python_version(), "machine": platform.machine()}
    return found | installed(("torch", "transformers", "deepspeed", "safe-rope"))
