"""Open the guard by itself, in a process whose environment asks for it, once that process imports torch.

A process that never does (a shell, a launcher that only starts others) pays for the import of this file and
no more: torch is waited for, not imported.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_OFF = ("", "0", "false", "no", "off")
_armed = False


def arm() -> None:
    """Guard this process from its import of torch on, if SAFE_ROPE asks for it. Twice is as good as once."""
    global _armed
    # A value that means nothing arms as well: the options are read when torch is there, and refuse it.
    if _armed or os.environ.get("SAFE_ROPE", "").lower() in _OFF:
        return
    _armed = True
    if "torch" in sys.modules:
        _wait_for_torch()
    else:
        sys.meta_path.insert(0, _FirstLook())


class _FirstLook:
    """Sees somebody look for torch or DeepSpeed. Only then is wrapt worth its import, which takes longer."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # DeepSpeed imports torch before it is whole.
        if name not in ("torch", "deepspeed") or self not in sys.meta_path:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        _wait_for_torch()
        return importlib.util.find_spec(name)


def _wait_for_torch() -> None:
    import wrapt

    wrapt.register_post_import_hook(_on_torch, "torch")
    wrapt.register_post_import_hook(_on_deepspeed, "deepspeed")


def _on_torch(module: ModuleType) -> None:
    # An error here fails the import of torch: better than a run that is not guarded.
    from safe_rope.integrations import options
    from safe_rope.integrations.process_guard import ProcessGuard

    ProcessGuard(options.read(os.environ)).start()


def _on_deepspeed(module: ModuleType) -> None:
    from safe_rope.integrations import options

    if options.read(os.environ).autocast:
        from safe_rope.autocast import in_place_of_deepspeeds

        in_place_of_deepspeeds(module)
