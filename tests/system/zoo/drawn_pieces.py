"""The pieces that `drawn` writes position modules from: expressions that users write for one thing."""

from __future__ import annotations

FREQUENCIES = (
    "1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))",
    "1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))",
    "1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))",
    "base ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim)",
    "base ** (-torch.arange(0, dim, 2) / dim)",
    "torch.exp(torch.arange(0, dim, 2).float() * -(math.log(base) / dim))",
    "torch.exp(torch.arange(0, dim, 2) * (-math.log(base) / dim))",
    "torch.exp(-math.log(base) * torch.arange(0, dim // 2, dtype=torch.float32) / (dim // 2))",
    "torch.pow(base, -torch.arange(0, dim, 2) / dim)",
    "base ** torch.linspace(0, -1 + 2 / dim, dim // 2)",
    "1.0 / torch.logspace(0, (dim - 2) / dim, dim // 2, base=base)",
    "torch.from_numpy(1.0 / np.power(base, np.arange(0, dim, 2) / dim)).float()",
    "torch.tensor(1.0 / base ** (np.arange(0, dim, 2) / dim), dtype=torch.float32)",
    "torch.tensor([base ** (-i / dim) for i in range(0, dim, 2)])",
    "torch.tensor([1.0 / math.pow(base, 2 * i / dim) for i in range(dim // 2)], dtype=torch.float)",
    "torch.FloatTensor([base ** (-2 * i / dim) for i in range(dim // 2)])",
    "(1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).to(torch.float32)",
    "torch.arange(dim // 2).float().mul_(-2.0 / dim * math.log(base)).exp_()",
    "torch.arange(0, dim, 2).div(dim).mul(math.log(base)).neg().exp()",
    "torch.exp2(-math.log2(base) * torch.arange(0, dim, 2).float() / dim)",
    "1.0 / (base ** ((torch.ones(dim // 2).cumsum(0) - 1) * 2 / dim))",
    "torch.stack([torch.tensor(base ** (-i / dim)) for i in range(0, dim, 2)])",
    "1.0 / (base * 4.0 ** (dim / (dim - 2))) ** (torch.arange(0, dim, 2).float() / dim)",
    "torch.cat((1.0 / base ** (torch.arange(0, dim // 2, 2).float() / dim), torch.zeros(dim // 4)))",
)
BASES = ("10000.0", "10000", "500000.0", "1e4", "1e6")

COUNTS_WHEN_BUILT = (
    "torch.arange(LONGEST).float()",
    "torch.arange(LONGEST, dtype=torch.float32)",
    "torch.linspace(0, LONGEST - 1, LONGEST)",
    "torch.ones(LONGEST).cumsum(0) - 1",
    "torch.tensor(list(range(LONGEST))).float()",
    "torch.arange(LONGEST, dtype=rates.dtype)",
    "torch.from_numpy(np.arange(LONGEST, dtype=np.float32))",
    "torch.arange(float(LONGEST))",
)
COUNTS_WHEN_CALLED = (
    "torch.arange(n, device=x.device).float()",
    "torch.arange(n, device=x.device, dtype=torch.float32)",
    "torch.arange(n, device=x.device, dtype=rates.dtype)",
    "torch.arange(n, device=x.device).type_as(rates)",
    "torch.ones(n, device=x.device).cumsum(0) - 1",
    "(torch.ones_like(x[0, :, 0], dtype=torch.long).cumsum(0) - 1).float()",
    "torch.arange(n, device=x.device, dtype=x.dtype).float()",
    "rates.new_tensor(range(n))",
    "position_ids[0].float()",
    "position_ids.squeeze(0).type_as(rates)",
)
PRODUCTS = (
    "torch.outer(t, rates)",
    "torch.einsum('i,j->ij', t, rates)",
    "t[:, None] * rates[None, :]",
    "t.unsqueeze(1) * rates",
    "t.unsqueeze(-1) @ rates.unsqueeze(0)",
    "torch.matmul(t.view(-1, 1), rates.view(1, -1))",
    "torch.multiply(t.reshape(-1, 1), rates)",
    "rates * t[:, None]",
)
AS_IT_IS = "phase"
TWICE = (
    "torch.cat((phase, phase), dim=-1)",
    "phase.repeat(1, 2)",
    "phase.repeat_interleave(2, dim=-1)",
    "torch.stack((phase, phase), dim=-1).flatten(-2)",
)
READS = (
    "{}[:n]",
    "{}.narrow(0, 0, n)",
    "{}[torch.arange(n, device=x.device)]",
    "{}.index_select(0, torch.arange(n, device=x.device))",
    "F.embedding(torch.arange(n, device=x.device), {})",
    "{}[position_ids[0]]",
)
CASTS = (".to(x.dtype)", ".to(x.dtype)", ".type_as(x)", ".to(x)", "")
NAMES_OF_RATES = (
    "inv_freq", "freqs", "theta", "omega", "div_term", "freq_bands", "w", "_inv", "speeds", "rates_of_turn",
)  # fmt: skip
NAMES_OF_TABLES = (
    ("cos", "sin"), ("cos_cached", "sin_cached"), ("_cos", "_sin"), ("c", "s"), ("table_a", "table_b"),
)  # fmt: skip

HEADER = """
import functools
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from styles.registry import DIM, LONGEST


def turned(x, cos, sin):
    if cos.shape[-1] != DIM:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return (x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin).to(x.dtype)

"""
