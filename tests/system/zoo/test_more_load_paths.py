"""The other ways that a model comes into being: each gives the position tables of a clean FP32 model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_families import stored

import safe_rope

pytestmark = pytest.mark.contract

CONFIGS: dict[str, Callable[[], Any]] = {
    "phi": lambda: transformers.PhiConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        pad_token_id=None,  # 5.0.0 asks for it, and has no default
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=97, n_embd=64, n_layer=2, n_head=2, rotary_dim=16, n_positions=512
    ),
}


def auto(architecture: str) -> Any:
    return transformers.AutoModelForCausalLM


def _from_config(architecture: str, folder: Path) -> Any:
    return auto(architecture).from_config(CONFIGS[architecture](), torch_dtype=torch.bfloat16)


def _default_dtype(architecture: str, folder: Path) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return auto(architecture).from_config(CONFIGS[architecture]())
    finally:
        torch.set_default_dtype(torch.float32)


def _device_map(architecture: str, folder: Path) -> Any:
    return auto(architecture).from_pretrained(folder, torch_dtype=torch.bfloat16, device_map={"": "cpu"})


def _device_map_auto(architecture: str, folder: Path) -> Any:
    """Two places by size: what does not fit in memory is loaded from disk for each forward."""
    if auto(architecture)._model_mapping[type(CONFIGS[architecture]())]._no_split_modules is None:
        pytest.skip("this release cannot tell where the architecture may be split")
    return auto(architecture).from_pretrained(
        folder,
        torch_dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": "250KB"},
        offload_folder=folder / "offload",
    )


def _dispatch(architecture: str, folder: Path) -> Any:
    import accelerate

    with accelerate.init_empty_weights():
        model = auto(architecture).from_config(CONFIGS[architecture]())
    model.tie_weights()
    return accelerate.load_checkpoint_and_dispatch(
        model, str(folder), device_map={"": "cpu"}, dtype=torch.bfloat16
    )


PATHS = {
    "from_config": _from_config,
    "default dtype": _default_dtype,
    "device_map": _device_map,
    "device_map auto": _device_map_auto,
    "init_empty_weights": _dispatch,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tables_are_those_of_a_clean_model(architecture: str, path: str, tmp_path: Path) -> None:
    clean = auto(architecture).from_config(CONFIGS[architecture]())
    truth = {name: table.clone() for name, table in stored(clean).items()}
    assert truth
    clean.save_pretrained(tmp_path)
    with safe_rope.guard(tables="fp32") as session:
        model = PATHS[path](architecture, tmp_path)
    assert session.report.protected
    assert not session.report.unprotected
    for _ in range(2):
        tables = stored(model)
        assert {
            name for name, table in tables.items() if not torch.equal(table.float(), truth[name])
        } == set()
        assert all(tables[name].dtype == truth[name].dtype for name in truth)
        if "disk" in getattr(model, "hf_device_map", {}).values():  # accelerate lets nobody move it then
            model(torch.arange(12)[None])
        else:
            model.to(torch.bfloat16)
