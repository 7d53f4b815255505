"""What a forward makes of what the audit calls it with is bounded: it may be the cube of a length."""

from __future__ import annotations

import pytest
import torch
from audited import Model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import safe_rope

_BOUND = 2**29


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1] ** 3, dtype=x.dtype)[: x.shape[1], None].sin()


class Repeats(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x * torch.arange(length, dtype=x.dtype).repeat(length * length)[:length, None].sin()


class Squares(nn.Module):
    """Makes no more than a square, and counts in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x * torch.arange(length, dtype=x.dtype).repeat(length).view(length, length)[0, :, None].sin()


class Sparse(nn.Module):
    """Counts in 16 bits beside operators whose results have no shape in memory."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (1,)).coalesce()
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin() * ones.to_dense().to(x.dtype)


class Chooses(nn.Module):
    """Counts in 16 bits beside an operator that is given functions."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.cond(torch.tensor(True), torch.cos, torch.sin, (torch.zeros(1),))
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin() * ones.to(x.dtype)


class CountsFar(nn.Module):
    """Takes sines of all that it counts: 48 cubed is more than 16 bits count."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1] ** 3, dtype=x.dtype).sin()[: x.shape[1], None]


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor has."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta:
            self.size = max(self.size, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("kind", [Counts, Repeats])
def test_a_call_that_makes_too_much_is_refused_and_tells_nothing(kind: type[nn.Module]) -> None:
    with Largest() as largest:
        report = safe_rope.audit(Model(kind()).bfloat16())
    assert report.verdict == "unknown"
    assert largest.size <= _BOUND
    assert "makes too much" in report.findings[0].source


def test_a_shorter_call_tells_that_counts_are_rounded() -> None:
    with Largest() as largest:
        report = safe_rope.audit(Model(CountsFar()).bfloat16())
    assert report.verdict == "damaged"
    assert largest.size <= _BOUND


@pytest.mark.parametrize("kind", [Sparse, Chooses])
def test_an_operator_whose_size_nobody_tells_is_run(kind: type[nn.Module]) -> None:
    assert safe_rope.audit(Model(kind()).bfloat16()).verdict == "damaged"
    assert safe_rope.audit(Model(kind())).ok


def test_a_call_that_makes_a_square_is_measured() -> None:
    assert safe_rope.audit(Model(Squares()).bfloat16()).verdict == "damaged"
    assert safe_rope.audit(Model(Squares())).ok
