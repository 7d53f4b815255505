"""Position modules in more than eighty styles, a file for each theme; importing it registers them all."""

from __future__ import annotations

import importlib
import pkgutil

from styles.registry import LENGTHS, STYLES, Style

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["LENGTHS", "STYLES", "Style"]
