"""Ask a rotary module's ``forward`` for cos and sin without changing the module: a copy of it answers."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope import _originals
from safe_rope._audit_reference import CosSinTable, Errors, Reference, compare
from safe_rope._rotary_state import RotaryState
from safe_rope.rotation import plain

_CONTAINERS = (dict, list, set, tuple)


class UnmeasurableError(Exception):
    """``forward`` does not answer as rotary modules do; the message says how."""


def isolated(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that owns everything a ``forward`` may write to.

    Not `copy.deepcopy`: hooks of DeepSpeed and accelerate would take half the model with them, and a
    protected module's copy would install its application function.
    """
    if next(module.parameters(), None) is not None:
        raise UnmeasurableError("it holds parameters, so it is more than a rotary module")
    duplicate = object.__new__(type(module))
    memo: dict[int, Any] = {id(module): duplicate}
    for name, value in vars(module).items():
        if name == "forward" and getattr(value, "__self__", None) is not module:
            continue  # a wrapper around the original's method, such as accelerate's
        if _is_owned(name, value, module):
            value = copy.deepcopy(value, memo)
        duplicate.__dict__[name] = value
    return duplicate


def _is_owned(name: str, value: Any, module: nn.Module) -> bool:
    if isinstance(value, _CONTAINERS):
        return "hooks" not in name and name != "_parameters"
    if isinstance(value, types.MethodType):
        return value.__self__ is module
    return isinstance(value, Tensor | RotaryState)


def measure_forward(
    module: nn.Module, reference: Reference, positions: list[int], device: torch.device
) -> tuple[Errors, list[CosSinTable], torch.dtype]:
    """Compare what ``forward`` returns for ``positions`` with float64, called with an FP32 ``x``.

    Returns:
        the errors; the tables themselves as (cos, sin, positions, length); the dtype that was returned.

    Raises:
        UnmeasurableError: ``forward`` raises, or returns something other than cos and sin.
    """
    tables = call(module, reference, positions, device, torch.float32)
    parts = [compare(reference, cos, sin, asked, length)[0] for cos, sin, asked, length in tables]
    return Errors.joined(parts), tables, tables[0][0].dtype


def call(
    module: nn.Module, reference: Reference, positions: list[int], device: torch.device, dtype: torch.dtype
) -> list[CosSinTable]:
    """Return cos and sin ``[n, rotary_dim]`` (plain tensors), the n positions and the length they are for."""
    duplicate = isolated(module)
    x = _originals.empty((1, 1, 1, 1), dtype=dtype, device=device).zero_()
    ask = _by_length if reference.convention == "length" else _by_positions
    try:
        return ask(duplicate, reference, sorted(positions), x)
    except UnmeasurableError:
        raise
    except Exception as error:  # whatever foreign code raises is part of the finding
        raise UnmeasurableError(f"forward raised {type(error).__name__}: {error}") from error


def _by_positions(
    duplicate: nn.Module, reference: Reference, positions: list[int], x: Tensor
) -> list[CosSinTable]:
    extra = {} if reference.layer_type is None else {"layer_type": reference.layer_type}

    def ask(asked: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        ids = _originals.tensor([asked], dtype=torch.int64, device=x.device)
        return *_rows(duplicate.forward, reference, len(asked), x, position_ids=ids, **extra), ids[0].cpu()

    if not reference.spec.depends_on_length:
        return [(*ask(positions), 0)]
    ask([0])  # a short sequence brings a module back that has served a long one
    return [(*ask([position]), position + 1) for position in positions]


def _by_length(
    duplicate: nn.Module, reference: Reference, positions: list[int], x: Tensor
) -> list[CosSinTable]:
    cached = int(reference.cached_length())
    calls = [(cached, [p for p in positions if p < cached])]
    calls += [(position + 1, [position]) for position in positions if position >= cached]
    tables = []
    for length, asked in calls:
        if asked:
            cos, sin = _rows(duplicate.forward, reference, length, x, seq_len=length)
            index = _originals.tensor(asked, dtype=torch.int64, device="cpu")
            tables.append((cos[index.to(cos.device)], sin[index.to(sin.device)], index, length))
    return tables


def _rows(
    forward: Callable[..., Any], reference: Reference, count: int, x: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    result = forward(x, **kwargs)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise UnmeasurableError(f"forward returned {type(result).__name__}, not cos and sin")
    tables = []
    for table in result:
        width = table.shape[-1] if isinstance(table, Tensor) and table.dim() else 0
        pairs = len(reference.base)
        if width not in (pairs, 2 * pairs) or table.numel() != count * width or table.is_complex():
            shape = list(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise UnmeasurableError(
                f"forward returned {shape} for {count} positions, not [..., {count}, {2 * pairs}]"
            )
        tables.append(plain(table).detach().reshape(count, width))
    return tables[0], tables[1]
