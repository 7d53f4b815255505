"""A module that is protected in one of the two ways."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import safe_rope


def guarded(make: Callable[[], nn.Module], how: str) -> nn.Module:
    """Make a module inside a guard (``"guard"``), or before it is protected (``"protect"``)."""
    if how == "guard":
        with safe_rope.guard():
            return make()
    module = make()
    safe_rope.protect(module)
    return module
