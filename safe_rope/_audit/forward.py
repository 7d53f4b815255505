"""Ask a rotary module's ``forward`` for cos and sin without changing the module: a copy of it answers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.around import surround
from safe_rope._audit.reference import CosSinTable, PhaseReference
from safe_rope._base import originals
from safe_rope._base.tensors import is_given_back
from safe_rope._protection.pinned import PinnedState
from safe_rope._protection.rotary import RotaryState
from safe_rope._protection.shown import STATE
from safe_rope._recognition.ask import UnansweredError, answering, ask, cos_and_sin
from safe_rope._recognition.specs import position_buffers
from safe_rope.rotation import plain


def isolated(module: nn.Module, most: int = 0) -> nn.Module:
    """Return a copy of ``module`` that owns everything a ``forward`` may write to.

    Not `copy.deepcopy`: hooks of DeepSpeed and accelerate would take half the model with them, and a
    protected module's copy would install its application function.

    Args:
        module: any module.
        most: how many trained numbers it may hold; the copy has its own.

    Raises:
        UnansweredError: it holds more, or shards of them, or something is called around what is in it.
    """
    parameters = list(module.parameters())
    if sum(one.numel() for one in parameters) > most or not all(map(_is_plain, parameters)):
        raise UnansweredError("it holds parameters, so it is more than a rotary module")
    if parameters and any(one._forward_hooks or one._forward_pre_hooks for one in module.modules()):
        raise UnansweredError("something is called around its parts")
    memo: dict[int, Any] = {}
    with answering("it cannot be copied:"):
        duplicate = _isolated(module, memo)
        surround(module, duplicate, functools.partial(_own, memo=memo))
    return duplicate


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is there as a whole, in torch's own kind of tensor."""
    there = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and parameter.numel() > 0
    return there and not (parameter.is_meta or hasattr(parameter, "ds_tensor"))


def _isolated(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    duplicate = memo[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "forward" and getattr(value, "__self__", None) is not module:
            continue  # `surround` tells what stands there
        if name in ("_parameters", "_buffers", "_modules"):  # which may be a dict of DeepSpeed's own
            value = {key: _own(held, memo) for key, held in value.items()}
        elif "hooks" not in name:
            value = _own(value, memo)
        elif isinstance(value, dict):
            value = copy.copy(value)
        duplicate.__dict__[name] = value
    return duplicate


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of what ``forward`` may write to; anything else, such as FSDP's state, is shared."""
    if isinstance(value, nn.Module):
        return _isolated(value, memo)
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, Tensor) and is_given_back(value):
        raise UnansweredError("its weights are sharded, and not here")
    if isinstance(value, Tensor) and not value.is_leaf:
        return memo.setdefault(id(value), value.detach().clone())  # a view of FSDP's flat parameter
    if isinstance(value, Tensor | RotaryState | PinnedState):
        duplicate = copy.deepcopy(value, memo)
        if isinstance(value, nn.Parameter):
            vars(duplicate).update(vars(value))
        return duplicate
    if id(value) in memo:
        return memo[id(value)]
    if hasattr(type(value), "model_type"):  # a configuration, to which a forward of transformers writes
        config = memo[id(value)] = object.__new__(type(value))
        vars(config).update({name: _own(held, memo) for name, held in vars(value).items()})
        return config
    if isinstance(value, dict):
        table = memo[id(value)] = copy.copy(value)
        table.update({key: _own(held, memo) for key, held in value.items()})
        return table
    if type(value) is list:
        items: list[Any] = []
        memo[id(value)] = items
        items += [_own(held, memo) for held in value]
        return items
    if type(value) in (set, tuple):
        return type(value)(_own(held, memo) for held in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_own(held, memo) for held in value))
    if dataclasses.is_dataclass(value) and hasattr(type(value), "__slots__"):
        filled = memo[id(value)] = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(filled, field.name, _own(getattr(value, field.name), memo))
        return filled
    return value


def device_of(module: nn.Module) -> torch.device | None:
    """Where the module's tables are: the CPU where it has none, None where all are on the meta device."""
    held = [getattr(module, name) for name in position_buffers(module)]
    devices = [table.device for table in held if isinstance(table, Tensor) and not table.is_meta]
    return devices[0] if devices else None if held else torch.device("cpu")


def call(
    module: nn.Module,
    reference: PhaseReference,
    positions: list[int],
    dtype: torch.dtype,
    owned: bool = False,
) -> list[CosSinTable]:
    """Return what ``forward`` gives for ``positions`` and an ``x`` of ``dtype``: one table a call.

    A copy of the module is asked, or the module itself if it is ``owned``.

    Raises:
        UnansweredError: ``forward`` raises, or returns something other than cos and sin.
    """
    duplicate = module if owned else isolated(module)
    x = originals.empty((1, 1, 1, 1), dtype=dtype, device=device_of(module) or "cpu").zero_()
    measure = _by_length if reference.convention == "length" else _by_positions
    return measure(duplicate, reference, sorted(positions), x)


def _by_positions(
    duplicate: nn.Module, reference: PhaseReference, positions: list[int], x: Tensor
) -> list[CosSinTable]:
    def at(asked: list[int], length: int) -> CosSinTable:
        ids = originals.tensor([asked], dtype=torch.int64, device=x.device)
        cos, sin = _rows(ask(duplicate, ids, reference.layer_type, x=x), reference, len(asked))
        return CosSinTable(cos, sin, ids[0].cpu(), length, _computed_from(duplicate, reference))

    if not reference.spec.depends_on_length:
        return [at(positions, 0)]
    at([0], 0)  # a short sequence brings most modules back that have served a long one
    kept = reference.unnoted_length(duplicate)
    lengths = [kept if kept and p < reference.max_position else p + 1 for p in positions]
    return [at([position], length) for position, length in zip(positions, lengths, strict=True)]


def _computed_from(duplicate: nn.Module, reference: PhaseReference) -> Tensor | None:
    """The frequencies that the last call multiplied the positions by, float64 CPU, or None."""
    inv_freq = getattr(duplicate, f"{reference.prefix}inv_freq", None)
    if not isinstance(inv_freq, Tensor) or inv_freq.is_meta or inv_freq.shape != reference.base.shape:
        return None
    state = vars(duplicate).get(STATE)
    if isinstance(state, RotaryState) and not state.shows_what_it_used(inv_freq.device):
        return None
    values = plain(inv_freq).detach().to("cpu", torch.float64, copy=True) / reference.divisor
    return values if bool(values.isfinite().all()) else None


def _by_length(
    duplicate: nn.Module, reference: PhaseReference, positions: list[int], x: Tensor
) -> list[CosSinTable]:
    cached = int(reference.cached_length())
    within = [position for position in positions if position < cached]
    calls = [(cached, within)] if within else []
    calls += [(position + 1, [position]) for position in positions if position >= cached]
    tables = []
    for length, asked in calls:
        cos, sin = _rows(ask(duplicate, length, x=x), reference, length)
        index = originals.tensor(asked, dtype=torch.int64, device="cpu")
        rebuilt = _computed_from(duplicate, reference) if length > cached else None
        rows = cos[index.to(cos.device)], sin[index.to(sin.device)]
        tables.append(CosSinTable(*rows, index, length, rebuilt))
    return tables


def _rows(answer: Any, reference: PhaseReference, count: int) -> list[Tensor]:
    if isinstance(answer, Tensor) and answer.is_complex():
        answer = answer.real, answer.imag
    tables, pairs = [], len(reference.base)
    for table in cos_and_sin(answer):
        shape = list(table.shape) if isinstance(table, Tensor) else type(table).__name__
        width = table.shape[-1] if isinstance(table, Tensor) and table.dim() else 0
        if width not in (pairs, 2 * pairs) or table.numel() != count * width or table.is_complex():
            raise UnansweredError(
                f"forward returned {shape} for {count} positions, not [..., {count}, {2 * pairs}]"
            )
        if table.is_meta:
            raise UnansweredError("forward returned a tensor on meta")
        tables.append(plain(table).detach().reshape(count, width))
    return tables
