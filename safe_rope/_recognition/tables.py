"""Whether a tensor of a module is a position table: by where its values come from, and by its name."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base import bytecode, changes
from safe_rope._base.dtypes import low_dtype_of
from safe_rope._base.tensors import is_given_back
from safe_rope._base.turned import (
    returned_when_multiplied,
    turned_when_called,
    turned_when_multiplied,
)
from safe_rope._recognition.holdings import (
    OF_TORCH,
    entries,
    has_no_shape,
    is_inside,
    keep_nothing,
    keeps_nothing,
    kept_types,
    unfilled,
)
from safe_rope._recognition.outside import is_followed
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.waves import (
    EXACT,
    FEWEST_ROWS,
    are_phases,
    are_phasors,
    are_slopes,
    are_turns,
    error_of,
    falls_from_one,
    has_values,
    is_one_number,
    is_progression,
    oscillates,
    rises_or_falls,
)

_NUMBERS = (bool, int, float, torch.Tensor, torch.dtype)
# Their constructors set up processes, optimizers and hooks: they must never be run twice.
_NEVER_AGAIN = ("torch.", "deepspeed.", "accelerate.", "peft.")
# What is counted out and no position all the same: windows and filters of a spectrogram, noise schedules,
# bounds, statistics. The names are a supplement to where the values come from.
_NO_POSITION = re.compile(
    r"running_(mean|var)|window|stft|mel|filter|fbank|kernel|lowpass|resampl|clip|noise|beta|alpha|sigma|"
    r"schedule|quantil|boundar|(^|_)(min|max)(_|$)|(^|_)(mean|std)$|"
    r"taps|fir$|anchor|codebook|cluster"
)
# No position unless they are counted out.
_SELDOM = re.compile(r"timestep(s)?$|(^|_)scale$|(^|(?<!alibi)(?<!position)_)bias$|bucket")
_FREQUENCIES = re.compile(r"(^|_)inv_freq$")
_ALWAYS = re.compile(r"(^|_)(inv_freq|cos_cached|sin_cached)$")
_POSITION = re.compile(
    r"pos|freq|rope|rotary|(^|_)pe(_|$)|(^|_)(sin|cos)(es?|ines?)?(_|$)|sinusoid|alibi|slope|coord|"
    r"timescale|period|distance|logn"
)
# What is still to be multiplied by positions; anything else (a decay, a slope) is used as it is.
_FREQUENCY = re.compile(r"freq|timescale|theta|omega|period|div_term|(^|_)inv_|angle|phase")


def own_tensors(
    module: nn.Module, held: Iterable[tuple[str, Any]] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of `holdings.entries` that are floating, complex or may be buckets, and no parameters.

    ``held``: the entries, where they are known.
    """
    return [
        (name, value)
        for name, value in (entries(module) if held is None else held)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and is_readable(value)
        and (value.is_floating_point() or value.is_complex() or _may_be_counted(module, name, value))
        and (value.numel() > 1 or _may_be_a_base(module, name, value))
    ]


def is_readable(value: torch.Tensor) -> bool:
    """Whether torch compares the values: not those of sparse or nested tensors, nor of 8-bit floats."""
    is_small = value.is_floating_point() and value.element_size() == 1
    return value.layout == torch.strided and not value.is_nested and not is_small


LAZY = "the first forward fills it, in whatever dtype the model has by then"
UNREAD = "it is sparse, nested or in 8 bits, and nobody can say what it is to hold"


def unreadable(module: nn.Module, held: Iterable[tuple[str, Any]] | None = None) -> list[str]:
    """Names of the tensors that are called like position tables, and that nothing here can read.

    ``held``: as for `own_tensors`.
    """
    return [
        name
        for name, value in (entries(module) if held is None else held)
        if isinstance(value, torch.Tensor) and has_position_name(name) and not is_readable(value)
    ]


def _may_be_a_base(module: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Whether a number in a tensor is part of a formula: what keeps it only makes positions, or turns."""
    if value.numel() != 1 or not value.is_floating_point() or _is_moved(module, name):
        return False
    if is_inside(name) and counts(module):
        return _is_a_slope(module, name.partition(".")[0])
    return only_makes_positions(module, _stock(module)) or _only_rotates(module)


def _is_a_slope(module: nn.Module, name: str) -> bool:
    """Whether what a module keeps by a name are single slopes of ALiBi."""
    held: Any = vars(module).get(name)
    slopes = list(held.values() if type(held) is dict else held if type(held) in (list, tuple) else ())
    if not all(isinstance(one, torch.Tensor) and one.numel() == 1 and is_readable(one) for one in slopes):
        return False
    if any(one.is_meta or one.requires_grad for one in slopes) or is_state(module, name):
        return False
    if not slopes or len({one.dtype for one in slopes}) > 1:
        return False
    listed = torch.stack([one.detach().reshape(()).cpu() for one in slopes])
    return are_slopes(listed, error_of(listed))


def is_state(module: nn.Module, name: str) -> bool:
    """Whether the methods of a module change what it holds by a name, such as a counter of its calls."""
    return name in changes.changed_when_called(_stock(module))


def _is_moved(module: nn.Module, name: str) -> bool:
    """Whether each forward may change what a module holds by a name; what another method sets stays set."""
    return name in changes.changed_by_forward(_stock(module))


def _stock(module: nn.Module) -> type:
    return getattr(type(module), "_safe_rope_stock", type(module))


def _may_be_counted(module: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Whether integers may be buckets, a table in 8 bits, or what a module makes cos and sin of."""
    if value.dtype in (torch.int8, torch.uint8):
        return bytecode.facts(_stock(module)).makes_waves
    if value.dtype not in (torch.int16, torch.int32, torch.int64):
        return False
    return bool(_SELDOM.search(name.lower())) or _only_rotates(module)


def _only_rotates(module: nn.Module) -> bool:
    return bytecode.facts(_stock(module)).rotates and next(module.parameters(), None) is None


def makes_own_waves(cls: type) -> bool:
    """Whether a class takes sines of what it counts, a library's other than to fill modules it is given."""
    facts = bytecode.facts(cls)
    return facts.makes_waves if is_followed(cls) else facts.makes_own_waves


def _makes_waves(module: nn.Module) -> bool:
    return bytecode.facts(_stock(module)).makes_waves and next(module.parameters(), None) is None


def is_turned_when_multiplied(module: nn.Module, name: str) -> bool:
    """Whether a module takes sines of products with what it holds by a name, whatever that says."""
    return name in turned_when_multiplied(_stock(module))


def only_turns(module: nn.Module) -> bool:
    """Whether a module without parameters takes sines or cosines."""
    return bytecode.facts(_stock(module)).turns and next(module.parameters(), None) is None


def is_library_module(module: nn.Module) -> bool:
    """Whether a module is torch's or an engine's, whose constructor is never run twice."""
    return is_librarys(type(module))


def is_librarys(defined: Any) -> bool:
    """Whether a class or a function is torch's or an engine's."""
    return str(getattr(defined, "__module__", "")).startswith(_NEVER_AGAIN)


def has_no_positions(module: nn.Module) -> bool:
    """Whether a module keeps nothing that may be a tensor, and its class neither counts nor takes sines."""
    return not module._buffers and _have_no_positions(*kept_types(module))


@functools.lru_cache(maxsize=4096)
def _have_no_positions(cls: Any, names: tuple[str, ...], types: tuple[Any, ...]) -> bool:
    return keep_nothing(cls, names, types) and bytecode.facts(cls).makes_no_positions


def may_hold_positions(module: nn.Module) -> bool:
    """Whether it is worth a look where the module's tensors come from."""
    if is_library_module(module):
        return False
    if keeps_nothing(module):
        return False
    held = list(entries(module))
    if any(
        not is_no_position(name) or is_turned_when_multiplied(module, name)
        for name, _ in own_tensors(module, held)
    ):
        return True
    return bool(made_later(module) or uninitialized(module) or unreadable(module, held))


def only_makes_positions(module: nn.Module, stock: type) -> bool:
    """Whether a module without parameters computes positions in the forward of its class ``stock``.

    It counts them, or it takes sines of what another module holds, or sines and cosines of what NumPy has
    counted, or of a list of numbers.
    """
    facts, held = bytecode.facts(stock), vars(module).values()
    makes = facts.computes or (facts.turns and _has_given(module))
    makes |= facts.rotates and any(is_array(value) or is_list(value) for value in held)
    makes |= facts.makes_waves and any(map(_is_closure, held))
    return makes and next(module.parameters(), None) is None


def only_counts(module: nn.Module, stock: type) -> bool:
    """Whether a module without parameters counts in the forward of its class ``stock``, and takes no sines.

    It computes element by element, with numbers and tensors that it holds, and with nothing else. What asks
    for a dtype's limits, or talks to other ranks, is not to run in another dtype, nor twice. Whether it makes
    nothing but positions is told by a call.
    """
    if is_librarys(stock) or not counts(module) or only_makes_positions(module, stock) or module._modules:
        return False
    held = {**vars(module), **module._buffers}
    return all(isinstance(held.get(name), _NUMBERS) for name in bytecode.beside_arithmetic(stock))


def counts(module: nn.Module) -> bool:
    """Whether the forward of a module without parameters counts."""
    return bytecode.facts(_stock(module)).counts_when_called and next(module.parameters(), None) is None


def _has_given(module: nn.Module) -> bool:
    """Whether a module in ``module`` holds a buffer of frequencies."""
    inside = (buffer for child in module.children() for buffer in child.buffers())
    return any(not buffer.is_meta and buffer.dim() == 1 and rises_or_falls(buffer) for buffer in inside)


def _is_closure(value: Any) -> bool:
    """Whether a value is a function that holds something, as what a helper of the constructor returns."""
    return isinstance(value, types.FunctionType) and bool(value.__closure__)


def is_array(value: Any) -> bool:
    """Whether a value is a floating NumPy array, told without importing NumPy."""
    return type(value).__name__ == "ndarray" and value.dtype.kind == "f" and value.size > 1


def is_list(value: Any) -> bool:
    """Whether a value is a list or tuple of floating numbers."""
    return type(value) in (list, tuple) and len(value) > 1 and all(type(one) is float for one in value)


def made_later(module: nn.Module) -> list[str]:
    """Names of frequencies that the module has a place for and makes in its first forward."""
    return [name for name in unfilled(module) if _FREQUENCIES.search(name)]


def uninitialized(module: nn.Module) -> list[str]:
    """Names of the buffers that may be tables and get their shape in the first forward."""
    lazy = [name for name, value in module._buffers.items() if has_no_shape(value)]
    return [name for name in lazy if has_position_name(name) or bytecode.facts(type(module)).makes_waves]


def is_finished(cls: type | None, name: str, origin: Origin, tensor: torch.Tensor) -> bool:
    """Whether a table of a ``cls`` is ready for use: no phase or frequency that sines are still taken of.

    ``cls`` is None where nobody knows whose code reads it.
    """
    if cls is None:
        return bool(origin & Origin.FINISHED) or not (is_frequency(name) or _may_count(origin, tensor))
    facts = bytecode.facts(cls)
    if origin & Origin.FINISHED:
        return not (_FREQUENCIES.search(name) and facts.turns)
    if is_frequency(name) or name in turned_when_multiplied(cls):
        return False
    may_be_turned = _may_count(origin, tensor) or is_progression(tensor) or are_phases(tensor, EXACT)
    may_be_turned = may_be_turned or tensor.squeeze().dim() == 1  # what a child returns may be scaled by it
    by_another = facts.counts and falls_from_one(tensor)  # which takes sines of what this class returns
    return not (may_be_turned and (facts.turns or facts.turns_counts or by_another))


def is_handed_on(module: nn.Module, name: str, tensor: torch.Tensor, above: type | None) -> bool:
    """Whether a module without weights returns products with frequencies, which another takes sines of."""
    if tensor.is_meta or not tensor.is_floating_point() or is_state(module, name):
        return False
    if name not in returned_when_multiplied(_stock(module)) or next(module.parameters(), None) is not None:
        return False
    by_above = above is not None and bool(turned_when_called(above)) and rises_or_falls(tensor)
    return by_above or falls_from_one(tensor)


def is_never_turned(module: nn.Module, name: str, origin: Origin) -> bool:
    """Whether listed numbers beside weights are none that their class takes sines of products with."""
    if origin & Origin.COUNTED or not origin & Origin.LITERAL or is_frequency(name):
        return False
    turned, held = turned_when_multiplied(_stock(module)), {*vars(module), *module._buffers} - OF_TORCH
    are_seen = bool(turned) and turned <= held  # a property may be anything
    return are_seen and name not in turned and next(module.parameters(), None) is not None


def _may_count(origin: Origin, tensor: torch.Tensor) -> bool:
    return bool(origin & Origin.COUNTED) or (tensor.dim() == 1 and rises_or_falls(tensor))


def is_frequency(name: str) -> bool:
    """Whether a table of that name is still to be multiplied by positions."""
    return bool(_FREQUENCY.search(name.lower()))


def is_table_of(module: nn.Module, name: str, tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that the constructor of ``module`` made is a position table."""
    if not is_readable(tensor):
        return False
    if is_position_table(name, tensor, origin):
        return True
    if origin & Origin.RANDOM or tensor.is_meta or tensor.numel() < 2:
        return False
    if is_no_position(name):
        is_turned = (
            bool(origin & Origin.COUNTED) and is_turned_when_multiplied(module, name) and has_values(tensor)
        )
        return is_turned and not is_state(module, name)
    if tensor.is_floating_point() and counts(module):
        listed = bool(origin & Origin.LITERAL) and are_slopes(tensor)
        if listed or origin & Origin.COUNTED:
            # What its forward changes is a state.
            return has_values(tensor) and not bytecode.conduct(_stock(module)).stores
    if _is_buffer_turned(module, name, tensor) and has_values(tensor):
        return True
    # What cos and sin are made of, whatever it is called and wherever its numbers come from.
    if not tensor.is_floating_point():
        return bool(origin & Origin.COUNTED) and not tensor.is_complex() and _only_rotates(module)
    # The origin of a parameter's values is not followed.
    named = is_frequency(name) or isinstance(tensor, nn.Parameter)
    alone = only_makes_positions(module, _stock(module))
    scales = (alone or _only_rotates(module)) and origin is not Origin.NONE and "mask" not in name.lower()
    if scales and is_one_number(tensor):
        return not _is_moved(module, name)
    makes = alone or (named and may_be_turned(module, tensor))
    makes = makes or (bytecode.facts(_stock(module)).turns and are_phases(tensor, error_of(tensor)))
    return makes and has_values(tensor)


def _is_buffer_turned(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether ``module`` takes sines of products with a buffer that 16 bits do not hold, in any order."""
    is_there = (
        name in module._buffers and tensor.is_floating_point() and is_turned_when_multiplied(module, name)
    )
    return is_there and not is_state(module, name) and low_dtype_of(tensor.detach()) is None


def may_be_turned(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold what ``module`` takes sines and cosines of, whatever it is called."""
    return bytecode.facts(_stock(module)).turns and rises_or_falls(tensor)


def is_position_table(name: str, tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that a constructor made is a position table: by origin, supplemented by name."""
    if origin & Origin.RANDOM or tensor.is_meta or is_no_position(name):
        return False
    if tensor.numel() == 1:
        return not isinstance(tensor, nn.Parameter) and bool(torch.isfinite(tensor).all())
    if _ALWAYS.search(name):
        values = tensor.reshape(-1)
        return bool(torch.isfinite(tensor.abs()).all()) and not bool((values == values[0]).all())
    is_listed = bool(origin & Origin.LITERAL) and (is_progression(tensor) or are_slopes(tensor))
    counted = bool(origin & Origin.COUNTED) or is_listed
    if not counted and _SELDOM.search(name.lower()):
        return False
    if not tensor.is_floating_point() and not tensor.is_complex():
        return counted and bool(origin & Origin.FINISHED)
    error = error_of(tensor)
    if not counted and any(told(tensor, error) for told in (oscillates, are_phasors, are_turns)):
        return True
    if not (counted or _POSITION.search(name.lower())):
        return False
    values = tensor.reshape(-1)
    if tensor.is_floating_point() and ("mask" in name.lower() or not counted) and values.numel() >= 3:
        others = values[values != values[0]]
        if bool((others == others[:1]).all()):
            return False  # one constant, or a mask
    return has_values(tensor)


def is_no_position(name: str) -> bool:
    """Whether a name says that what it names is counted out or drawn, and holds no positions."""
    name = name.lower()
    named = _POSITION.search(name) or _FREQUENCY.search(name)
    return bool(_NO_POSITION.search(name)) and not named


def is_multiplied_and_turned(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether ``module`` takes sines of products with a buffer that may hold frequencies, or nothing yet."""
    if name not in module._buffers or not is_turned_when_multiplied(module, name):
        return False
    is_empty = tensor.is_meta or bool(tensor.isnan().any())
    return not is_no_position(name) and (is_empty or rises_or_falls(tensor, fewest=FEWEST_ROWS))


def is_counted_with(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a module that counts, and takes no sines, may hold the frequencies that a parent turns by."""
    if tensor.is_meta or is_no_position(name) or is_state(module, name):
        return False
    return counts(module) and tensor.is_floating_point() and falls_from_one(tensor)


def has_position_name(name: str) -> bool:
    """Whether a name says that what it names holds positions."""
    return bool(_ALWAYS.search(name) or _POSITION.search(name.lower()))


def is_empty_table(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of ``module`` stands on meta or holds what is no number, and is to hold positions.

    A position table's name says so, or the module, which only makes positions, or makes waves or counts and
    has no weights.
    """
    own = tensor.numel() > 1 and may_be_filled_with_positions(module, name, tensor)
    if not (own or has_position_name(name)) or not is_readable(tensor) or is_given_back(tensor):
        return False
    return tensor.is_meta or bool(tensor.isnan().any())


def may_be_filled_with_positions(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a module that only makes positions, or makes waves or counts without weights, may hold some."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    makes = only_makes_positions(module, _stock(module))
    if makes or is_no_position(name):
        return makes
    return _makes_waves(module) or (counts(module) and not is_state(module, name))


def is_seldom_position(name: str) -> bool:
    """Whether what is called so holds no positions unless those are counted out."""
    return bool(_SELDOM.search(name.lower()))
