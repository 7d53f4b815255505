"""Everything that can be wrong with a config or a model, found before DeepSpeed builds anything.

DeepSpeed accepts most of what is refused here and trains on, in another precision than was asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from safe_rope.autocast import _deepspeed, releases
from safe_rope.autocast.settings import SECTION, AutocastSettings
from safe_rope.errors import ConfigError

KEYS = ("enabled", "dtype", "lower_precision_safe_modules")
QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
DTYPES = {
    **dict.fromkeys(("torch.bfloat16", "bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("torch.float16", "fp16", "float16", "half"), torch.float16),
}
COMMUNICATION_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REDUCE_BUCKET_SIZE = 500_000_000  # elements, what DeepSpeed takes where the config says nothing

LOW = ("fp16", "bf16", "bfloat16")
"""Sections that say in which dtype zero.Init makes parameters; autocast trains these as they are."""


def check_config(config: Mapping[str, Any]) -> AutocastSettings | None:
    """Check what a DeepSpeed config says about autocast against the installed DeepSpeed.

    Returns:
        the settings; None where the section ``torch_autocast`` is absent or disabled.

    Raises:
        ConfigError: the config contradicts itself, has a misspelled key, or asks for what the installed
            DeepSpeed does wrong; the message says what to change.

    """
    _check_spelling(config, [SECTION], 0.8)
    section = config.get(SECTION)
    if section is None:
        return None
    _check_object(section, SECTION, '{"enabled": true, "dtype": "bfloat16"}')
    for key in section:
        if key not in KEYS:
            raise ConfigError(f"{SECTION} has an unknown key {key!r}{_nearest(str(key), KEYS)}")
    enabled = section.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{SECTION}.enabled must be true or false, got {enabled!r}")
    if not enabled:
        return None
    _check_spelling(config, _deepspeed.known_config_keys(), 0.86)
    zero = config.get("zero_optimization", {})
    _check_object(zero, "zero_optimization", '{"stage": 2}')
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    accumulation = _accumulation_steps(config)
    dtype = _dtype(section)
    _check_exclusive(config, zero)
    _check_release(int(stage), accumulation, dtype, zero)
    bucket_size = zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)
    return AutocastSettings(
        dtype=dtype,
        safe_modules=_safe_modules(section),
        stage=int(stage),
        accumulation_steps=accumulation,
        reduce_dtype=_reduce_dtype(config, dtype),
        reduce_bucket_size=_whole(bucket_size, "zero_optimization.reduce_bucket_size"),
    )


def check_model(model: nn.Module, settings: AutocastSettings) -> None:
    """Check that autocast can train ``model``: its trained parameters are all FP32, or all in its dtype.

    Raises:
        ConfigError: naming the first parameters that are not.

    """
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            f"{SECTION} is enabled and the model's weights are quantised, which autocast cannot train; load "
            "the model without quantisation"
        )
    low = settings.dtype
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_dtypes(trained, {torch.float32, low}, "gradients in another dtype lose what autocast keeps")
    if low == torch.float16 and settings.stage == 0 and not is_mixed(trained.values()):
        why = "torch's GradScaler, which scales the loss without ZeRO, takes no float16 gradient"
        _check_dtypes(trained, {torch.float32}, why)


def is_mixed(trained: Iterable[nn.Parameter]) -> bool:
    """Whether parameters have several dtypes."""
    return len({parameter.dtype for parameter in trained}) > 1


# ---- one check each ------------------------------------------------------------------------------------


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    section = config.get(name)
    return isinstance(section, Mapping) and bool(section.get("enabled", False))


def _check_dtypes(trained: Mapping[str, nn.Parameter], right: Collection[torch.dtype], why: str) -> None:
    wrong = [f"{name} ({p.dtype})" for name, p in trained.items() if p.dtype not in right]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ConfigError(
            f"{SECTION} is enabled: expected trained parameters in {' or '.join(sorted(map(str, right)))}, "
            f"because {why}; got {shown}. Convert these with .to(...), or freeze them"
        )


def _check_spelling(config: Mapping[str, Any], known: Collection[str], alike: float) -> None:
    """A key of one's own is allowed; one that is nearly a known one is not, since DeepSpeed ignores both."""
    for key in config:
        if isinstance(key, str) and key not in known:
            for near in difflib.get_close_matches(key.lower(), known, 1, alike):
                raise ConfigError(
                    f"the DeepSpeed config has an unknown key {key!r}, which DeepSpeed ignores; did you mean "
                    f"{near!r}?"
                )


def _check_object(value: Any, where: str, example: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object such as {example}, got {value!r}")


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(known)}" if len(known) <= 8 else ""


def _dtype(section: Mapping[str, Any]) -> torch.dtype:
    expected = 'expected "bfloat16" or "float16"'
    if "dtype" not in section:
        raise ConfigError(f'{SECTION}.dtype is missing: {expected}; add "dtype": "bfloat16"')
    value = section["dtype"]
    found = DTYPES.get(str(value).lower())
    if found is None:
        near = _nearest(value, DTYPES) if isinstance(value, str) else ""
        raise ConfigError(f"{SECTION}.dtype: {expected}, got {value!r}{near}")
    return found


def _safe_modules(section: Mapping[str, Any]) -> Literal["auto"] | tuple[type[nn.Module], ...]:
    value = section.get("lower_precision_safe_modules", "auto")
    if value is None or value == "auto":
        return "auto"
    if not isinstance(value, (list, tuple)):
        where = f"{SECTION}.lower_precision_safe_modules"
        raise ConfigError(f'{where} must be "auto" or a list of class names, got {value!r}')
    return tuple(map(import_class, value))


def import_class(name: Any) -> type[nn.Module]:
    """Import a module class by its qualified name; raise ConfigError where that is none."""
    where = f"{SECTION}.lower_precision_safe_modules"
    if not isinstance(name, str):
        raise ConfigError(f"{where} must hold class names such as 'torch.nn.Linear', got {name!r}")
    package, _, cls = name.rpartition(".")
    if not package:
        raise ConfigError(f"{where}: {name!r} has no package; write for example torch.nn.{name}")
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{where} names {name!r}, which cannot be imported: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {name!r} is no qualified class name such as torch.nn.Linear") from error
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"{where}: {package} has no module class {cls!r}{_nearest(cls, classes)}")
    return found


def _whole(value: Any, where: str) -> int:
    if value == "auto":
        raise ConfigError(f'{where} is still "auto", which only the HF Trainer fills in; give a number')
    # JSON writes large sizes as 5e8, which is a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ConfigError(f"{where} must be a whole number above 0, got {value!r}")
    return int(value)


def _accumulation_steps(config: Mapping[str, Any]) -> int:
    """The steps that the config names, or that follow from its batch sizes once the world is known."""
    if config.get("gradient_accumulation_steps") is not None:
        return _whole(config["gradient_accumulation_steps"], "gradient_accumulation_steps")
    if config.get("train_batch_size") is None or config.get("train_micro_batch_size_per_gpu") is None:
        return 1
    whole, part = (
        _whole(config[name], name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")
    )
    return max(1, whole // (part * _deepspeed.data_parallel_size(config)))


def _check_exclusive(config: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    if _enabled(config, "amp"):
        raise ConfigError(f"the sections {SECTION} and amp are both enabled, and both would cast; remove amp")
    for name in QUANTISED:
        if zero.get(name):
            raise ConfigError(
                f"zero_optimization.{name} cannot be combined with {SECTION}: it would ignore "
                f"which parameters are safe; remove {name}"
            )


def _reduce_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype | None:
    value = config.get("communication_data_type")
    if value is None and config.get("sequence_parallel_size", 1) > 1:
        value = config.get("seq_parallel_communication_data_type", "fp32")
    if value is None:
        return None
    asked = COMMUNICATION_DTYPES.get(str(value).lower())
    if asked is None:
        known = ", ".join(COMMUNICATION_DTYPES)
        raise ConfigError(f"communication_data_type must be one of {known}, got {value!r}")
    if asked not in (torch.float32, dtype):
        raise ConfigError(
            f"communication_data_type {value!r} is neither fp32 nor {SECTION}.dtype ({dtype}); remove it to "
            "reduce safe parameters in the autocast dtype, or set it to fp32"
        )
    return asked


def _check_release(stage: int, accumulation: int, dtype: torch.dtype, zero: Mapping[str, Any]) -> None:
    release = _deepspeed.release()
    if not _deepspeed.has_autocast():
        raise ConfigError(
            f"{SECTION} needs DeepSpeed {releases.FIRST_RELEASE} or newer, {release} is installed and would "
            f"train in FP32 or on wrong gradients; upgrade DeepSpeed, or use the bf16 section instead"
        )
    overlap = bool(zero.get("overlap_comm", False)) or not zero.get("contiguous_gradients", True)
    for fault in releases.faults(release, stage, accumulation, overlap):
        raise ConfigError(
            f"DeepSpeed {release} with {SECTION}, ZeRO {stage} and {accumulation} accumulation steps "
            f"{fault.what}: {fault.remedy}"
        )
    if dtype == torch.float16:
        _check_float16(release, stage, zero)
    _deepspeed.mark_name()


def _check_float16(release: str, stage: int, zero: Mapping[str, Any]) -> None:
    if stage == 0 and not _deepspeed.scales_without_zero():
        raise ConfigError(
            f"DeepSpeed {release} has no loss scale for float16 at ZeRO 0: use bfloat16, or ZeRO 1, 2 or 3"
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if isinstance(section, Mapping) and section.get("device", "none") not in (None, "none"):
            raise ConfigError(
                f"float16 with zero_optimization.{name} is not supported: overflow is not checked "
                "on offloaded gradients; use bfloat16, or remove the offload"
            )
