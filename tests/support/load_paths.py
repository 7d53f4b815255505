"""Every way that a model of `families` is loaded, with the real deepspeed and the real transformers.

Each path is a function ``(family, checkpoint) -> model or engine``; a test calls it with or without a guard.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from laboratory.ranks import ds_config
from torch import nn

from support import families

LoadPath = Callable[[str, Path], Any]


def zero_init(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A real zero.Init."""
    import deepspeed

    return deepspeed.zero.Init(config_dict_or_path=ds_config(3, str(dtype).removeprefix("torch.")))


def engine(model: nn.Module, stage: int) -> Any:
    """The DeepSpeed engine of ``model`` at ZeRO ``stage``, in bfloat16."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage))[0]


def batch(seed: int = 0) -> torch.Tensor:
    """Token ids [1, 12]."""
    return torch.randint(0, families.VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(seed))


def train(engine: Any, steps: int = 1) -> list[float]:
    """Train ``engine`` for some steps; return the losses."""
    losses = []
    engine.train()
    for step in range(steps):
        ids = batch(step)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def from_pretrained(family: str, checkpoint: Path, **kwargs: Any) -> Any:
    """The model of ``checkpoint`` in bfloat16."""
    _needs_accelerate()
    return families.model_class(family).from_pretrained(checkpoint, torch_dtype=torch.bfloat16, **kwargs)


def _needs_accelerate() -> None:
    pytest.importorskip("accelerate", reason="transformers reads a DeepSpeed config with it")


# ---- the paths -----------------------------------------------------------------------------------------


def _zero_init(dtype: torch.dtype) -> LoadPath:
    def path(family: str, checkpoint: Path) -> Any:
        with zero_init(dtype):
            return families.build(family)

    return path


def _zero_init_engine(family: str, checkpoint: Path) -> Any:
    return engine(_zero_init(torch.bfloat16)(family, checkpoint), 3)


def _hf_zero3(family: str, checkpoint: Path) -> Any:
    from transformers.integrations import HfDeepSpeedConfig

    _needs_accelerate()
    with_zero3 = HfDeepSpeedConfig(ds_config(3))  # transformers holds it weakly: it must live until the load
    model = from_pretrained(family, checkpoint)
    del with_zero3
    return model


def _hf_zero3_engine(family: str, checkpoint: Path) -> Any:
    return engine(_hf_zero3(family, checkpoint), 3)


def _pretrained_engine(stage: int) -> LoadPath:
    return lambda family, checkpoint: engine(from_pretrained(family, checkpoint), stage)


def _cast(family: str, checkpoint: Path) -> Any:
    return families.build(family).to(torch.bfloat16)


def _meta(family: str, checkpoint: Path) -> Any:
    weights = families.build(family, seed=1).state_dict()
    with torch.device("meta"):
        model = families.build(family)
    model.to_empty(device="cpu")
    # to_empty leaves whatever the memory held, which can happen to be right.
    for module in families.rotary_modules(model).values():
        for buffer in module.buffers():
            buffer.zero_()
    model.load_state_dict(weights)
    return model


def _from_config(family: str, checkpoint: Path) -> Any:
    config = families.config(family)
    return transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)


def _low_default_dtype(family: str, checkpoint: Path) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return families.build(family)
    finally:
        torch.set_default_dtype(before)


PATHS: dict[str, LoadPath] = {
    "zero.Init bf16": _zero_init(torch.bfloat16),
    "zero.Init fp16": _zero_init(torch.float16),
    "zero.Init + initialize": _zero_init_engine,
    "HF ZeRO-3": _hf_zero3,
    "HF ZeRO-3 + initialize": _hf_zero3_engine,
    "from_pretrained + ZeRO-0": _pretrained_engine(0),
    "from_pretrained + ZeRO-1": _pretrained_engine(1),
    "from_pretrained + ZeRO-2": _pretrained_engine(2),
    "from_pretrained + ZeRO-3": _pretrained_engine(3),
    "to(bfloat16)": _cast,
    "meta + to_empty": _meta,
    "from_config bf16": _from_config,
    "default dtype bf16": _low_default_dtype,
}


def is_engine(loaded: Any) -> bool:
    """Whether a path ended in a DeepSpeed engine."""
    return hasattr(loaded, "backward")
