"""Position modules in more than eighty styles, a file for each theme; importing it registers them all.

The place of a style among all decides which load paths it takes in a run that takes some of them.
`styles_in_turn.json` has the places, whatever file a style is in; what is not there comes after all that is.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

from styles.registry import LENGTHS, STYLES, Style

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_turns = json.loads((Path(__file__).parents[3] / "data" / "styles_in_turn.json").read_text(encoding="utf-8"))
for _name in (*(name for name in _turns if name in STYLES), *(name for name in STYLES if name not in _turns)):
    STYLES[_name] = STYLES.pop(_name)

__all__ = ["LENGTHS", "STYLES", "Style"]
