"""The two sides of a comparison, as they are given on the command line. Never imports torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safe_rope._audit.command.job import DTYPES, load_model_config
from safe_rope.errors import ConfigError

_DEVICE = re.compile(r"^(cpu|cuda|xpu|mps|npu|hpu)(:\d+)?$")

# What devices and dtypes are compared on where no model is given: Llama 2's embedding.
USUAL_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32768,
}


def read_side(given: str, model: dict[str, Any] | None) -> dict[str, Any]:
    """Tell what ``given`` is: a device, a dtype, a dump of tables, or a model; as plain data.

    Args:
        given: ``cpu``, ``cuda:0``, ``bf16``, ``tables.safetensors``, a config.json or a checkpoint folder.
        model: the config that devices and dtypes are compared on, or None.

    Raises:
        ConfigError: it is none of these.
    """
    config = USUAL_MODEL if model is None else model
    if _DEVICE.match(given):
        return {"name": given, "model": config, "device": given, "dtype": "float32"}
    if given in DTYPES:
        return {"name": given, "model": config, "device": "cpu", "dtype": DTYPES[given]}
    path = Path(given)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ConfigError(f"{given} does not exist; expected a dump that safe-rope audit --dump wrote")
        return {"name": given, "dump": str(path.absolute())}
    if path.exists():
        return {"name": given, "model": load_model_config(given), "device": "cpu", "dtype": "float32"}
    raise ConfigError(
        f"{given!r} is no device (cpu, cuda:0), no dtype (bf16, float32), no dump (.safetensors) and no path "
        "that exists; give one of these for each side"
    )
