"""The guard where no script is edited: launchers, the environment, transformers' Trainer and Lightning.

    safe-rope run -- torchrun --nproc_per_node 2 train.py      # `safe_rope.cli.run`
    SAFE_ROPE=1 ...                                            # `safe_rope.integrations.autostart`
    Trainer(..., callbacks=[SafeRopeCallback()])               # `safe_rope.integrations.trainer`
    Trainer(..., callbacks=[SafeRopeLightningCallback()])      # `safe_rope.integrations.lightning`

Importing this package imports neither torch nor transformers nor lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_rope.integrations.lightning import SafeRopeLightningCallback as SafeRopeLightningCallback
    from safe_rope.integrations.trainer import SafeRopeCallback as SafeRopeCallback

__all__ = ["SafeRopeCallback", "SafeRopeLightningCallback"]

_HOMES = {"SafeRopeCallback": "trainer", "SafeRopeLightningCallback": "lightning"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from safe_rope import load

        value = getattr(load(f"{__name__}.{_HOMES[name]}", f"integrations.{name}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
