"""The other ways that a model comes into being: each gives the position tables of a clean FP32 model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import safe_rope

CONFIGS: dict[str, Callable[[], Any]] = {
    "phi": lambda: transformers.PhiConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    ),
}


def auto(architecture: str) -> Any:
    return transformers.AutoModelForCausalLM


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every floating buffer and plain attribute of ``model``."""
    found = {}
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                found[f"{path}.{name}"] = value
    return found


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
        model.to(torch.bfloat16)
