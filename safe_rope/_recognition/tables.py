"""Whether a tensor of a module is a position table: told by where its values come from, and by its name."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import is_given_back
from safe_rope._base.turned import turned_when_multiplied
from safe_rope._recognition.holdings import (
    entries,
    has_no_shape,
    keep_nothing,
    keeps_nothing,
    kept_types,
    unfilled,
)
from safe_rope._recognition.outside import is_followed
from safe_rope._recognition.provenance import Origin

_NUMBERS = (bool, int, float, torch.Tensor, torch.dtype)
FEWEST = 8
"""Elements that a table made outside of modules has, and rows of a table that is told by its shape alone."""
_FEWEST_ROWS = 4
"""Rows of sines; three are the samples of some sine whatever they are."""
_SWING = 0.5
"""Standard deviation of a column that goes through a sine, not through a part of it."""
_COUNTED_LOW = 256
"""Positions that BF16 counts without rounding."""
_EXACT = 1e-5
"""What tables in FP32 may be off by from sines, phases or rotations."""
_WIDEST = 512
"""Coordinates that a rotation turns."""
_ROUNDING = 2.0**-21
"""Relative: what FP32 numbers of a progression may be off by."""
# Their constructors set up processes, optimizers and hooks: they must never be run twice.
_NEVER_AGAIN = ("torch.", "deepspeed.", "accelerate.", "peft.")
# What is counted out and no position all the same: windows and filters of a spectrogram, noise schedules,
# bounds, statistics. The names are a supplement to where the values come from.
_NO_POSITION = re.compile(
    r"running_(mean|var)|window|stft|mel|filter|fbank|kernel|lowpass|resampl|clip|noise|beta|alpha|sigma|"
    r"timestep(s)?$|schedule|quantil|boundar|(^|_)(min|max)(_|$)|(^|_)(mean|std)$|"
    r"taps|fir$|anchor|codebook|cluster"
)
# No position unless they are counted out.
_SELDOM = re.compile(r"(^|_)scale$|(^|(?<!alibi)(?<!position)_)bias$|bucket")
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
    if value.numel() != 1 or not value.is_floating_point() or is_state(module, name):
        return False
    return only_makes_positions(module, _stock(module)) or _only_rotates(module)


def is_state(module: nn.Module, name: str) -> bool:
    """Whether the methods of a module change what it holds by a name, such as a counter of its calls."""
    return name in bytecode.changed_when_called(_stock(module))


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
    if any(not is_no_position(name) for name, _ in own_tensors(module, held)):
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
        may_be_turned = bool(origin & Origin.COUNTED) or (tensor.dim() == 1 and rises_or_falls(tensor))
        return bool(origin & Origin.FINISHED) or not (is_frequency(name) or may_be_turned)
    facts = bytecode.facts(cls)
    if origin & Origin.FINISHED:
        return not (_FREQUENCIES.search(name) and facts.turns)
    if is_frequency(name):
        return False
    may_be_turned = bool(origin & Origin.COUNTED) or _is_progression(tensor) or are_phases(tensor, _EXACT)
    by_another = facts.counts and _falls_from_one(tensor)  # which takes sines of what this class returns
    return not (may_be_turned and (facts.turns or facts.turns_counts or by_another))


def is_frequency(name: str) -> bool:
    """Whether a table of that name is still to be multiplied by positions."""
    return bool(_FREQUENCY.search(name.lower()))


def is_table_of(module: nn.Module, name: str, tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor that the constructor of ``module`` made is a position table."""
    if not is_readable(tensor):
        return False
    if is_position_table(name, tensor, origin):
        return True
    if origin & Origin.RANDOM or tensor.is_meta or is_no_position(name) or tensor.numel() < 2:
        return False
    if tensor.is_floating_point() and counts(module):
        listed = bool(origin & Origin.LITERAL) and _are_slopes(tensor)
        if listed or origin & Origin.COUNTED:
            # What its forward changes is a state.
            return _has_values(tensor) and not bytecode.conduct(_stock(module)).stores
    # What cos and sin are made of, whatever it is called and wherever its numbers come from.
    if not tensor.is_floating_point():
        return bool(origin & Origin.COUNTED) and not tensor.is_complex() and _only_rotates(module)
    # The origin of a parameter's values is not followed.
    named = is_frequency(name) or isinstance(tensor, nn.Parameter)
    makes = (named and may_be_turned(module, tensor)) or only_makes_positions(module, _stock(module))
    makes = makes or (bytecode.facts(_stock(module)).turns and are_phases(tensor, _error_of(tensor)))
    return makes and _has_values(tensor)


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
    counted = bool(origin & Origin.COUNTED) or (bool(origin & Origin.LITERAL) and _is_progression(tensor))
    if not counted and _SELDOM.search(name.lower()):
        return False
    if not tensor.is_floating_point() and not tensor.is_complex():
        return counted and bool(origin & Origin.FINISHED)
    error = _error_of(tensor)
    if not counted and any(told(tensor, error) for told in (oscillates, are_phasors, are_turns)):
        return True
    if not (counted or _POSITION.search(name.lower())):
        return False
    values = tensor.reshape(-1)
    if tensor.is_floating_point() and ("mask" in name.lower() or not counted) and values.numel() >= 3:
        others = values[values != values[0]]
        if bool((others == others[:1]).all()):
            return False  # one constant, or a mask
    return _has_values(tensor)


def _error_of(tensor: torch.Tensor) -> float:
    """What sines may be off by; some keep their tables in 16 bits on purpose."""
    return 2.0**-9 if tensor.dtype in LOW else _EXACT


def is_no_position(name: str) -> bool:
    """Whether a name says that what it names is counted out or drawn, and holds no positions."""
    name = name.lower()
    named = _POSITION.search(name) or _FREQUENCY.search(name)
    return bool(_NO_POSITION.search(name)) and not named


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, and not the same everywhere; a mask may be part of it."""
    values = tensor.reshape(-1)
    finite = values[values.abs().isfinite()]
    return not bool(values.isnan().any()) and len(finite) > 0 and not bool((finite == finite[0]).all())


def _is_progression(tensor: torch.Tensor) -> bool:
    """Whether each row of a table rises or falls by the same number, or by the same factor."""
    rows = tensor.detach().squeeze()
    if not rows.is_floating_point() or rows.dim() == 0 or rows.shape[-1] < FEWEST:
        return False
    rows = rows.double()
    steps = rows.diff(dim=-1)
    if bool(steps.all()) and bool(((steps - steps[..., :1]).abs() <= _ROUNDING * rows.abs().max()).all()):
        return True
    ratios = rows[..., 1:] / rows[..., :-1]
    even = (ratios - ratios[..., :1]).abs() <= _ROUNDING * ratios.abs()
    return bool((rows > 0).all()) and bool((ratios != 1).all()) and bool(even.all())


def _are_slopes(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the slopes of ALiBi for as many heads; other short lists may be anything."""
    slopes = tensor.detach().squeeze().double()
    if slopes.dim() != 1 or len(slopes) < _FEWEST_ROWS:
        return False
    places = torch.arange(1, len(slopes) + 1, dtype=torch.float64, device=tensor.device)
    true = 2 ** (-8 * places / len(slopes))
    return bool(((slopes - true).abs() <= _ROUNDING * true).all())


def is_multiplied_and_turned(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether ``module`` takes sines of products with a buffer that may hold frequencies, or nothing yet."""
    if name not in module._buffers or name not in turned_when_multiplied(_stock(module)):
        return False
    is_empty = tensor.is_meta or bool(tensor.isnan().any())
    return not is_no_position(name) and (is_empty or rises_or_falls(tensor, fewest=_FEWEST_ROWS))


def rises_or_falls(tensor: torch.Tensor, fewest: int = FEWEST) -> bool:
    """Whether a tensor may hold frequencies, or phases in rows: positive numbers that rise or fall."""
    values = tensor.squeeze()
    if values.is_complex() or values.is_meta or values.dim() not in (1, 2) or len(values) < fewest:
        return False
    if values.dim() == 1 and bool(values[0] == values[-1]):
        return False
    half = len(values) // 2
    if values.dim() == 1 and half >= FEWEST and torch.equal(values[:half], values[half:]):
        values = values[:half]  # each frequency stands there twice
    steps = values.diff(dim=0)
    one_way = bool((steps >= 0).all()) or bool((steps <= 0).all())  # rounded, two may be the same
    if values.dim() == 1 and bool((steps <= 0).all()):
        values = values[: max(FEWEST // 2, int((values > 0).sum()))]  # the rest turns nothing
    are_some = bool(steps.any()) if values.dim() == 2 else bool((values > 0).all())
    return one_way and are_some and bool((values >= 0).all())


def _falls_from_one(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds what frequencies are with every base, and slopes are not."""
    return tensor.dim() == 1 and rises_or_falls(tensor) and float(tensor.max()) == 1.0


def are_phasors(tensor: torch.Tensor, error: float = _EXACT) -> bool:
    """Whether a tensor holds complex numbers of one length that point into different directions.

    Or pairs of real numbers, [..., 2]. ``error`` is what the length may be off by, relatively.
    """
    is_pairs = tensor.is_floating_point() and tensor.dim() > 2 and tensor.shape[-1] == 2
    if not (tensor.is_complex() or is_pairs) or tensor.numel() < (1 + is_pairs) * FEWEST:
        return False
    length = tensor.float().norm(dim=-1) if is_pairs else tensor.abs()
    scale = length.reshape(-1)[0]
    return bool(((length - scale).abs() < error * scale).all()) and _has_values(tensor)


def are_turns(tensor: torch.Tensor, error: float = _EXACT) -> bool:
    """Whether a tensor holds matrices [..., size, size] that turn pairs of coordinates by positions.

    Their rows are orthogonal, and have two numbers each. Each of some matrices turns by as much more than the
    one before, or the pairs turn by angles that fall from pair to pair, to the same side. ``error`` is what
    the numbers may be off by.
    """
    if tensor.dim() < 2 or not tensor.is_floating_point() or tensor.is_meta:
        return False
    size = tensor.shape[-1]
    if tensor.shape[-2] != size or size % 2 or size > _WIDEST or tensor.numel() < FEWEST:
        return False
    matrices = tensor.detach().reshape(-1, size, size)
    sizes = matrices.abs()
    turns = (sizes > error) & ((sizes - 1).abs() > error)
    if not bool(turns.any()) or not bool((matrices.count_nonzero(-1) <= 2).all()):
        return False
    matrices = matrices.double()
    there = torch.arange(1, size + 1, dtype=torch.float64, device=tensor.device) / size
    back = matrices @ (matrices.mT @ there)[..., None]
    # What turns has opposite numbers across the diagonal; what mirrors has the same.
    mirrored = (matrices + matrices.mT).abs().sum(-1) - 2 * matrices.diagonal(dim1=-2, dim2=-1).abs()
    if max(float((back[..., 0] - there).abs().max()), float(mirrored.abs().max())) > 4 * error:
        return False
    return _turn_evenly(matrices[:FEWEST], 8 * error) or _turn_by_falling_angles(matrices[0])


def _turn_evenly(matrices: torch.Tensor, error: float) -> bool:
    """Whether each rotation is the one before and the same one besides."""
    steps = matrices[1:] @ matrices[:-1].mT
    turned = len(matrices) >= _FEWEST_ROWS and float((matrices[1] - matrices[0]).abs().max()) > error
    return turned and float((steps - steps[0]).abs().max()) <= error


def _turn_by_falling_angles(matrix: torch.Tensor) -> bool:
    across = matrix.triu(1).sum(-1)
    first = across != 0
    angles = torch.atan2(across.abs(), matrix.diagonal())[first]
    is_one_way = bool((across >= 0).all()) or bool((across <= 0).all())
    return is_one_way and len(angles) >= _FEWEST_ROWS and bool((angles.diff() < 0).all())


def has_position_name(name: str) -> bool:
    """Whether a name says that what it names holds positions."""
    return bool(_ALWAYS.search(name) or _POSITION.search(name.lower()))


def is_empty_table(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of ``module`` stands on meta or holds what is no number, and is to hold positions.

    A position table's name says so, or the module, which only makes positions, or makes waves and has no
    weights.
    """
    own = tensor.numel() > 1 and may_be_filled_with_positions(module, name, tensor)
    if not (own or has_position_name(name)) or not is_readable(tensor) or is_given_back(tensor):
        return False
    return tensor.is_meta or bool(tensor.isnan().any())


def may_be_filled_with_positions(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a module that only makes positions, or makes waves and has no weights, may hold some there."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    makes = only_makes_positions(module, _stock(module))
    return makes or (_makes_waves(module) and not is_no_position(name))


def is_seldom_position(name: str) -> bool:
    """Whether what is called so holds no positions unless those are counted out."""
    return bool(_SELDOM.search(name.lower()))


def are_phases(tensor: torch.Tensor, error: float) -> bool:
    """Whether a table [rows, columns] holds products of 0, 1, 2 and so on with numbers that fall evenly.

    ``error`` is what the products may be off by, relatively.
    """
    if tensor.dim() < 2 or tensor.numel() < 2 or not tensor.is_floating_point():
        return False
    rows = tensor.reshape(-1, tensor.shape[-1])
    if bool(rows[0].any()):
        return False
    rows, half = rows.double(), rows.shape[-1] // 2
    rows = rows[:, :half] if torch.equal(rows[:, :half], rows[:, half:]) else rows
    if min(rows.shape[0], 2 * rows.shape[1]) < FEWEST or not bool((rows[1:] > 0).all()):
        return False
    counts = torch.arange(len(rows), dtype=torch.float64, device=rows.device)
    products = counts[:, None] * (rows[-1] / counts[-1])
    ratios = rows[-1, 1:] / rows[-1, :-1]
    is_even = bool(((ratios - ratios[0]).abs() <= 2 * error * ratios).all()) and bool((ratios < 1).all())
    return is_even and bool(((rows - products).abs() <= 2 * error * products).all())


def oscillates(tensor: torch.Tensor, error: float = _EXACT) -> bool:
    """Whether every column of a table [rows, columns] is a sampled sine: x[i + 1] + x[i - 1] is c x[i].

    ``error`` is what the values may be off by. Few rows tell little of a column. Those of sines have one
    length besides: the squares of a sine and its cosine add up to 1. The first rows may tell it alone: BF16
    counts no further, and later rows of a damaged table repeat others.
    """
    if _are_pairs(tensor, error):
        tensor = tensor.flatten(1)  # a cosine and a sine for each position
    if tensor.dim() < 2 or tensor.shape[-2] < _FEWEST_ROWS or not tensor.is_floating_point():
        return False
    rows = tensor.reshape(-1, tensor.shape[-2], tensor.shape[-1])[0].double()
    return _are_sines(rows, error) or (len(rows) > _COUNTED_LOW and _are_sines(rows[:_COUNTED_LOW], error))


def _are_pairs(tensor: torch.Tensor, error: float) -> bool:
    """Whether a table [rows, 2, columns] may hold cosines and sines, of phases that fall with the columns.

    A bank of filters has no such pairs, and the phases of a Fourier transform rise.
    """
    if tensor.dim() != 3 or tensor.shape[1] != 2 or len(tensor) < _FEWEST_ROWS or tensor.is_meta:
        return False
    if not tensor.is_floating_point() or not tensor.shape[2]:
        return False
    length = tensor.float().norm(dim=1)
    if not bool(((length - length[:1, :1]).abs() <= 2 * error * length[:1, :1]).all()):
        return False
    (one, other), (following, beside) = tensor[0].double(), tensor[1].double()
    steps = torch.atan2(one * beside - other * following, one * following + other * beside).abs()
    half = len(steps) // 2
    steps = steps[:half] if half and torch.equal(steps[:half], steps[half:]) else steps
    return bool((steps.diff() <= 0).all())


def are_of_low_phases(tensor: torch.Tensor, error: float) -> bool:
    """Whether the rows of a table are sines and cosines of phases that were rounded as they were made.

    The squares of a sine and its cosine add up to 1 all the same. The first row is that of position 0. Whole
    numbers are phases that 16 bits have, and so some columns are sampled sines, and others are none.
    """
    if len(tensor) < 2 * FEWEST or tensor.shape[1] < FEWEST or not bool(tensor[0].any()):
        return False
    rows = tensor.double() / tensor[0].double().abs().max()
    begins = bool(((rows[0] == 0) | (rows[0] == 1)).all()) and int(rows[0].sum()) * 2 == len(rows[0])
    pairs = len(rows[0]) / 2
    if not begins or bool(((rows * rows).sum(1) - pairs).abs().max() > 2 * error * pairs):
        return False
    rest = _rest(rows)
    swing = rows.std(0) > _SWING
    return bool((swing & (rest < error)).any()) and bool((rest > 2 * error).any())


def _are_sines(rows: torch.Tensor, error: float) -> bool:
    if len(rows) < FEWEST:
        pairs = rows.shape[-1] / 2
        if pairs < FEWEST or bool(((rows * rows).sum(-1) - pairs).abs().max() > 2 * error * pairs):
            return False
    rest = _rest(rows)
    turns = bool((rows.std(0) > 1e-2).any())
    phase = 4 * len(rows) * 2.0**-23  # what FP32 phases of that many radians are off by
    return turns and bool((rest < max(error, phase)).all()) and bool((rows.abs() < 1 + error).all())


def _rest(rows: torch.Tensor) -> torch.Tensor:
    """How far each column is from a sampled sine."""
    before, middle, after = rows[:-2], rows[1:-1], rows[2:]
    square = (middle * middle).sum(0)
    factor = ((before + after) * middle).sum(0) / square.clamp(min=1e-30)
    return (before + after - factor * middle).abs().amax(0)
