"""Rotation matrices are told from other matrices by their numbers."""

from __future__ import annotations

import math

import pytest
import torch

from safe_rope._recognition.waves import are_turns

ANGLES = (1.0, 0.1, 0.01, 0.001)
MIRROR = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / math.sqrt(2)


def neighbours() -> torch.Tensor:
    """One block for each pair of neighbouring coordinates."""
    turns = ([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in ANGLES)
    return torch.block_diag(*map(torch.tensor, turns))


def halves() -> torch.Tensor:
    """The coordinates of a pair are half the size apart."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return neighbours()[order][:, order]


@pytest.mark.contract
@pytest.mark.parametrize("matrix", [neighbours(), halves(), neighbours().repeat(3, 1, 1)])
def test_rotations_of_pairs_are_told(matrix: torch.Tensor) -> None:
    assert are_turns(matrix)
    assert are_turns(matrix.bfloat16(), 2.0**-9)


@pytest.mark.contract
@pytest.mark.parametrize(
    "matrix",
    [
        torch.block_diag(*[MIRROR] * 4),
        torch.eye(8),
        torch.eye(8)[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])],
        torch.diag(torch.linspace(0.1, 0.9, 8)),
        2 * neighbours(),
        torch.full((8, 8), -math.inf).triu(1),
        torch.full((8, 8), math.nan),
        torch.linalg.qr(torch.arange(64.0).reshape(8, 8).sin())[0],
    ],
    ids=["mirror", "one", "order", "scale", "longer", "mask", "nan", "orthogonal"],
)
def test_other_matrices_are_none(matrix: torch.Tensor) -> None:
    assert not are_turns(matrix)
