"""Python modules that a test writes to a folder and imports, as code that comes with a checkpoint is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def write(folder: Path, monkeypatch: Any, **sources: str) -> tuple[ModuleType, ...]:
    """Write each source as ``<name>.py`` and import it; both are forgotten after the test."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    for name in sources:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    modules = []
    for name in sources:
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)  # taken out again after the test
        modules.append(module)
    return tuple(modules)
