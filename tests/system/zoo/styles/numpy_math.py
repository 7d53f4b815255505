"""Tables that NumPy or Python computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


@style("numpy", "buffer")
class NumpyTable(nn.Module):
    """Attention-is-all-you-need in NumPy, as a FloatTensor."""

    def __init__(self, d_hid: int = DIM, n_position: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("pos_table", self._get_sinusoid_encoding_table(n_position, d_hid))

    def _get_sinusoid_encoding_table(self, n_position: int, d_hid: int) -> torch.Tensor:
        def get_position_angle_vec(position: int) -> list[float]:
            return [position / np.power(10000, 2 * (j // 2) / d_hid) for j in range(d_hid)]

        table = np.array([get_position_angle_vec(i) for i in range(n_position)])
        table[:, 0::2] = np.sin(table[:, 0::2])
        table[:, 1::2] = np.cos(table[:, 1::2])
        return torch.FloatTensor(table).unsqueeze(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pos_table[:, : x.size(1)].clone().detach().to(x.dtype)


@style("numpy", "buffer", inv_freq="inv_freq", exact=half_width)
class NumpyFrequencies(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        inv = 1.0 / np.power(10000.0, np.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", torch.from_numpy(inv.astype(np.float32)), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("numpy", "parameter")
class NumpyIntoAWeight(nn.Module):
    """XLM's: the weight of an Embedding is written to, half by half."""

    def __init__(self, n_pos: int = LONGEST, dim: int = DIM) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(n_pos, dim)
        out = self.position_embeddings.weight
        out.requires_grad = False
        enc = np.array(
            [[pos / np.power(10000, 2 * (j // 2) / dim) for j in range(dim)] for pos in range(n_pos)]
        )
        out.data = torch.zeros(n_pos, dim)
        out.data[:, 0::2] = torch.FloatTensor(np.sin(enc[:, 0::2]))
        out.data[:, 1::2] = torch.FloatTensor(np.cos(enc[:, 1::2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.position_embeddings(torch.arange(x.shape[1])).to(x.dtype)


@style("math", "buffer")
class PythonTable(nn.Module):
    """Two loops and a list of lists."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        rows = [
            [math.sin(p / 10000 ** (i / dim)) if i % 2 == 0 else math.cos(p / 10000 ** ((i - 1) / dim))
             for i in range(dim)]
            for p in range(length)
        ]  # fmt: skip
        self.register_buffer("table", torch.tensor(rows), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("math", "buffer", inv_freq="inv_freq", exact=half_width)
class PythonFrequencies(nn.Module):
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        inv_freq = torch.tensor([1.0 / base ** (i / dim) for i in range(0, dim, 2)], dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style(
    "math", "unharmed", "in forward", inv_freq=lambda module: torch.tensor(module.inv_freq), exact=half_width
)
class ListOfPythonNumbers(nn.Module):
    """No tensor is kept: a list of floats becomes one on every call."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = [math.exp(-math.log(10000.0) * i / dim) for i in range(0, dim, 2)]

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=x.device)
        phase = torch.arange(x.shape[1], device=x.device).float()[:, None] * inv_freq
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("numpy", "unharmed", "attribute")
class NumpyArrayKept(nn.Module):
    """The table stays an array and becomes a tensor in forward."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        angle = np.arange(length)[:, None] / np.power(10000.0, np.arange(0, dim, 2) / dim)
        self.table = np.concatenate((np.sin(angle), np.cos(angle)), axis=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.table[: x.shape[1]]).to(x.dtype)


@style("math", "buffer", "scalar tensors", inv_freq="inv_freq", exact=half_width)
class ScalarsStacked(nn.Module):
    """Each frequency a tensor of its own, stacked."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = torch.tensor(10000.0)
        self.register_buffer("inv_freq", torch.stack([base ** (-i / dim) for i in range(0, dim, 2)]))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def _numpy_phases(dim: int = DIM) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.outer(np.arange(LONGEST), 10000 ** -(np.arange(0, dim, 2) / dim))


@style("numpy", "phases")
class ArrayOfPhases(nn.Module):
    """NumPy's float64 phases become what the activations are before sines are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = _numpy_phases()

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.from_numpy(self.phase[: x.shape[1]]).to(x.dtype)
        return phase.cos(), phase.sin()


@style("numpy", "phases", "buffer")
class BufferOfPhasesFromNumpy(nn.Module):
    """The same in a buffer, which casts round as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.from_numpy(_numpy_phases()), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.phase[: x.shape[1]].to(x.dtype)
        return phase.cos(), phase.sin()


@style("numpy", inv_freq="inv_freq")
class FromNumpyInDouble(nn.Module):
    """float64 frequencies of NumPy, kept as float64."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        values = np.power(10000.0, -np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.register_buffer("inv_freq", torch.from_numpy(values), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).double()[:, None] * self.inv_freq[None]
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("python", "buffer")
class LoopsOfMath(nn.Module):
    """tensor2tensor's as a loop over ``math.sin``; few columns, as each number takes its time."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        table = torch.zeros(LONGEST, dim)
        for pos in range(LONGEST):
            for i in range(0, dim, 2):
                angle = pos / 10000 ** (i / dim)
                table[pos, i] = math.sin(angle)
                table[pos, i + 1] = math.cos(angle)
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("numpy", "counts")
class CountsOfNumpy(nn.Module):
    """Positions are a range of NumPy's under a plain name; frequencies are Python's."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("r", torch.from_numpy(np.arange(LONGEST, dtype=np.float32)), persistent=False)
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        inv = torch.tensor([1e4 ** (-i / self.dim) for i in range(0, self.dim, 2)], dtype=torch.float32)
        phase = self.r[: x.shape[1], None].float() * inv
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("numpy", "scalars", inv_freq="inv_freq", exact=half_width)
class NumpyScalarsInTorch(nn.Module):
    """NumPy's numbers among torch's operations."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        log = np.log(np.float64(10000.0)) / np.float64(dim // 2)
        self.register_buffer("inv_freq", torch.exp(torch.arange(dim // 2, dtype=torch.float32) * -log))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)
