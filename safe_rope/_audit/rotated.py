"""The cos and sin by which a module turns q and k itself, as those of inference engines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.embedding import usual_positions
from safe_rope._audit.forward import device_of, isolated
from safe_rope._base import originals
from safe_rope._base.functions import signature_of
from safe_rope._recognition.ask import UnansweredError, answering
from safe_rope.rotation import plain

_TAKEN = ("positions", "query", "key")
_METHODS = ("forward_native", "forward")
"""vLLM and SGLang: what runs without their kernels, and on q of any dtype."""


def turned_by(
    module: nn.Module, tables: Iterable[Tensor | None], positions: list[int] | None
) -> dict[str, Tensor] | None:
    """Return cos and sin as `AuditReport.tables` holds them; None where ``module`` turns no q.

    A copy turns vectors in FP32 whose pairs are (1, 0): what comes out is what it applies.

    Args:
        module: what may turn q and k.
        tables: those that it holds; positions beyond the rows of the longest are not asked.
        positions: where, or None for the usual ones.

    """
    method = _method(module)
    dim, head = getattr(module, "rotary_dim", 0), getattr(module, "head_size", 0)
    if method is None or not (type(dim) is type(head) is int and 1 < dim <= head and dim % 2 == 0):
        return None
    rows = max((len(one) for one in tables if one is not None and one.dim() > 1), default=0)
    asked = [p for p in positions or usual_positions(rows) if p < rows]
    # Tables for short and for long sequences may be one behind the other.
    announced = getattr(module, "max_position_embeddings", None)
    within = [p for p in asked if type(announced) is int and p < announced]
    for one in filter(None, (asked, within)):
        try:
            cos, sin = _in_each_call(module, method, one)
        except UnansweredError:
            continue
        return {"positions": originals.tensor(one, dtype=torch.int64), "cos": cos, "sin": sin}
    return None


def _method(module: nn.Module) -> str | None:
    """What turns q and k: the name of a method that takes them after their positions."""
    for name in _METHODS:
        try:
            taken = tuple(signature_of(getattr(type(module), name)).parameters)
        except (AttributeError, TypeError, ValueError):
            continue
        if taken[1:4] == _TAKEN:
            return name
    return None


def _in_each_call(module: nn.Module, method: str, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Ask for all positions at once, or for each alone where others in the call make a difference."""
    together = _applied(module, method, positions)
    for row in {0, min(1, len(positions) - 1), len(positions) // 2, len(positions) - 1}:
        alone = _applied(module, method, [positions[row]])
        if not all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True)):
            each = [_applied(module, method, [position]) for position in positions]
            cos, sin = (torch.cat(column) for column in zip(*each, strict=True))
            return cos, sin
    return together


def _applied(module: nn.Module, method: str, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Return the cos and sin of each pair, FP32 CPU; pairs are the halves, or neighbours.

    Raises:
        UnansweredError: the module raises, or returns something other than one q for each position.

    """
    dim: int = module.rotary_dim  # type: ignore[assignment]
    found = []
    for first, second in (
        (slice(0, dim // 2), slice(dim // 2, dim)),
        (slice(0, dim, 2), slice(1, dim, 2)),
    ):
        turned = _turned(module, method, positions, first)
        cos, sin = turned[:, first], turned[:, second]
        lengths = torch.hypot(cos, sin)
        uneven = (lengths.amax() - lengths.amin()).nan_to_num(nan=torch.inf)
        found.append((float(uneven), cos, sin))
    _, cos, sin = min(found, key=lambda one: one[0])
    return cos.contiguous(), sin.contiguous()


def _turned(module: nn.Module, method: str, positions: list[int], ones: slice) -> Tensor:
    """Return the q, FP32 CPU ``[n, head_size]``, that comes out of one with ``ones`` and zeros."""
    head: int = module.head_size  # type: ignore[assignment]
    device, count = device_of(module) or "cpu", len(positions)
    q = originals.empty((count, head), dtype=torch.float32, device=device).zero_()
    q[:, ones] = 1.0
    failed = UnansweredError("it returns no q")
    for shape in ((count, head), (count, 1, head)):  # some take heads apart themselves
        turn: Callable[..., Any] = getattr(isolated(module), method)
        ids = originals.tensor(positions, dtype=torch.int64, device=device)
        try:
            with answering(f"{method} raised"):
                answer = turn(ids, q.clone().reshape(shape), q.clone().reshape(shape))
                given = answer[0] if isinstance(answer, tuple | list) else answer
                if isinstance(given, Tensor) and given.numel() == q.numel() and not given.is_meta:
                    rotated: Tensor = plain(given).detach().reshape(count, head)
                    return rotated.to("cpu", torch.float32)
        except UnansweredError as error:
            failed = error
    raise failed
