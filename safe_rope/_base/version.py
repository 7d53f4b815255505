"""The version of safe-rope, which pyproject.toml reads from here, and those of what it meets."""

from __future__ import annotations

import importlib.metadata

VERSION = "0.1.0"

LIBRARIES = ("safe-rope", "torch", "transformers", "deepspeed", "accelerate")


def installed(names: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Return the versions of those packages that are installed; imports none of them."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
