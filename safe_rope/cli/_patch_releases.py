"""Which releases each patch is tested with: a record that is made by looking, and checked by looking again.

The record holds, for every release of transformers in the tested version pairs, the families whose rotary
classes that release has. ``safe-rope patches --record`` adds the installed release. Never imports torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safe_rope._base import version
from safe_rope.errors import MissingDependencyError
from safe_rope.registry import RopePatch

_PAIR = ("transformers", "deepspeed", "torch")
RECORD = Path(__file__).with_name("patch_releases.json")


def read() -> dict[str, Any]:
    """Return the record: "pairs" of versions, and "families" by release of transformers."""
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def covered(patches: Iterable[RopePatch]) -> list[str]:
    """Families of which the installed transformers has a rotary class; nothing of it is imported."""
    return sorted(patch.family for patch in patches if any(_has(name, patch) for name in patch.modules))


def _has(module: str, patch: RopePatch) -> bool:
    source = _source(module)
    return any(re.search(rf"^class {name}\b", source, re.MULTILINE) for name in patch.rotary_classes)


def _source(module: str) -> str:
    """The text of a module, found without importing the packages that it is in."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def installed() -> dict[str, str]:
    """The versions of the installed pair.

    Raises:
        MissingDependencyError: one of the three is not installed.
    """
    found = version.installed(_PAIR)
    for name in _PAIR:
        if name not in found:
            raise MissingDependencyError(
                f'recording needs {name}, which is not installed; pip install "safe-rope[train]"'
            )
    return {name: release.partition("+")[0] for name, release in found.items()}


def record(patches: Iterable[RopePatch]) -> None:
    """Put what the installed transformers has into the record."""
    pair, content = installed(), read()
    release = pair["transformers"]
    pairs = [kept for kept in content["pairs"] if kept["transformers"] != release]
    families = {**content["families"], release: covered(patches)}
    newest_first = sorted(families, key=_order, reverse=True)
    content = {
        "pairs": sorted([*pairs, pair], key=lambda kept: _order(kept["transformers"]), reverse=True),
        "families": {name: families[name] for name in newest_first},
    }
    RECORD.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
