"""A model that holds positions and next to nothing else: one layer of each kind, one head, no real weights.

The dimensions that a rotary embedding follows from are the model's own; a skeleton whose embedding would
differ from the model's is refused. So a 70B config is built in a second and in a few megabytes.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope.errors import ConfigError, UnsupportedModelError
from safe_rope.frequencies import RopeSpec

# Any: what transformers' annotations say differs between the releases.
transformers: Any = importlib.import_module("transformers")

_VOCABULARY = 64
_WIDTH = 32
_MOST = 2**26
"""Weights that a small model may have."""
_NARROWED = (
    "intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "q_lora_rank",
    "kv_lora_rank",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim", "max_position_embeddings")
_PARTS = {"encoder_layers", "decoder_layers"}
_HEADS = ("attention_heads", "key_value_heads")
# How attention is computed and how weights are stored change no position, and may not be installed here.
_ELSEWHERE = ("quantization_config", "attn_implementation", "_attn_implementation")


def read_config(content: Mapping[str, Any]) -> Any:
    """Return transformers' config object for the content of a ``config.json``.

    Raises:
        UnsupportedModelError: the installed transformers does not know the model type.
        ConfigError: it knows it and refuses the values.
    """
    version = transformers.__version__
    model_type = content["model_type"]
    left_out = ("model_type", "auto_map", *_ELSEWHERE)
    values = {key: value for key, value in content.items() if key not in left_out}
    try:
        config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    except KeyError:
        raise UnsupportedModelError(
            f"transformers {version} knows no model type {model_type!r}; audit it with a release that does "
            "(a class of one's own can be audited live, with safe_rope.audit(model))"
        ) from None
    try:
        return config_class.from_dict(copy.deepcopy(values))
    except Exception as error:  # whatever a config class raises is about the values
        raise ConfigError(f"transformers {version} refuses this {model_type} config: {error}") from error


class Skeleton:
    """The small model of a config, and how it was made small.

    Attributes:
        config: the small config.
        whole: the one that it was made of.
        announced: max_position_embeddings, or 2048 where nothing says so.
        description: the embedding in words, for the report.
        left_out: what of the model it does not have, in words.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        whole = read_config(content)
        try:
            text = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
            if text is whole and isinstance(content.get("text_config"), dict):
                text = getattr(whole, "text_config", whole)  # before transformers 4.44
            self.model_type: str = text.model_type
            self.left_out = _left_out(whole, text, content)
            self.config, self.whole = _shrunk(text), text
        except ConfigError:
            raise
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"expected a text model's config, with hidden_size and num_hidden_layers, and got "
                f"{content['model_type']!r}, of which no small model can be made ({error}); audit the model "
                "live, with safe_rope.audit(model)"
            ) from error
        specs = _specs(text)
        if specs != _specs(self.config):
            raise UnsupportedModelError(
                f"a small {self.model_type} would have other positions than the model itself: expected "
                f"{specs}, got {_specs(self.config)}; audit the model live, with safe_rope.audit(model)"
            )
        self.announced = getattr(text, "max_position_embeddings", None) or 2048
        self.description = _describe(specs)
        # What the config tells of no rotary embedding may follow from any width, and from the heads.
        self._ways = _WAYS if isinstance(specs, dict) else (*_WAYS[2:], *_WAYS[:2])
        self._built = False

    def build(self) -> nn.Module:
        """Return the small model, as its constructor makes it here and now.

        Raises:
            UnsupportedModelError: transformers has no model of this type, or cannot build it.
        """
        version, config = transformers.__version__, self.config
        autos = [transformers.AutoModelForCausalLM, transformers.AutoModel]
        if getattr(config, "is_encoder_decoder", False):
            autos.reverse()  # a causal model of it would have no encoder
        auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
        if auto is None:
            raise UnsupportedModelError(f"transformers {version} has no model of type {self.model_type!r}")
        if self._built:
            model: nn.Module = auto.from_config(copy.deepcopy(config))
            return model
        problem: Exception | None = None
        for way in self._ways:
            try:
                config = _shrunk(self.whole, *way)
                if hasattr(config, "validate"):  # transformers 5 does so when a model is saved
                    config.validate()
                if way.is_wide and not _is_small(auto, config):
                    continue
                model = auto.from_config(copy.deepcopy(config))
            except Exception as error:  # a constructor can fail in any way
                problem = problem or error
                continue
            if _specs(config) != _specs(self.config):
                continue
            self.config, self._built = config, True
            if not way.is_wide and self._ways is not _WAYS:
                self.left_out.append(
                    "its width and heads, which sinusoids and slopes follow from (too large)"
                )
            return model
        why = f"{type(problem).__name__}: {problem}; {self.description}"
        raise UnsupportedModelError(
            f"transformers {version} cannot build a small {self.model_type}: {why}; "
            "audit the model live, with safe_rope.audit(model)"
        ) from problem


class _Way(NamedTuple):
    """How a model is made small: whether it has its own width and heads, and whether all its layers."""

    is_wide: bool
    has_every_layer: bool


_WAYS = tuple(itertools.starmap(_Way, itertools.product((False, True), (False, True))))


def _is_small(auto: Any, config: Any) -> bool:
    """Whether the weights of a model fit, as they are made on the meta device."""
    with torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config))
    return bool(sum(one.numel() for one in model.parameters()) <= _MOST)


def _left_out(whole: Any, text: Any, content: Mapping[str, Any]) -> list[str]:
    """Say which parts of a model, and which code of a checkpoint, a skeleton of ``text`` does not have."""
    said = []
    if text is not whole:
        parts = [name for name, value in vars(whole).items() if hasattr(value, "model_type")]
        others = [name for name in parts if getattr(whole, name) is not text]
        said += [f"{', '.join(others)} of {whole.model_type}, beside its text model"] if others else []
    own = content.get("auto_map")
    if isinstance(own, Mapping) and any(str(name).startswith("AutoModel") for name in own):
        said.append("the checkpoint's own code (auto_map), which trust_remote_code lets run")
    return said


def _shrunk(whole: Any, is_wide: bool = False, has_every_layer: bool = False) -> Any:
    by_layer = _by_layer(whole)
    if by_layer:
        whole = copy.deepcopy(whole)
        whole.per_layer_config = None  # until then no value that differs between layers can be read
    for name in _COUNTS:
        value = getattr(whole, name, 1)
        is_left_out = value is None or (name == "head_dim" and value == 0)  # as of a model with several
        if not is_left_out and (type(value) is not int or value < 1):
            raise ConfigError(f"the config's {name} must be an integer from 1 on, got {value!r}")
    config = copy.deepcopy(whole)
    heads = getattr(whole, "num_attention_heads", None) or 1
    head_dim = getattr(whole, "head_dim", None) or whole.hidden_size // heads
    every = range(int(config.num_hidden_layers))
    kept = [*every] if has_every_layer else _keep_one_layer_of_each_kind(config, by_layer)
    for name, value in list(vars(config).items()):
        is_count = type(value) is int
        if name in _PARTS or (is_count and name.endswith(_HEADS) and not is_wide):
            setattr(config, name, 1)
        if is_count and name.endswith("_token_id") and value >= _VOCABULARY:
            setattr(config, name, 0)
    if not is_wide:
        config.num_attention_heads = 1
        if getattr(whole, "num_key_value_heads", None):
            config.num_key_value_heads = 1
        config.hidden_size = head_dim
    config.vocab_size = _VOCABULARY
    # An id beyond the vocabulary is refused, and transformers 5 cannot pad under zero.Init.
    if hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(config, name):
            try:
                setattr(config, name, None)
            except Exception:  # some configs want a number
                setattr(config, name, 0)
    for name in _NARROWED:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, _WIDTH)
    if by_layer:
        config.per_layer_config = {
            index: {name: _narrowed(name, value) for name, value in by_layer.get(layer, {}).items()}
            for index, layer in enumerate(kept)
        }
    return config


def _by_layer(config: Any) -> dict[int, dict[str, Any]]:
    """Return the values in which single layers of a config differ from it, by their numbers."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): values for layer, values in config.to_dict()["per_layer_config"].items()}


def _narrowed(name: str, value: Any) -> Any:
    if not isinstance(value, int):
        return value
    return _WIDTH if name in _NARROWED else 1 if name.endswith("_heads") else value


def _keep_one_layer_of_each_kind(config: Any, own: Mapping[int, Any]) -> list[int]:
    """Leave one layer of each kind, whose values the lists of a config and ``own`` have; return which."""
    count = int(config.num_hidden_layers)
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in lists.items() if _numbers_layers(name, value, count)}
    by_layer = {name: value for name, value in lists.items() if len(value) == count and name not in numbers}
    rules = _rules(config, count)
    kinds: dict[str, int] = {}
    for layer in range(count):
        said = [value[layer] for value in by_layer.values()], [layer in value for value in numbers.values()]
        kinds.setdefault(repr((said, [rule[layer] for rule in rules], own.get(layer))), layer)
    kept = list(range(max(kinds.values()) + 1)) if rules else list(kinds.values())
    for name, value in by_layer.items():
        setattr(config, name, [value[layer] for layer in kept])
    for name, value in numbers.items():
        setattr(config, name, [index for index, layer in enumerate(kept) if layer in value])
    config.num_hidden_layers = len(kept)
    return kept


def _rules(config: Any, count: int) -> list[Sequence[Any]]:
    """Lists of the kinds of layers that a config computes from their numbers, as RecurrentGemma's does."""
    names = [n for n in dir(type(config)) if "layer" in n and isinstance(getattr(type(config), n), property)]
    found = [getattr(config, name, None) for name in names]
    lists = [value for value in found if isinstance(value, list | tuple) and len(value) == count]
    return [value for value in lists if any(kind != value[0] for kind in value)]


def _numbers_layers(name: str, value: Sequence[Any], count: int) -> bool:
    """Whether a list of a config has the numbers of some of its layers, as Llama 4's ``moe_layers``."""
    if "layer" not in name or not value or any(type(number) is not int for number in value):
        return False
    return value[0] >= 0 and value[-1] < count and all(a < b for a, b in itertools.pairwise(value))


def _specs(config: Any) -> dict[str | None, RopeSpec] | str:
    """The rotary embeddings that a config asks for; in words where it asks for none that are known."""
    parameters = getattr(config, "rope_parameters", None)
    nested = isinstance(parameters, Mapping) and all(isinstance(v, Mapping) for v in parameters.values())
    names: list[str | None] = sorted(parameters) if nested and parameters else [None]
    try:
        return {name: RopeSpec.from_config(config, name) for name in names}
    except ConfigError as error:
        return f"no rotary embedding that the config tells ({str(error).split(';')[0]})"


def _describe(specs: dict[str | None, RopeSpec] | str) -> str:
    if isinstance(specs, str):
        return specs
    said = []
    for name, spec in specs.items():
        part = "" if spec.rotary_dim == spec.head_dim else f" of head_dim {spec.head_dim}"
        kind = f"{spec.rope_type} RoPE, theta {spec.rope_theta:g}, rotary_dim {spec.rotary_dim}{part}"
        said.append(kind if name is None else f"{name}: {kind}")
    return "; ".join(said)
