"""torch.autocast entered by the user around an engine: refused where the engine has none, else named once.

DeepSpeed asks CUDA whether autocast is on, whatever device is used, and then only warns.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from safe_rope.autocast import hooks
from safe_rope.errors import ConfigError

logger = logging.getLogger(__name__)


def refuse_autocast(engine: Any) -> None:
    """Let the forward of ``engine``, which has no autocast of its own, raise inside of somebody else's.

    Raises:
        ConfigError: at each forward under torch.autocast for the device of the engine.

    """
    device = hooks.device_type()

    def refuse(module: Any, inputs: Any) -> None:
        if torch.is_autocast_enabled(device):
            raise ConfigError(
                f"torch.autocast is enabled for {device} around this engine, but the DeepSpeed config does "
                "not enable the section torch_autocast: gradients and communication would not follow it; "
                'add "torch_autocast": {"enabled": true, "dtype": "bfloat16"} to the config, or leave '
                "torch.autocast before calling the engine"
            )

    engine.register_forward_pre_hook(refuse)


def mention_autocast(engine: Any, dtype: torch.dtype) -> None:
    """Say once, on rank 0, that the engine's own settings replace those of a surrounding torch.autocast."""
    device = hooks.device_type()
    said = False

    def mention(module: Any, inputs: Any) -> None:
        nonlocal said
        if not said and torch.is_autocast_enabled(device):
            said = True
            if engine.global_rank == 0:
                logger.info(
                    "torch.autocast is enabled around the engine; its own torch_autocast settings (%s) hold",
                    dtype,
                )

    engine.register_forward_pre_hook(mention)
