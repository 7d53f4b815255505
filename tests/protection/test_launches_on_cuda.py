"""What a guarded model launches on CUDA, counted on fake tensors: a torch that is built for CUDA, no GPU.

An operator that neither makes a view nor asks for memory is a launch. Two depths of one model tell what a
layer launches.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import safe_rope


def _takes_fake_cuda() -> bool:
    try:
        with FakeTensorMode():
            torch.ones(1).to("cuda")
    except (RuntimeError, AssertionError):  # it asks the driver, or is not built for CUDA
        return False
    return True


pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not _takes_fake_cuda(), reason="this torch fakes no CUDA device without a driver"),
]
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
LONG: dict[str, Any] = {
    "type": "longrope",
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
NO_LAUNCH = ("empty", "view", "reshape", "detach", "alias", "sym_", "prim", "_local_scalar_dense")


def _llama(layers: int, **more: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, num_hidden_layers=layers, num_key_value_heads=2, **more)
    )


def _longrope(layers: int) -> Any:
    return _llama(
        layers, max_position_embeddings=64, rope_scaling={**LONG, "factor": 2.0, "type": "longrope"}
    )


def _gpt_neox(layers: int) -> Any:
    config = transformers.GPTNeoXConfig(**COMMON, num_hidden_layers=layers, rotary_pct=0.5)
    return transformers.GPTNeoXForCausalLM(config)


def _mrope(layers: int) -> Any:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as modelling

    config = transformers.Qwen2VLConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    )
    if not hasattr(modelling, "Qwen2VLTextModel"):
        pytest.skip("this transformers builds no text model of Qwen2-VL alone")
    return modelling.Qwen2VLTextModel(getattr(config, "text_config", config))


def _gptj(layers: int) -> Any:
    config = transformers.GPTJConfig(
        vocab_size=64, n_embd=64, n_head=4, rotary_dim=8, n_positions=64, n_layer=layers
    )
    return transformers.GPTJForCausalLM(config)


def _esm(layers: int) -> Any:
    config = transformers.EsmConfig(
        **COMMON, num_hidden_layers=layers, position_embedding_type="rotary", max_position_embeddings=64
    )
    return transformers.EsmModel(config, add_pooling_layer=False)


MODELS = {
    "llama": _llama,
    "gpt_neox": _gpt_neox,
    "longrope": _longrope,
    "mrope": _mrope,
    "gptj": _gptj,
    "esm": _esm,
}


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        makes_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        self.reads += name == "_local_scalar_dense" and args[0].is_cuda
        on_device = (isinstance(result, torch.Tensor) and result.is_cuda) or isinstance(result, tuple | list)
        if on_device and not makes_view and not name.startswith(NO_LAUNCH):
            self.launches[name] += 1
        return result


@pytest.fixture
def overwritten() -> Iterator[None]:
    """A module takes new parameters when it is moved: fake ones in the place of real ones."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def _counted(model: Any, length: int) -> _Counted:
    counted = _Counted()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        model.to("cuda", torch.bfloat16).eval()
        ids = torch.ones(1, length, dtype=torch.long, device="cuda")
        with counted:
            model(input_ids=ids, **({} if "Esm" in type(model).__name__ else {"use_cache": False}))
    return counted


def _of_a_layer(kind: str, length: int, guard: Callable[[], Any]) -> tuple[float, _Counted]:
    """Return how many kernels a layer launches, and what was counted in the deeper model."""
    counts = []
    for layers in (2, 4):
        with guard():
            model = MODELS[kind](layers)
        counts.append(_counted(model, length))
    few, many = (sum(count.launches.values()) for count in counts)
    return (many - few) / 2, counts[-1]


@pytest.mark.usefixtures("overwritten")
@pytest.mark.parametrize("length", [1, 128])
@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_launches_less_than_in_the_stock_model(kind: str, length: int) -> None:
    # The stock longrope reads the longest position; its layers are Llama's.
    stock, _ = _of_a_layer("llama" if kind == "longrope" else kind, length, contextlib.nullcontext)
    launches, counted = _of_a_layer(kind, length, safe_rope.guard)
    assert not counted.reads
    if not counted.launches["rotary"] and RELEASE < (5, 20):
        pytest.skip("no kernel of ours does what this transformers' function does besides rotating")
    assert stock - launches >= 8, (stock, launches)
