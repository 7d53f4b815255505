"""The version of safe-rope."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """Return the version that is installed, or that of these sources where none is."""
    from importlib import metadata  # 10 ms, which a command that does not ask is spared

    try:
        return metadata.version("safe-rope")
    except metadata.PackageNotFoundError:
        return "0+unknown"
