"""The exceptions of safe_rope, and the one warning.

    SafeRopeError
    ├── ConfigError              a configuration contradicts itself        (also a ValueError)
    ├── UnsupportedModelError    a model that cannot be protected          (also a TypeError)
    ├── MissingDependencyError   an optional package is not installed      (also an ImportError)
    ├── IncompatibleVersionError an installed package lacks what we hook   (also a RuntimeError)
    ├── PrecisionError           weights of too low precision would be read (also a RuntimeError)
    └── DamagedTablesError       an audit found damaged position tables    (also an AssertionError)

Every message says what was expected, what came, and what to do. This module imports nothing, so that
the scanner and the command line can use it without torch.
"""

from __future__ import annotations


class SafeRopeError(Exception):
    """Base class of every error that safe_rope raises on purpose."""


class ConfigError(SafeRopeError, ValueError):
    """A model, DeepSpeed or safe_rope configuration contradicts itself or is incomplete."""


class UnsupportedModelError(SafeRopeError, TypeError):
    """The model, or a position module in it, is of a kind that safe_rope cannot protect."""


class MissingDependencyError(SafeRopeError, ImportError):
    """An optional dependency is needed for this call and is not installed."""


class IncompatibleVersionError(SafeRopeError, RuntimeError):
    """An installed torch, DeepSpeed or transformers lacks what safe_rope hooks or builds on."""


class PrecisionError(SafeRopeError, RuntimeError):
    """Weights that an engine holds in lower precision for its forward would be read as if they were FP32."""


class DamagedTablesError(SafeRopeError, AssertionError):
    """An audit found position tables that differ from what the model's config asks for."""


class PrecisionWarning(UserWarning):
    """Position information is, or may be, of lower precision than the model's authors meant."""
