"""Whether a tensor's numbers are those of positions: sines, rotations, phases, frequencies or slopes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safe_rope._base import originals
from safe_rope._base.dtypes import LOW

FEWEST = 8
"""Elements that a table made outside of modules has, and rows of a table that is told by its shape alone."""
FEWEST_ROWS = 4
"""Rows of sines; three are the samples of some sine whatever they are."""
_SWING = 0.5
"""Standard deviation of a column that goes through a sine, not through a part of it."""
_COUNTED_LOW = 256
"""Positions that BF16 counts without rounding."""
EXACT = 1e-5
"""What tables in FP32 may be off by from sines, phases or rotations."""
_WIDEST = 512
"""Coordinates that a rotation turns."""
_MOST_HEADS = 128
"""Heads that ALiBi's slopes are sought for."""
_ROUNDING = 2.0**-21
"""Relative: what FP32 numbers of a progression may be off by."""
PHASE = 2.0**-20
"""What FP32's sines may be off by for each position: eight ulps of a phase."""
_AT_ONCE = 2**18
"""Numbers that are compared in FP64 at once."""


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, and not the same everywhere; a mask may be part of it."""
    values = tensor.reshape(-1)
    finite = values[values.abs().isfinite()]
    return not bool(values.isnan().any()) and len(finite) > 0 and not bool((finite == finite[0]).all())


def is_one_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a row, or a column, of one number throughout that is not zero, as a scale is."""
    values = tensor.detach().squeeze()
    if not values.is_floating_point() or values.dim() != 1 or values.is_meta or not len(values):
        return False
    return bool(values[0].isfinite() & values[0].ne(0) & (values == values[0]).all())


def error_of(tensor: torch.Tensor) -> float:
    """What sines may be off by; some keep their tables in 16 bits on purpose."""
    return 2.0**-9 if tensor.dtype in LOW else EXACT


def is_progression(tensor: torch.Tensor) -> bool:
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


def are_counted_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds positions or phases: along an axis, each goes on by what the one before did."""
    values = tensor.detach().squeeze()
    if not values.is_floating_point() or values.is_meta:
        return False
    return any(_is_even(values.movedim(i, 0)) for i, n in enumerate(values.shape) if n >= FEWEST_ROWS)


def _is_even(rows: torch.Tensor) -> bool:
    if torch.equal(rows[0], rows[-1]):
        return False
    corner = (slice(FEWEST),) * (rows.dim() - 1)
    rows_there = slice(FEWEST_ROWS), *corner
    few = rows[rows_there]
    if not _is_on_line(few, few[0], rows[-1][corner], len(rows)):
        return False  # as most that are none: a few tell, of a cache of any size
    for part in _parts(rows):
        size = max(1, _AT_ONCE // max(1, part[0].numel()))
        for start in range(0, len(rows), size):
            if not _is_on_line(part[start : start + size], part[0], part[-1], len(rows), start):
                return False
    return True


def _is_on_line(
    some: torch.Tensor, first: torch.Tensor, last: torch.Tensor, count: int, start: int = 0
) -> bool:
    """Whether rows from ``start`` on lie evenly between the first and the last of ``count``."""
    first, last = first.double(), last.double()
    counts = torch.arange(start, start + len(some), dtype=torch.float64, device=some.device)
    line = torch.tensordot(counts, (last - first) / (count - 1), dims=0).add_(first)
    error = _ROUNDING * torch.maximum(first.abs(), last.abs())
    return bool((line.sub_(some).abs_() <= error).all())


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """All rows, in parts of which each row is small."""
    size = rows[0].numel()
    if size <= _AT_ONCE:
        yield rows
        return
    axis = max(range(1, rows.dim()), key=rows.size)
    for part in rows.chunk(-(-size // _AT_ONCE), axis):
        yield from _parts(part)


def are_slopes(tensor: torch.Tensor, error: float = _ROUNDING) -> bool:
    """Whether a tensor holds slopes of ALiBi; other short lists may be anything.

    They are powers of 2**(-8 / heads), for as many heads, or for more where a rank has a part of them.
    Where the heads are no power of two, some are those of other heads. ``error`` is what each may be off by,
    relatively.
    """
    slopes = tensor.detach().squeeze()
    if not slopes.is_floating_point() or slopes.dim() != 1 or len(slopes) < FEWEST_ROWS:
        return False
    slopes = slopes.double()
    if not bool(((slopes > 0) & (slopes < 1)).all()) or len(set(slopes.tolist())) < len(slopes):
        return False
    heads = torch.arange(len(slopes), _MOST_HEADS + 1, dtype=torch.float64, device=tensor.device)[:, None]
    places = (slopes.log2() * heads / -8).round()
    true = 2 ** (-8 * places / heads)
    are_powers = ((slopes - true).abs() <= error * true) & (places > 0) & (places <= heads)
    return bool(are_powers.all(1).any())


def rises_or_falls(tensor: torch.Tensor, fewest: int = FEWEST) -> bool:
    """Whether a tensor may hold frequencies, or phases in rows: positive numbers that rise or fall.

    The first of those that rise may be zero, as of pi times a count.
    """
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
    elif values.dim() == 1 and bool(values[0] == 0):
        values = values[1:]
    are_some = bool(steps.any()) if values.dim() == 2 else bool((values > 0).all())
    return one_way and are_some and bool((values >= 0).all())


def falls_from_one(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds what frequencies are with every base, and slopes are not."""
    rises_from_zero = tensor.dim() == 1 and len(tensor) > 0 and bool(tensor[0] == 0)
    return tensor.dim() == 1 and not rises_from_zero and rises_or_falls(tensor) and float(tensor.max()) == 1.0


def are_phasors(tensor: torch.Tensor, error: float = EXACT) -> bool:
    """Whether a tensor holds complex numbers of one length that point into different directions.

    Or pairs of real numbers, [..., 2]. ``error`` is what the length may be off by, relatively.
    """
    is_pairs = tensor.is_floating_point() and tensor.dim() > 2 and tensor.shape[-1] == 2
    if not (tensor.is_complex() or is_pairs) or tensor.numel() < (1 + is_pairs) * FEWEST:
        return False
    length = tensor.float().norm(dim=-1) if is_pairs else tensor.abs()
    scale = length.reshape(-1)[0]
    return bool(((length - scale).abs() < error * scale).all()) and has_values(tensor)


def are_turns(tensor: torch.Tensor, error: float = EXACT) -> bool:
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
    turned = len(matrices) >= FEWEST_ROWS and float((matrices[1] - matrices[0]).abs().max()) > error
    return turned and float((steps - steps[0]).abs().max()) <= error


def _turn_by_falling_angles(matrix: torch.Tensor) -> bool:
    across = matrix.triu(1).sum(-1)
    first = across != 0
    angles = torch.atan2(across.abs(), matrix.diagonal())[first]
    is_one_way = bool((across >= 0).all()) or bool((across <= 0).all())
    return is_one_way and len(angles) >= FEWEST_ROWS and bool((angles.diff() < 0).all())


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


def oscillates(tensor: torch.Tensor, error: float = EXACT) -> bool:
    """Whether every column of a table [rows, columns] is a sampled sine: x[i + 1] + x[i - 1] is c x[i].

    ``error`` is what the values may be off by. Few rows tell little of a column. Those of sines have one
    length besides: the squares of a sine and its cosine add up to 1. The first rows may tell it alone: BF16
    counts no further, and later rows of a damaged table repeat others.
    """
    if _are_pairs(tensor, error):
        tensor = tensor.flatten(1)  # a cosine and a sine for each position
    if tensor.dim() < 2 or tensor.shape[-2] < FEWEST_ROWS or not tensor.is_floating_point():
        return False
    if not tensor.numel():
        return False
    rows = tensor.reshape(-1, tensor.shape[-2], tensor.shape[-1])[0].double()
    return _are_sines(rows, error) or (len(rows) > _COUNTED_LOW and _are_sines(rows[:_COUNTED_LOW], error))


def are_sampled_sines(rows: torch.Tensor) -> bool:
    """Whether every column of FP32 rows is a sampled sine from the first to the last."""
    return len(rows) >= FEWEST_ROWS and bool(rows.numel()) and _are_sines(rows.double(), EXACT)


def _are_pairs(tensor: torch.Tensor, error: float) -> bool:
    """Whether a table [rows, 2, columns] may hold cosines and sines, of phases that fall with the columns.

    A bank of filters has no such pairs, and the phases of a Fourier transform rise.
    """
    if tensor.dim() != 3 or tensor.shape[1] != 2 or len(tensor) < FEWEST_ROWS or tensor.is_meta:
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


def _are_sines(rows: torch.Tensor, error: float) -> bool:
    if len(rows) < FEWEST:
        pairs = rows.shape[-1] / 2
        if pairs < FEWEST or bool(((rows * rows).sum(-1) - pairs).abs().max() > 2 * error * pairs):
            return False
    rest = rest_from_sines(rows)
    turns = bool((rows.std(0) > 1e-2).any())
    phase = 4 * len(rows) * 2.0**-23  # what FP32 phases of that many radians are off by
    return turns and bool((rest < max(error, phase)).all()) and bool((rows.abs() < 1 + error).all())


def rest_from_sines(rows: torch.Tensor) -> torch.Tensor:
    """How far each column is from a sampled sine."""
    before, middle, after = rows[:-2], rows[1:-1], rows[2:]
    square = (middle * middle).sum(0)
    factor = ((before + after) * middle).sum(0) / square.clamp(min=1e-30)
    return (before + after - factor * middle).abs().amax(0)


def are_sines_from_zero(tensor: torch.Tensor, error: float) -> bool:
    """Whether the rows of a table are sines and cosines of some phases, and the first those of position 0.

    The squares of a sine and its cosine add up to 1, also where phases were rounded. ``error`` is what they
    may be off by.
    """
    return _rows_from_zero(tensor, error) is not None


def are_sines_of(tensor: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0) -> bool:
    """Whether a table holds cosines and sines of positions 0, 1, 2 and so on times given frequencies.

    Each frequency has one column, or two that lie side by side or half a row apart, or a complex one. All are
    multiplied by ``scale``. FP32 may round phases as much as the audit allows.
    """
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype in LOW:
        return False
    if tensor.is_complex():
        parts = tensor.real, tensor.imag
        return all(are_sines_of(one, frequencies, scale) for one in parts)
    rows, of = tensor.detach().cpu().double().squeeze() / scale, frequencies.detach().cpu().double().flatten()
    if rows.dim() != 2 or len(rows) < FEWEST_ROWS or rows.shape[1] not in (len(of), 2 * len(of)):
        return False
    positions = originals.arange(len(rows), dtype=torch.int64, device="cpu")[:, None].double()
    columns = [of] if rows.shape[1] == len(of) else [of.repeat(2), of.repeat_interleave(2)]
    trues = [torch.where(rows[0] != 0, phases.cos(), phases.sin()) for phases in map(positions.mul, columns)]
    allowed = positions.clamp(min=1) * PHASE
    return any(bool(((rows - true).abs() <= allowed).all()) for true in trues)


def are_of_low_phases(tensor: torch.Tensor, error: float) -> bool:
    """Whether a table holds sines and cosines of phases that were rounded as they were made.

    Whole numbers are phases that 16 bits have, and so some columns are sampled sines, and others are none.
    """
    rows = _rows_from_zero(tensor, error)
    if rows is None:
        return False
    rest = rest_from_sines(rows)
    swing = rows.std(0) > _SWING
    return bool((swing & (rest < error)).any()) and bool((rest > 2 * error).any())


def _rows_from_zero(tensor: torch.Tensor, error: float) -> torch.Tensor | None:
    """Return the rows of `are_sines_from_zero` with an amplitude of 1; None where they are none."""
    if len(tensor) < 2 * FEWEST or tensor.shape[1] < FEWEST or not bool(tensor[0].any()):
        return None
    first = tensor[0].double()
    amplitude = first.abs().max()
    first = first / amplitude
    if not bool(((first == 0) | (first == 1)).all()) or int(first.sum()) * 2 != len(first):
        return None
    rows = tensor.double() / amplitude
    pairs = len(first) / 2
    are_pairs = bool(((rows * rows).sum(1) - pairs).abs().max() <= 2 * error * pairs)
    return rows if are_pairs else None
