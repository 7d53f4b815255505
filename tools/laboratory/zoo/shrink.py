"""Configs that are small enough to build many times: fewer layers, narrower, the same structure.

Nothing is known about any architecture. Names of attributes say what they count; where the smallest form
cannot be built, the next one leaves more as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

_LAYERS = re.compile(
    r"(^|_)(n_layers?|num_layers|(num_)?hidden_layers|layers|num_blocks|n_blocks|depth|num_stages_layers)$"
)
_NOT_LAYERS = re.compile(
    r"out_|_indices|feature_layer|extract|conv|adapter|postnet|upsample|num_feat|sparse|dense"
)
_HEADS = re.compile(r"(heads|n_head|num_head)$")
_WIDTH = re.compile(
    r"(hidden_size|hidden_dim|embed_dim|embed_size|embedding_size|d_model|n_embd|n_inner|d_ff|d_inner|d_kv_|"
    r"intermediate_size|intermediate_size_mlp|intermediate_dim|ffn_dim|ff_dim|ffn_hidden_size|projection_dim|proj_dim|"
    r"lora_rank|word_embed_proj_dim|model_dim|mlp_dim|feat_dim|codebook_dim|shared_expert_intermediate_size)$"
)
_WIDE = 64
_MISSING = {
    "context_length": 8,
    "prediction_length": 4,
    "rope_scaling": {"rope_type": "default"},
    "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6},
}
_INNER = re.compile(r"(intermediate_size|intermediate_size_mlp|ffn_dim|mlp_dim)$")
_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
_EXPERTS_CHOSEN = re.compile(r"(experts_per_tok|num_experts_per_token|top_k_experts|moe_k|topk)$")
_VOCABULARY = re.compile(r"vocab_size|vocabulary_size|num_embeddings$")
_LENGTH = re.compile(r"(^|_)(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions)$")


@functools.cache
def config_classes() -> dict[str, type[Any]]:
    """Every config class of the installed transformers, by model type."""
    configuration_auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    classes = {}
    for name in sorted(configuration_auto.CONFIG_MAPPING_NAMES):
        try:
            classes[name] = configuration_auto.CONFIG_MAPPING[name]
        except (ImportError, AttributeError, KeyError):
            continue
    return classes


def model_class(config_class: type[Any]) -> type[Any] | None:
    """The base model of a config class; where the auto classes know none, one of the same Python module."""
    modeling_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    names = sorted((name for name in vars(modeling_auto) if name.endswith("_MAPPING")), key=_preference)
    for name in names:
        mapping = getattr(modeling_auto, name)
        try:
            found = mapping[config_class] if config_class in mapping.keys() else None  # noqa: SIM118
        except (ImportError, AttributeError, KeyError, ValueError):
            continue
        if found is not None:
            first: type[Any] = found[0] if isinstance(found, tuple) else found
            return first
    return _sibling(config_class)


def _preference(name: str) -> tuple[int, str]:
    order = ("MODEL_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING")
    return (order.index(name) if name in order else len(order), name)


def _sibling(config_class: type[Any]) -> type[Any] | None:
    from transformers import PreTrainedModel

    module_name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and getattr(value, "config_class", None) is config_class
        and "__init__" in vars(value)
    ]
    return min(found, key=lambda cls: len(cls.__name__)) if found else None


def _small_config(config_class: type[Any], change: Callable[[Any], None]) -> Any:
    config = config_class()
    for part in _parts(config, []):
        change(part)
    return config


def _parts(config: Any, seen: list[int]) -> Iterator[Any]:
    if id(config) in seen:
        return
    seen.append(id(config))
    yield config
    for value in list(vars(config).values()):
        if type(value).__module__.split(".")[0] == "transformers" and hasattr(value, "model_type"):
            yield from _parts(value, seen)


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a config that validates what it is given keeps what it had
        return


def _depth(config: Any) -> None:
    layers = 0
    for name, value in _numbers(config):
        stages = name == "num_layers" and isinstance(getattr(config, "depths", None), list | tuple)
        if _LAYERS.search(name) and not _NOT_LAYERS.search(name) and value > 2 and not stages:
            _set(config, name, 2)
            layers = max(layers, value)
    names = getattr(config, "stage_names", None)
    if isinstance(names, list) and layers and len(names) == layers + 1:
        _set(config, "stage_names", names[:3])
        _set(config, "_out_features", names[2:3])
        _set(config, "_out_indices", [2])
    for name, value in list(vars(config).items()):
        # What is told of each layer gets as short as the layers are; depths of stages get small.
        if isinstance(value, list | tuple) and value:
            if layers and len(value) == layers:
                _set(config, name, type(value)(_both_kinds(list(value))))
            elif name in ("depths", "num_layers", "depth") and all(isinstance(v, int) for v in value):
                _set(config, name, type(value)(min(v, 1 if v == 1 else 2) for v in value))
    for name, value in _numbers(config):
        if _EXPERTS.search(name) and value > 4:
            _set(config, name, 4)
        elif _EXPERTS_CHOSEN.search(name) and value > 2:
            _set(config, name, 2)
        elif name in ("n_group", "topk_group", "first_k_dense_replace") and value > 1:
            _set(config, name, 1)


def _both_kinds(values: list[Any]) -> list[Any]:
    # Where layers differ, keep one of each of the first two kinds.
    other = next((value for value in values if value != values[0]), values[0])
    return [values[0], other]


def _nothing(config: Any) -> None:
    """Leave the default config as it is."""


def _depth_and_vocabulary(config: Any) -> None:
    _depth(config)
    if getattr(config, "vocab_size", 0) is None:
        _set(config, "vocab_size", 512)
    for name, value in _numbers(config):
        if _VOCABULARY.search(name) and value > 512:
            _set(config, name, 512)
    for name, value in _numbers(config):
        if (name.endswith("token_id") or name.endswith("_token_index")) and value >= 512:
            _set(config, name, 500)


def _all_but_rope(config: Any) -> None:
    """Narrow everything by one divisor, the heads with the width, so that the size of a head stays."""
    _depth_and_vocabulary(config)
    if not (getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)):
        for name, value in _numbers(config):
            if _LENGTH.search(name) and value > 8192:
                _set(config, name, 8192)  # older releases keep whole tables, in every layer
    heads = [value for name, value in _numbers(config) if _HEADS.search(name) and "value" not in name]
    widths = [value for name, value in _numbers(config) if _WIDTH.search(name) and value >= 2 * _WIDE]
    common = math.gcd(*heads) if heads else (math.gcd(*widths) if widths else 1)
    divisor = max((d for d in range(1, 17) if common % d == 0 and common // d >= 1), default=1)
    if divisor == 1:
        divisor = common  # a prime number of heads: one is left
    if divisor == common and divisor > 1 and divisor % 2 == 0:
        divisor //= 2
    for name, value in _numbers(config):
        if _HEADS.search(name):
            _set(config, name, max(1, value // divisor))
        elif _WIDTH.search(name) and value >= _WIDE and value % divisor == 0:
            _set(config, name, value // divisor)


def _what_is_left(config: Any) -> None:
    """Fill in what a default leaves out, and narrow what the heads' divisor does not divide."""
    missing = dict(_MISSING)
    with contextlib.suppress(Exception):  # some answer for each layer, and not for the whole
        missing["num_key_value_heads"] = config.num_attention_heads
        missing["head_dim"] = config.hidden_size // config.num_attention_heads
        missing["layer_types"] = ["full_attention"] * config.num_hidden_layers
        missing["mlp_layer_types"] = ["dense"] * config.num_hidden_layers
        if vars(config).get("rope_parameters") == {}:
            kind = {"rope_type": "default", "rope_theta": 10000.0}
            _set(config, "rope_parameters", {name: dict(kind) for name in set(config.layer_types)} or kind)
    for name, value in missing.items():
        if vars(config).get(name, 0) is None:
            _set(config, name, value)
    _all_but_rope(config)
    for name, value in _numbers(config):
        if value > 1024 and (_INNER.search(name) or name.endswith("_vocab")):
            _set(config, name, 512)


@contextlib.contextmanager
def quick_weights() -> Iterator[None]:
    """Fill large parameters with zeros instead of random numbers: no scenario looks at them.

    Random buffers stay random, since what is random is no position table.
    """
    import torch

    names = ("normal_", "uniform_")

    def instead_of(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        @functools.wraps(method)
        def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, torch.nn.Parameter) and self.numel() > 4096:
                return self.zero_()
            return method(self, *args, **kwargs)

        return fill

    for name in names:
        setattr(torch.Tensor, name, instead_of(name))
    try:
        yield
    finally:
        for name in names:
            delattr(torch.Tensor, name)  # inherited again


def count_parameters(build: Callable[[], Any]) -> int | None:
    """Return how many parameters ``build`` would make; None where it cannot run without memory."""
    import torch

    try:
        with torch.device("meta"):
            model = build()
    except Exception:
        return None
    return int(sum(parameter.numel() for parameter in model.parameters()))


def buildable(config_class: type[Any], cls: type[Any], largest: int) -> tuple[Any | None, str]:
    """Return the smallest config that ``cls`` can be built with; without one, why not.

    Args:
        config_class: its default is where shrinking starts.
        cls: the model.
        largest: parameters of a model that is still built.

    """
    reason = ""
    for change in (_all_but_rope, _what_is_left, _depth_and_vocabulary, _depth, _nothing):
        try:
            config = _small_config(config_class, change)
            count = count_parameters(functools.partial(build, cls, config))
            if count is not None and count > largest:
                reason = reason or f"{count / 1e6:.0f} million parameters at its smallest"
                continue
            build(cls, config)
            return config, ""
        except Exception as error:
            if change is _nothing and reason:
                continue  # why the smaller ones cannot be built says more
            reason = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"[:160]
    return None, reason


def build(cls: type[Any], config: Any, seed: int = 0) -> Any:
    """Build a model of ``cls`` from a copy of ``config``."""
    import torch

    torch.manual_seed(seed)
    return cls(copy.deepcopy(config))
