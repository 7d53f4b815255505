"""The guard where no script is edited: launchers, the environment, and transformers' Trainer.

    safe-rope run -- torchrun --nproc_per_node 2 train.py      # `safe_rope.cli.run`
    SAFE_ROPE=1 ...                                            # `safe_rope.integrations.autostart`
    Trainer(..., callbacks=[SafeRopeCallback()])               # `safe_rope.integrations.trainer`

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_rope.integrations.trainer import SafeRopeCallback as SafeRopeCallback

__all__ = ["SafeRopeCallback"]


def __getattr__(name: str) -> Any:
    if name == "SafeRopeCallback":
        from safe_rope import load

        trainer = load("safe_rope.integrations.trainer", f"integrations.{name}")
        globals()[name] = trainer.SafeRopeCallback
        return trainer.SafeRopeCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
