"""Phases as complex numbers, and phases that are handed on before any cos or sin."""

from __future__ import annotations

import torch
from torch import nn

from styles.formulas import Pair, as_real, half_width, phases
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> torch.Tensor:
    """As Meta's Llama has it."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, device=freqs.device)
    freqs = torch.outer(t, freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


@style("complex", "attribute", "output", shows="output")
class MetaLlama(nn.Module):
    """The model holds the phases as an attribute; its attention multiplies q and k by them."""

    def __init__(self, dim: int = DIM, max_seq_len: int = LONGEST // 2) -> None:
        super().__init__()
        self.wq = nn.Linear(dim, dim, bias=False)
        self.freqs_cis = precompute_freqs_cis(dim, max_seq_len * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.freqs_cis = self.freqs_cis.to(x.device)
        cis = self.freqs_cis[: x.shape[1]]
        xq = self.wq(x)
        pairs = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * cis).flatten(-2).type_as(xq)


@style("complex", "attribute")
class ComplexAttribute(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.freqs_cis = precompute_freqs_cis(dim, length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.freqs_cis[: x.shape[1]]


@style("complex", "buffer")
class ComplexBuffer(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("freqs_cis", precompute_freqs_cis(dim, length), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.freqs_cis[: x.shape[1]]


@style("complex", "buffer", "as real", widens=True)
class ComplexKeptAsReal(nn.Module):
    """A real buffer [length, dim / 2, 2], viewed as complex where it is used."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length) * 1.0, 1e4 ** (-torch.arange(0, dim, 2) / dim))
        cis = torch.stack((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cis", cis, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.cis[: x.shape[1]].float())


@style("complex", "in forward", inv_freq="inv_freq", exact=as_real)
class PolarInForward(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], device=x.device)
        phase = torch.outer(t.float(), self.inv_freq.float())
        return torch.view_as_real(torch.polar(torch.ones_like(phase), phase)).to(x.dtype)


@style("complex", "buffer", "exp")
class ComplexExponential(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        theta = torch.arange(length)[:, None] * torch.pow(10000, -torch.arange(0, dim, 2) / dim)
        self.register_buffer("cis", torch.exp(1j * theta), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        cis = self.cis[: x.shape[1]]
        return cis.real.to(x.dtype), cis.imag.to(x.dtype)


@style("phases returned", inv_freq="inv_freq", exact=phases)
class PhasesReturned(nn.Module):
    """What comes out is still to be given to cos and sin by whoever asked, in the dtype that it has."""

    def __init__(self, dim: int = DIM, theta: float = 10000.0) -> None:
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq = torch.arange(x.shape[1], device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        return torch.outer(seq, self.inv_freq)


@style("phases returned", "parent", inv_freq="rotary_pos_emb.inv_freq", exact=half_width)
class PhasesUsedByTheParent(nn.Module):
    """As Qwen2-VL's vision tower: the child returns phases, the parent makes cos and sin of them."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotary_pos_emb = PhasesReturned(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.rotary_pos_emb(x)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("complex", "buffer")
class ConjugatePhases(nn.Module):
    """Turns back; its conjugate is a view that torch has not resolved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cis", precompute_freqs_cis(DIM, LONGEST).conj(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.cis[: x.shape[1]].resolve_conj()).to(x.dtype)


@style("complex", "pairs")
class ConjugatePhasors(nn.Module):
    """Complex phases and their conjugates in one buffer of double precision."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(LONGEST, dtype=torch.float64), _frequencies(dim).double())
        cis = torch.polar(torch.ones_like(angle), angle)
        self.cis = torch.stack((cis, cis.conj().resolve_conj()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.cis[:, : x.shape[1]]).to(x.dtype)


@style("stacked", inv_freq="inv_freq")
class ViewAsComplexOfAStack(nn.Module):
    """``view_as_complex`` of a stack, multiplied in complex and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        cis = torch.view_as_complex(torch.stack((phase.cos(), phase.sin()), -1).contiguous())
        return torch.view_as_real(cis * torch.ones((), dtype=torch.complex64)).flatten(-2).to(x.dtype)


@style("attribute", "complex", inputs=hidden_and_positions)
class PhasorsOfAnAttribute(nn.Module):
    """An attribute, which no loader fills on meta, and its complex exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self._inv = torch.pow(1e4, -torch.arange(0, DIM, 2) / DIM)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.exp(1j * (self._inv * position_ids.squeeze(0).type_as(self._inv)[:, None]))


@style("complex", "buffer")
class AnglesOfPhasors(nn.Module):
    """Phases between -pi and pi, which `angle` and `atan2` make of what they were the phases of."""

    def __init__(self, length: int = LONGEST) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length).float(), _frequencies())
        self.register_buffer("wrapped", torch.polar(torch.ones_like(phase), phase).angle(), persistent=False)
        self.register_buffer("folded", torch.atan2(phase.sin(), phase.cos()), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        length = x.shape[1]
        return self.wrapped[:length].cos().to(x.dtype), self.folded[:length].sin().to(x.dtype)
