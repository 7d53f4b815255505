"""Phases that a matrix product, an einsum or a layer makes: autocast rounds those, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, hidden_and_positions, style


class _Frequencies(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))


@style("product", inv_freq="inv_freq", exact=half_width)
class MultipliedByMatmul(_Frequencies):
    """A column of positions times a row of frequencies."""

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1]).float()
        phase = t[:, None] @ self.inv_freq[None].float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("product", inv_freq="inv_freq", exact=half_width)
class MultipliedByEinsum(_Frequencies):
    """GPT-J's line."""

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)
        phase = torch.einsum("i,j->ij", t, self.inv_freq)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("product", inv_freq="inv_freq", inputs=hidden_and_positions)
class MultipliedInBatches(_Frequencies):
    """Llama's line without its ``autocast(enabled=False)``."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        frequencies = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        phase = (frequencies @ position_ids[:, None].float()).transpose(1, 2)
        phase = torch.cat((phase, phase), dim=-1)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("product", inv_freq="inv_freq", inputs=hidden_and_positions)
class MultipliedByBmm(_Frequencies):
    """``torch.bmm``, and what it returns."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        frequencies = self.inv_freq[None, None].expand(position_ids.shape[0], 1, -1)
        return torch.bmm(position_ids[..., None].to(frequencies.dtype), frequencies).sin()


@style("product", inv_freq="inv_freq", shows="output")
class ProductInAnAttention(_Frequencies):
    """Attention without weights that makes its phases itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)
        phase = torch.einsum("i,j->ij", t, self.inv_freq)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        half = x.shape[-1] // 2
        return torch.cat(
            (x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1
        )


@style("product", inv_freq="inv_freq", shows="output")
class ProductBesideWeights(_Frequencies):
    """A layer with weights that makes its phases itself."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.q = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)
        phase = torch.einsum("i,j->ij", t, self.inv_freq)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        q = self.q(x)
        half = q.shape[-1] // 2
        return q[..., :half] * cos + q[..., half:] * sin


@style("product")
class TableByProduct(nn.Module):
    """A table that the constructor makes by a product."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        phase = torch.arange(longest).float()[:, None] @ inv_freq[None]
        self.register_buffer("sines", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sines[: x.shape[1]]


@style("buffer")
class ProductOfALiteralAndACount(nn.Module):
    """A matrix product, which mixes no dtypes, of one factor with a dtype and one without."""

    def __init__(self) -> None:
        super().__init__()
        rates = torch.tensor([10000 ** (-i / DIM) for i in range(0, DIM, 2)])
        phase = torch.matmul(torch.arange(LONGEST, dtype=torch.float32).view(-1, 1), rates.view(1, -1))
        self.register_buffer("cos", torch.cat((phase, phase), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((phase, phase), -1).sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
