"""Numbers, rows of integers and primes that are others than a constructor makes are not ok."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from audited import Model
from torch import Tensor, nn

import safe_rope

DIM, SIDE = 32, 5


class Theta(nn.Module):
    """The logarithm of a base, beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("log_theta", torch.tensor(9.2103), persistent=False)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        exponents = torch.arange(DIM // 2, device=x.device) / (DIM // 2)
        phases = torch.arange(x.shape[1])[:, None] * torch.exp(-self.log_theta * exponents)
        return self.linear(x + torch.cat((phases.sin(), phases.cos()), -1))


class Decays(nn.Module):
    """One number for each head, raised to counts."""

    def __init__(self) -> None:
        super().__init__()
        for head in range(2):
            self.register_buffer(f"decay_{head}", torch.tensor(1 - 2.0 ** -(head + 3)), persistent=False)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(x.shape[1], device=x.device)
        decays = torch.stack([self.decay_0**counts, self.decay_1**counts], -1)
        return self.linear(x) * decays.repeat_interleave(DIM // 2, -1)


class Relative(nn.Module):
    """Swin's index of a window."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None] + SIDE - 1
        self.register_buffer("index", apart[0] * (2 * SIDE - 1) + apart[1])
        self.table = nn.Parameter(torch.randn((2 * SIDE - 1) ** 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[self.index] + x.mean()


class Hash(nn.Module):
    """A grid of Instant NGP."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("primes", torch.tensor([1, 2654435761, 805459861]), persistent=False)
        self.table = nn.Parameter(torch.randn(64, DIM))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[:, None] + torch.arange(3)
        hashed = (places * self.primes).unbind(-1)
        return x + self.table[(hashed[0] ^ hashed[1] ^ hashed[2]) % 64]


def _one(index: Tensor) -> Tensor:
    index[3, 4] += 1
    return index


CHANGED: list[tuple[type[nn.Module], str, Callable[[Tensor], Tensor]]] = [
    *((Theta, "log_theta", change) for change in (torch.zeros_like, lambda number: number * 1.1)),
    *((Decays, "decay_1", change) for change in (torch.zeros_like, lambda number: number - 0.1)),
    *((Relative, "index", change) for change in (lambda index: index.roll(1, 0), _one, torch.zeros_like)),
    *((Hash, "primes", change) for change in (torch.zeros_like, lambda primes: primes.roll(1))),
]


@pytest.mark.parametrize(("cls", "name", "change"), CHANGED)
def test_other_numbers_than_the_constructors_are_unknown(
    cls: type[nn.Module], name: str, change: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, x = Model(cls()), torch.randn(1, 40, DIM)
    assert safe_rope.audit(model).ok
    before = model.part(x)
    setattr(model.part, name, change(getattr(model.part, name).clone()))
    assert float((model.part(x) - before).detach().abs().max()) > 0.01
    (finding,) = safe_rope.audit(model).findings
    assert (finding.what, finding.severity) == (name, "unknown")


def test_an_index_that_is_moved_as_a_whole_is_left_alone() -> None:
    model = Model(Relative())
    model.part.index += 3
    assert safe_rope.audit(model).ok


def test_a_number_that_a_file_holds_is_its_own() -> None:
    class InAFile(Decays):
        def __init__(self) -> None:
            super().__init__()
            self._non_persistent_buffers_set.clear()

    model = Model(InAFile())
    model.part.decay_1.fill_(0.5)
    assert safe_rope.audit(model).ok
