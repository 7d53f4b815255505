"""Which layers of a model have a table of a layer type."""

from __future__ import annotations

from typing import Any

import torch

from safe_rope._audit.report import Tables
from safe_rope._base import originals

LAYERS = "layers"
"""The part of a table that says it; int64 CPU."""


def add_layers(tables: Tables, config: Any, path: str = "") -> None:
    """Note of each table of a layer type, of the module at ``path``, which layers of a config are of it."""
    types: Any = getattr(config, "layer_types", None)
    for name, table in tables.items() if isinstance(types, list | tuple) else ():
        if name.startswith(path) and (kind := layer_type_in(name)) is not None:
            numbers = [at for at, one in enumerate(types) if one == kind]
            table[LAYERS] = originals.tensor(numbers, dtype=torch.int64, device="cpu")


def layer_type_in(name: str) -> str | None:
    """The layer type that a table is of, as its name says it: ``path:type``."""
    return name.rpartition(":")[2] if ":" in name else None
