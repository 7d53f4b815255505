"""Position tables that are frozen parameters: they are part of the model, and have the dtype that it has.

The truthful constructors compute them in FP32, and they are rounded once to the user's dtype. Nothing keeps
them from the next cast, so that they are named. A low frequency is a wrong one, wherever it comes from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.jit import ScriptModule

from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import in_numbers, is_distributed, local_part, part_of_rank
from safe_rope._base.turned import freezes, turned_at_random, turned_when_called
from safe_rope._protection.shown import STATE
from safe_rope._recognition.explained import is_cast
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import own_class, stock_class
from safe_rope._recognition.tables import (
    has_position_name,
    is_empty_table,
    is_frequency,
    is_librarys,
    is_no_position,
    is_table_of,
    may_be_turned,
    own_tensors,
)
from safe_rope._recognition.truths import HOLDERS, ROUNDED, frozen_tables, parametrized
from safe_rope._recognition.waves import are_of_low_phases, are_sines_from_zero, oscillates, rises_or_falls

if TYPE_CHECKING:
    from safe_rope._recognition.reference import Reference

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Module)
_SAMPLE = 128
"""Rows and columns of a weight that are looked at."""
_LARGEST = 1e4
"""No number that words are embedded by is as large."""
_WHOLE = 256
"""How far BF16 counts."""
_LEFT = "is a frozen parameter: it is rounded to whatever dtype the model is given"
_TORCHS = "is in a module of torch: it is rounded to whatever dtype the model is given"
_DERIVED = "is in a module whose class torch has derived (a parametrization, fully_shard): it is as in stock"
_RANDOM = "is nothing that its constructor gives again: it is rounded to whatever dtype the model is given"
_COMPUTED = "computes positions beside weights, in whatever precision it is called with"
_COUNTED = "counts beside weights in the dtype of something else: in 16 bits those are rounded"
_HOOKED = "computes positions in whatever precision it is called with"
_WAVES = re.compile(r"\btorch\.(sin|cos|polar)\(")
_OF_LOW = "is a frozen parameter with sines of rounded phases: compute those in FP32, and round the sines"
_LOW = "is a frozen parameter in {}, too coarse for frequencies: keep it in a buffer, or the model in FP32"


def round_once(module: nn.Module, reference: Reference) -> None:
    """Give frozen position tables the values that their constructor means, rounded once to their dtype.

    Only where what they hold is explained by what was done to them (`safe_rope._recognition.explained`).

    Args:
        module: a module that holds parameters, which zero.Init may have partitioned already.
        reference: what its constructor makes.

    """
    if reference.plain:
        return
    for name, parameter, true in frozen_tables(module, reference):
        shard: torch.Tensor = getattr(parameter, "ds_tensor", parameter)  # this rank's, under ZeRO-3
        here = local_part(shard.data)
        wanted = _part_like(true.to(here.dtype), parameter, here)
        if here.is_meta or wanted is None or torch.equal(here.cpu(), wanted):
            continue
        replays = reference.replayed_parameters(name, here.device)
        parts = (_part_like(replay, parameter, here) for replay in replays)
        if any(part is not None and is_cast(here.cpu(), part) for part in parts):
            here.copy_(wanted)


def _part_like(values: torch.Tensor, parameter: torch.Tensor, here: torch.Tensor) -> torch.Tensor | None:
    """Return what of values is this rank's, which is ``here`` of a parameter; None where nothing tells."""
    if is_distributed(parameter):
        return part_of_rank(values, parameter)
    return shard_like(values, here)


def shard_like(values: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Return what of the values of a parameter belongs into this rank's shard ``here``, in its shape."""
    if values.shape == here.shape:
        return values
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    flat = values.reshape(-1)[rank * here.numel() : (rank + 1) * here.numel()]
    return torch.nn.functional.pad(flat, (0, here.numel() - flat.numel())).view(here.shape)


class Frozen(NamedTuple):
    """A frozen parameter that holds positions; ``is_damaged`` where its dtype is too small for what it is."""

    module: nn.Module
    name: str
    reason: str
    is_damaged: bool


def frozen_positions(modules: Iterable[nn.Module]) -> Iterator[Frozen]:
    """Yield the frozen position tables of modules, and of torch's own modules (an Embedding) in them."""
    for module in modules:
        if _is_torchs(module):
            continue
        for name, parameter in _own_parameters(module):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            if not (_is_told(module, name) or _is_of_sines(parameter, are_sines_from_zero)):
                continue
            cls: Any = type(module)
            is_turned = is_frequency(name) or may_be_turned(module, parameter)
            if parameter.dtype in LOW and not is_turned and bytecode.hands_on_to_waves(cls):
                is_turned = rises_or_falls(parameter)
            low = parameter.dtype in LOW and is_turned and not _was_exact(parameter)
            reason = _LOW.format(parameter.dtype) if low else _LEFT
            if not low and holds_low_phases(parameter):
                low, reason = True, _OF_LOW
            yield Frozen(module, name, reason, low)


def unseen_positions(modules: Iterable[nn.Module]) -> Iterator[Frozen]:
    """Yield the positions that nothing keeps: those of torch's own modules, and those that weights stand by.

    A module of torch, or one that TorchScript has compiled, may be given a buffer that its class has not. A
    module with weights may compute positions whenever it is called, in whatever precision.
    """
    for module in modules:
        yield from unkept_tables(module)
        yield from random_tables(module)
        is_kept = _is_kept(module) or _is_torchs(module)
        if next(module.parameters(), None) is not None:
            if not is_kept and bytecode.facts(type(module)).turns_counts:
                yield Frozen(module, "forward", _COMPUTED, False)
            elif _counts_low(module):
                yield Frozen(module, "forward", _COUNTED, False)
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if any(not is_librarys(hook) and bytecode.turns_counts(hook) for hook in hooks):
            yield Frozen(module, "a hook of its forward", _HOOKED, False)


def _counts_low(module: nn.Module) -> bool:
    """Whether a module that takes no sines counts in the dtype of something else."""
    stock: Any = stock_class(module)
    counts = not bytecode.facts(stock).turns and bytecode.counts_as_given(stock)
    return counts and not _is_torchs_class(stock)


def random_tables(module: nn.Module) -> Iterator[Frozen]:
    """Yield what a module that takes sines holds of frequencies that no constructor gives again, unkept.

    Its buffers that may be tables by name or values. Where its constructor draws numbers, those, and the
    parameters that it freezes, which it takes sines of a product with. The weights of a linear layer that it
    freezes and takes sines of the results of.
    """
    stock = own_class(stock_class(module))
    if not bytecode.facts(stock).turns or _is_torchs(module):
        return
    state: Any = vars(module).get(STATE)
    kept = set() if state is None else set(state.names(module))
    buffers = [(name, one) for name, one in own_tensors(module) if name in module._buffers]
    frozen = [(name, one) for name, one in _frozen(module._parameters.items()) if not _is_told(module, name)]
    for name, tensor in (*buffers, *(frozen if freezes(stock) else ())):
        if name in kept or not tensor.is_floating_point() or getattr(tensor, "ds_numel", tensor.numel()) < 2:
            continue  # one number may be there for its dtype
        found = not (is_no_position(name) or _loses_nothing(tensor)) and name in turned_at_random(stock)
        if name in module._buffers:
            found |= is_table_of(module, name, tensor, Origin.NONE) or is_empty_table(module, name, tensor)
        if found:
            yield Frozen(module, name, _RANDOM, False)
    for name in sorted(turned_when_called(stock)) if freezes(stock) else ():
        child = module._modules.get(name)
        if isinstance(child, nn.Linear):
            for path, one in _frozen(child.named_parameters(name, recurse=False)):
                here: torch.Tensor = getattr(one, "ds_tensor", one)  # this rank's, under ZeRO-3
                is_zero = not here.is_meta and not bool(here.detach().any())  # whatever rounds it
                if not (is_zero or _turns_by(module, one)):
                    yield Frozen(module, path, _LEFT, False)


def _is_told(module: nn.Module, name: str) -> bool:
    """Whether a frozen parameter counts as positions by its name or by what its module does."""
    return has_position_name(name) or bytecode.facts(type(module)).makes_waves


def _loses_nothing(values: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers that 16 bits have, too."""
    are_whole = (values == values.round()) & (values.abs() <= _WHOLE)
    return not values.is_meta and values.numel() > 0 and bool(are_whole.all())


def _was_exact(values: torch.Tensor) -> bool:
    """Whether 16 bits hold whole numbers, and one of them, not zero, so small that it would be rounded."""
    return _loses_nothing(values) and bool(((values != 0) & (values.abs() < _WHOLE / 4)).any())


def unkept_tables(module: nn.Module) -> Iterator[Frozen]:
    """Yield the tables of a module that are in torch's modules, or in a class that torch has derived."""
    if _is_torchs(module):
        return
    if type(module).__module__.startswith("torch."):
        yield from (Frozen(module, name, _DERIVED, False) for name in _derived_tables(module))
    for child_name, child in _torchs_inside(module):
        compiled = type(child).__module__.startswith("torch.jit.")
        if not (compiled or child._buffers):
            continue
        for name, tensor in child.named_buffers(recurse=compiled):
            if not (tensor.is_floating_point() or tensor.is_complex()) or "running_" in name:
                continue
            makes_waves = bytecode.facts(type(module)).makes_waves or turns_in_script(child)
            waves = tensor.numel() > 1 and makes_waves
            if waves or is_table_of(child, name, tensor, Origin.NONE) or is_empty_table(child, name, tensor):
                yield Frozen(module, f"{child_name}.{name}", _TORCHS, False)


def turns_in_script(module: nn.Module) -> bool:
    """Whether a module that TorchScript has compiled takes sines or cosines, whose buffers nothing keeps."""
    codes = (getattr(part, "code", "") for part in module.modules() if isinstance(part, ScriptModule))
    return any(_WAVES.search(code) for code in codes if isinstance(code, str))


def _torchs_inside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of torch's modules in a module, and of those in its lists and bare modules."""
    for name, child in module._modules.items():
        if child is not None and _is_torchs(child):
            yield prefix + name, child
            if type(child) in _CONTAINERS and name != "parametrizations":  # those are told by their names
                yield from _torchs_inside(child, f"{prefix}{name}.")


def _is_torchs(module: nn.Module) -> bool:
    """Whether the class of a module is torch's own, and not one that torch has derived of somebody's."""
    cls: Any = type(module)
    return _is_torchs_class(cls)


@functools.lru_cache(maxsize=4096)
def _is_torchs_class(cls: Any) -> bool:
    return own_class(cls).__module__.startswith("torch.")


def _is_kept(module: nn.Module) -> bool:
    """Whether a module is protected; what is parametrized of it is not even then."""
    return hasattr(type(module), "_safe_rope_stock")


def _derived_tables(module: Any) -> Iterator[str]:
    """Names of what may be tables of a module whose class torch has derived, parametrized ones included."""
    waves = bytecode.facts(type(module)).makes_waves
    parts = module._modules.get("parametrizations")
    parametrized = () if parts is None else parts.items()
    originals = [(name, b) for name, part in parametrized for b in part._buffers.values()]
    own = () if _is_kept(module) else own_tensors(module)
    for name, tensor in (*own, *originals):
        if waves or is_table_of(module, name, tensor, Origin.NONE) or is_empty_table(module, name, tensor):
            yield name


def _frozen(named: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of parameters that are frozen; of quantised ones what their first rows stand for."""
    for name, parameter in named:
        if parameter is not None and not parameter.requires_grad:
            numbers = in_numbers(parameter, _SAMPLE)
            if numbers is not None:
                yield name, numbers


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _frozen(module._parameters.items())
    yield from _frozen(parametrized(module, functools.partial(_is_told, module)))
    for child_name, child in module._modules.items():
        if isinstance(child, HOLDERS):
            held = [(f"{child_name}.{name}", p) for name, p in _frozen(child.named_parameters())]
            is_words = isinstance(child, nn.Embedding)
            yield from (pair for pair in held if not is_words or _may_hold_positions(*pair))
    for child_name, child in _torchs_inside(module):
        if not isinstance(child, HOLDERS) and bytecode.facts(type(module)).makes_waves:
            frozen = _frozen(child._parameters.items())
            told = (pair for pair in frozen if is_a_wave(pair[1]) or _turns_by(module, pair[1]))
            yield from ((f"{child_name}.{name}", one) for name, one in told)


def _turns_by(module: nn.Module, weight: torch.Tensor) -> bool:
    """Whether a frozen weight may hold the frequencies that a module turns times by, one for each."""
    part = weight.detach().reshape(-1)
    is_column = not weight.is_meta and 1 < part.numel() == max(weight.shape)
    return is_column and may_be_turned(module, part)


def _may_hold_positions(name: str, rows: torch.Tensor) -> bool:
    """Whether the rows of an Embedding may be those of positions, by name or by values, damaged ones too."""
    rows = _rows_here(rows)
    is_empty = rows.is_meta or not rows.numel() or _is_left_over(rows)
    return has_position_name(name) or is_empty or is_a_wave(rows) or holds_low_phases(rows)


def _rows_here(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole rows that this rank holds of a frozen weight, which ZeRO-3 may have partitioned."""
    shard: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    if shard is None or parameter.requires_grad or parameter.numel():
        return parameter
    width: int = parameter.ds_shape[-1]  # type: ignore[attr-defined]
    return shard.detach()[: len(shard) // width * width].view(-1, width)


def _is_left_over(rows: torch.Tensor) -> bool:
    """Whether memory holds what no embedding of words does: nobody has written to it since it was on meta."""
    sizes = rows.detach()[:_SAMPLE].float().abs()
    return not (bool((sizes < _LARGEST).all()) and bool(rows.detach().any()))


def has_damaged_sines(module: nn.Module) -> bool:
    """Whether what holds a module's tables, such as an Embedding, has frozen sines of rounded phases."""
    held = (child for child in module._modules.values() if isinstance(child, HOLDERS))
    return any(holds_low_phases(one) for child in held for _, one in _frozen(child.named_parameters()))


def holds_low_phases(parameter: torch.Tensor) -> bool:
    """Whether a frozen weight holds sines and cosines of phases that were rounded as they were made."""
    return _is_of_sines(parameter, are_of_low_phases)


def _is_of_sines(parameter: torch.Tensor, told: Callable[[torch.Tensor, float], bool]) -> bool:
    if parameter.requires_grad or parameter.is_meta or not parameter.is_floating_point():
        return False
    part = parameter.detach().squeeze()
    return part.dim() == 2 and told(part[:_SAMPLE], ROUNDED)


def is_a_wave(parameter: torch.Tensor) -> bool:
    """Whether a frozen weight holds sampled sines, as that of a convolution with a fixed basis."""
    if parameter.requires_grad or parameter.is_meta or not parameter.is_floating_point():
        return False
    part = parameter.detach().squeeze()
    part = part[:_SAMPLE, :_SAMPLE] if part.dim() == 2 else part
    return part.dim() == 2 and (oscillates(part, ROUNDED) or oscillates(part.t(), ROUNDED))
