"""What is counted out and is no position: it has to stay what it is without safe_rope."""

from __future__ import annotations

import math

import torch
from torch import nn

from styles.registry import DIM, style


@style("no position", "unharmed", "running", shows="output", not_on=("meta",))
class RunningLevels(nn.Module):
    """Levels that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.linspace(0, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.levels.lerp_(x.abs().amax().to(self.levels.dtype), 0.25)
        return x.mean(dim=1) * self.levels.sum().to(x.dtype)


@style("no position", "unharmed", "running", shows="output", not_on=("meta",))
class CountedSteps(nn.Module):
    """A schedule that a counter walks along."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("schedule", torch.linspace(1.0, 0.0, 9), persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.schedule[self.step].to(x.dtype)


@style("no position", "fp32", shows="output", not_on=("meta",))
class Fp32Scale(nn.Module):
    """Explicit FP32, multiplied in before a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((DIM,), 0.5, dtype=torch.float32))
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x * self.scale)


@style("no position", "fp32", shows="output", not_on=("meta",))
class Fp32Statistics(nn.Module):
    """Means and deviations for each channel, from a list in a config."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.25] * DIM, dtype=torch.float32))
        self.register_buffer("std", torch.tensor([0.5] * DIM, dtype=torch.float32))
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin((x - self.mean) / self.std)


@style("no position", "literal", shows="output", not_on=("meta",))
class FourierFeatures(nn.Module):
    """Sines of what no position is, through a projection that a file has given."""

    def __init__(self) -> None:
        super().__init__()
        rows = [[((i * 7 + j * 13) % 17 - 8) / 8 for j in range(8)] for i in range(DIM)]
        self.register_buffer("weights", torch.tensor(rows, dtype=torch.float32))
        self.lin = nn.Linear(16, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = x @ self.weights
        return self.lin(torch.cat((phase.sin(), phase.cos()), dim=-1))


@style("no position", "unharmed", "angles", shows="output", not_on=("meta", "half and back"))
class TurnedByAnAngle(nn.Module):
    """An augmentation turns pairs of channels by one of a few angles."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.tensor([0.0, math.pi / 2, math.pi, 3 * math.pi / 2]))
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles[1].cos(), self.angles[1].sin()
        first, second = self.lin(x).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


@style("no position", "atoms", shows="output", not_on=("meta",))
class ExpectedValue(nn.Module):
    """The atoms of a distribution of returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("support", torch.linspace(-10, 10, DIM))
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x).softmax(-1) * self.support).sum(-1)
