"""Every library that is surveyed: what must be imported, and its subjects."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from laboratory.libraries import diffusion, diffusion_models, models, modules, vision
from laboratory.libraries.subject import Subject, declare_torchvision_operators


@dataclass(frozen=True)
class Library:
    """A distribution, by the modules that its subjects need."""

    imports: tuple[str, ...]
    parts: tuple[Callable[[], list[Subject]], ...]

    def prepare(self) -> str | None:
        """Import what the subjects need; say why that is not possible where it is not."""
        declare_torchvision_operators()
        # Megatron moves to the current CUDA device whatever it has made on CPU.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        try:
            for name in self.imports:
                importlib.import_module(name)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"[:200]
        return None

    def subjects(self) -> list[Subject]:
        """All modules, then all whole models."""
        return [subject for part in self.parts for subject in part()]


_TITAN = ("llama3", "qwen3", "deepseek_v3", "flux", "qwen3_5", "kimi_k2_7", "muse_glimmer")
LIBRARIES = {
    "x-transformers": Library(("x_transformers",), (modules.x_transformers, models.x_transformers)),
    "fair-esm": Library(("esm",), (modules.fair_esm, models.fair_esm)),
    "litgpt": Library(("litgpt",), (models.litgpt,)),
    "megatron-core": Library(
        ("megatron.core.models.gpt.gpt_model", "megatron.core.models.gpt.gpt_layer_specs"),
        (modules.megatron, models.megatron),
    ),
    "torchtitan": Library(
        tuple(f"torchtitan.models.{name}" for name in _TITAN), (modules.torchtitan, models.torchtitan)
    ),
    "timm": Library(("timm", "timm.models"), (vision.timm, models.timm)),
    "open_clip_torch": Library(("open_clip",), (models.open_clip,)),
    "diffusers": Library(
        ("diffusers.models.transformers", "diffusers.models.autoencoders"),
        (diffusion.diffusers, diffusion_models.diffusers),
    ),
}
