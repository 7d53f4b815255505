"""Hints for the architectures that cannot be protected without: one `RopePatch` a file."""

from __future__ import annotations

import importlib
import pkgutil

from safe_rope.registry import RopePatch

PATCHES: tuple[RopePatch, ...] = tuple(
    importlib.import_module(f"{__name__}.{file.name}").PATCH for file in pkgutil.iter_modules(__path__)
)
"""What the entry point of safe_rope in the group ``safe_rope.patches`` names."""
