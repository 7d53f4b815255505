"""Rotary modules whose forward reads more than frequencies, and takes no notice of it as it is built.

``forward`` counts as transformers' own, as that of Mistral Large 4, which learns a scale of its frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from support.own_rotary import Rotary

POSITIONS = torch.tensor([[0, 1, 7, 300, 4095]])


class LearnedScale(Rotary):
    """A file fills ``alpha``."""

    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        self.register_buffer("alpha", torch.zeros_like(self.inv_freq))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phase = position_ids[..., None].float() * (self.inv_freq.float() * self.alpha.float().exp())
        both = torch.cat((phase, phase), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class ScaledLater(Rotary):
    """Somebody may put a tensor, or a module, in the place of nothing."""

    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        self.alpha = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq if self.alpha is None else self.inv_freq * self.alpha.exp()
        phase = position_ids[..., None].float() * inv_freq
        both = torch.cat((phase, phase), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class BufferedLater(ScaledLater):
    """The same in a buffer."""

    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        del self.alpha
        self.register_buffer("alpha", None)


for _cls in (LearnedScale, ScaledLater):
    _cls.forward.__module__ = "transformers.models.own"


def learned() -> Tensor:
    """What a file holds for ``alpha``; no 16-bit dtype has all of it."""
    return torch.linspace(-0.3, 0.2, 8) ** 3


def true_tables() -> tuple[Tensor, Tensor]:
    """cos and sin of a module that nobody guards, with what the file holds."""
    module = LearnedScale()
    module.load_state_dict({"alpha": learned()})
    cos, sin = module(torch.zeros(1), POSITIONS)
    return cos, sin


class Holder(nn.Module):
    """A model of one such module."""

    def __init__(self, cls: type[nn.Module] = LearnedScale) -> None:
        super().__init__()
        self.rotary = cls()
