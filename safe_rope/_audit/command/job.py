"""What `safe-rope audit` and `compare` were asked: configs, sides, what to measure. Never imports torch."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safe_rope.errors import ConfigError

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
_SECTIONS = {
    "zero_optimization": '{"stage": 3}',
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), '{"enabled": true}'),
}
"""The sections of a DeepSpeed config that decide over position tables, each with an example."""
_LONGEST_DUMP = 16_384
_NAMED = 3
_HUB_NAME = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)(?<!\.safetensors)$")
_DEVICE = re.compile(r"^(cpu|cuda|xpu|mps|npu|hpu)(:\d+)?$")

# What devices and dtypes are compared on where no model is given: Llama 2's embedding.
_USUAL_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True)
class Job:
    """One audit, as plain data: it is pickled for the process that measures.

    Attributes:
        name: what the report calls the model.
        model: the content of its ``config.json``.
        deepspeed: the content of the DeepSpeed config, or None.
        dtype: what the model is loaded in and cast to.
        positions: where to measure; empty for a selection below ``longest``.
        longest: the exclusive limit of that selection; None for the model's own max_position_embeddings.
        dump: whether to keep the tables.
        judged: parts of the names of the load paths that the verdict is about; empty for all.
    """

    name: str
    model: dict[str, Any]
    deepspeed: dict[str, Any] | None
    dtype: str
    positions: Sequence[int] = ()
    longest: int | None = None
    dump: bool = False
    judged: tuple[str, ...] = ()

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, or None without DeepSpeed."""
        return None if self.deepspeed is None else stage_of(self.deepspeed)

    def judges(self, path: str) -> bool:
        """Whether the verdict is about a load path."""
        return not self.judged or any(part in path for part in self.judged)

    def measured(self, announced: int) -> list[int]:
        """Return the positions to measure for a model that announces so many."""
        return list(self.positions) or spread(self.longest or announced, beyond=self.longest is None)

    def dumped(self, announced: int) -> list[int]:
        """Return the positions whose rows a dump holds: every one of a beginning, then the measured ones."""
        if self.positions:
            return list(self.positions)
        longest = self.longest or announced
        return sorted({*range(min(longest, _LONGEST_DUMP)), *spread(longest)})


def spread(longest: int, beyond: bool = False) -> list[int]:
    """Return positions below ``longest``: two an octave, and where 16-bit dtypes begin to lose integers.

    ``beyond``: also twice ``longest``, where a table that was cached is built anew.
    """
    # Powers of two are left out: their products with a frequency are never rounded, so they show less.
    octaves = {round(2 ** (step / 2)) - (step + 1) % 2 for step in range(2 * longest.bit_length() + 1)}
    usual = {0, 1, 255, 257, 2047, 2049, longest - 1}
    found = {p for p in octaves | usual if 0 <= p < longest}
    return sorted(found | {2 * longest - 1} if beyond else found)


def load_model_config(path: str) -> dict[str, Any]:
    """Return the content of a ``config.json``: itself, its checkpoint folder, or its name on the hub.

    Raises:
        ConfigError: there is none, it is no JSON object, or it names no model_type.
    """
    file = Path(path)
    if not file.exists() and (cached := _in_hub_cache(path)) is not None:
        file = cached
    if file.is_dir():
        if not (file / "config.json").is_file():
            raise ConfigError(f"{path} holds no config.json; give {_instead_of(file)}")
        file /= "config.json"
    config = _json_object(file, "a checkpoint folder or a config.json")
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{file} names no model_type, so its architecture cannot be told; add one")
    return config


def _instead_of(folder: Path) -> str:
    """What to give in the place of a folder without a ``config.json``, as far as its files tell."""
    adapter = folder / "adapter_config.json"
    base = _json_object(adapter, "PEFT's").get("base_model_name_or_path") if adapter.is_file() else None
    if base:
        return f"the model that it adapts: {base}"
    near = sorted(folder.glob("*/config.json")) or [*folder.resolve().parent.glob("config.json")]
    return " or ".join(str(file.parent) for file in near[:_NAMED]) or "a checkpoint folder or a config.json"


def _in_hub_cache(name: str) -> Path | None:
    """The ``config.json`` of a model that was downloaded; None where ``name`` is no name on the hub."""
    if not _HUB_NAME.match(name) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise ConfigError(
            f"{name} is no path that exists, and the local Hugging Face cache has no config.json of it; "
            f"get it with: hf download {name} config.json"
        )
    return Path(found)


def load_deepspeed_config(path: str) -> dict[str, Any]:
    """Return the content of a DeepSpeed config.

    Raises:
        ConfigError: there is none, it is no JSON object, its ZeRO stage or dtypes make no sense, or a key
            is nearly one that decides over position tables.
    """
    config = _json_object(Path(path), "a DeepSpeed config")
    for key in config:
        near = get_close_matches(key.lower(), _SECTIONS, 1, 0.86)
        if near and key not in _SECTIONS:
            raise ConfigError(
                f"{path} has an unknown key {key!r}, which DeepSpeed ignores; did you mean {near[0]!r}?"
            )
    for name, example in _SECTIONS.items():
        if not isinstance(section := config.get(name, {}), dict):
            raise ConfigError(f"{path}: {name} must be an object such as {example}, got {section!r}")
    stage = stage_of(config)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    if all(config.get(name, {}).get("enabled") is True for name in ("bf16", "fp16")):
        raise ConfigError(f"{path}: bf16 and fp16 are both enabled; keep one")
    return config


def stage_of(config: dict[str, Any]) -> Any:
    """The ZeRO stage of a DeepSpeed config."""
    return config.get("zero_optimization", {}).get("stage", 0)


def read_side(given: str, model: dict[str, Any] | None) -> dict[str, Any]:
    """Tell what ``given`` is: a device, a dtype, a dump of tables, or a model; as plain data.

    Args:
        given: ``cpu``, ``cuda:0``, ``bf16``, ``tables.safetensors``, a config.json or a checkpoint folder.
        model: the config that devices and dtypes are compared on, or None.

    Raises:
        ConfigError: it is none of these.
    """
    config = _USUAL_MODEL if model is None else model
    if _DEVICE.match(given):
        return {"name": given, "model": config, "device": given, "dtype": "float32"}
    if given in DTYPES:
        return {"name": given, "model": config, "device": "cpu", "dtype": DTYPES[given]}
    path = Path(given)
    if path.suffix == ".safetensors" or _is_of_tensors(path):
        if not path.is_file():
            raise ConfigError(f"{given} does not exist; expected a dump that safe-rope audit --dump wrote")
        return {"name": given, "dump": str(path.absolute())}
    if path.exists() or _in_hub_cache(given) is not None:
        return {"name": given, "model": load_model_config(given), "device": "cpu", "dtype": "float32"}
    raise ConfigError(
        f"{given!r} is no device (cpu, cuda:0), no dtype (bf16, float32), no dump (.safetensors) and no path "
        "that exists; give one of these for each side"
    )


def _is_of_tensors(path: Path) -> bool:
    """Whether a file begins as one of safetensors does, whatever its name: a length, then an object."""
    try:
        with path.open("rb") as opened:
            start = opened.read(9)
    except OSError:
        return False
    return start[4:] == b"\0\0\0\0{"


def choose_dtype(asked: str | None, model: dict[str, Any], deepspeed: dict[str, Any] | None) -> str:
    """The dtype to load in: what was asked, DeepSpeed's, the checkpoint's, or bfloat16."""
    if asked is not None:
        return DTYPES[asked]
    if deepspeed is not None:
        sections = (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
        said = {
            dtype: deepspeed.get(name, {}).get("enabled") for name, dtype in sections if name in deepspeed
        }
        chosen = [dtype for dtype, enabled in said.items() if enabled is True]
        possible = chosen or [dtype for dtype, enabled in said.items() if enabled == "auto"]
        if len(possible) < 2:
            return possible[0] if possible else "float32"
    text = model.get("text_config")
    for config in (model, text if isinstance(text, dict) else {}):
        named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if named in DTYPES and DTYPES[named] != "float32":
            return DTYPES[named]
    return "bfloat16"


def _json_object(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected {what}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; expected {what}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
