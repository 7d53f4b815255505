"""What the analysis knows about an expression."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Literal

Sort = Literal["number", "numbers", "tensor", "dtype", "device", "none", "unknown"]

PINNED = {"float32", "float64"}
LOW = {"bfloat16", "float16", "float8"}
# "default": torch.get_default_dtype(); "inherited": that of something a cast or a caller can lower;
# "float": some floating dtype. "" is unknown.
FLOATING = {*PINNED, *LOW, "default", "inherited", "float"}


@dataclass(frozen=True, slots=True)
class Value:
    """A number, sequence of numbers, tensor or dtype; None and "" where nothing is known."""

    sort: Sort = "unknown"
    whole: bool | None = None  # numbers and tensors: every value is an integer, of whatever type
    floating: bool | None = None  # numbers: a Python float
    constant: int | float | None = None
    bound: float | None = None  # numbers: no larger in magnitude
    dtype: str = ""  # tensors and dtypes
    source: str = ""  # dtypes: the expression or parameter it comes from
    grid: bool = False  # tensors: derived from an arange or linspace
    exponent: bool = False  # tensors: a number raised to such a grid, as inverse frequencies are
    # It rests on a name, a default or the calls in this file: good enough for a finding, not for a safe fix.
    assumed: bool = field(default=False, compare=False)
    # Numbers: it is floating by its annotation, which an int satisfies too.
    nominal: bool = field(default=False, compare=False)

    @property
    def is_int(self) -> bool:
        """Whether this is a tensor of integers or booleans, or such a dtype."""
        return self.dtype in ("int", "bool")

    @property
    def is_float(self) -> bool:
        """Whether this is surely a Python float."""
        return self.sort == "number" and self.floating is True

    @property
    def is_proven_real(self) -> bool:
        """Whether this is surely a real Python number, or a tensor of integers."""
        return not self.assumed and (self.sort == "number" or (self.sort == "tensor" and self.is_int))

    @property
    def is_proven_float(self) -> bool:
        """Whether this is surely a Python float, whatever is given for an annotation."""
        return self.is_float and not self.assumed and not self.nominal

    @property
    def lowerable(self) -> bool:
        """Whether a cast, a default or a caller can lower this floating dtype."""
        return self.dtype in ("default", "inherited", "float", *LOW)


UNKNOWN = Value()
INT = Value("number", whole=True, floating=False)
INT_BY_NAME = Value("number", whole=True, floating=False, assumed=True)
INTS = Value("numbers", whole=True, floating=False)
FLOAT = Value("number", floating=True)
FLOAT_BY_ANNOTATION = Value("number", floating=True, nominal=True)
COMPLEX = Value(dtype="complex")
NONE = Value("none")
DEVICE = Value("device")


def number(constant: int | float) -> Value:
    """Return what is known of a literal, or of what is computed of some."""
    if abs(constant) > sys.float_info.max:
        return FLOAT if isinstance(constant, float) else INT_BY_NAME  # infinite, or larger than any float
    floating = isinstance(constant, float)
    whole = not isinstance(constant, float) or constant.is_integer()
    return Value("number", whole, floating, constant, abs(constant))


def tensor(
    dtype: str,
    whole: bool | None = None,
    *,
    grid: bool = False,
    exponent: bool = False,
    assumed: bool = False,
) -> Value:
    """Return a tensor of a dtype; integers are whole."""
    whole = True if dtype in ("int", "bool") else whole
    return Value("tensor", whole, dtype=dtype, grid=grid, exponent=exponent, assumed=assumed)


def assume(value: Value) -> Value:
    """Return a value as one that nothing proves."""
    return value if value.assumed else replace(value, assumed=True)


def join(values: list[Value]) -> Value:
    """Return what holds whichever of the values it is; None among them is ignored."""
    some = [value for value in values if value.sort != "none"]
    if not some:
        return NONE if values else UNKNOWN
    first = some[0]
    assumed = any(value.assumed for value in some)
    nominal = any(value.nominal for value in some)
    if all(value == first for value in some):
        known = (assumed, nominal) == (first.assumed, first.nominal)
        return first if known else replace(first, assumed=assumed, nominal=nominal)
    sorts = {value.sort for value in some}
    sort = first.sort if len(sorts) == 1 else "tensor" if sorts == {"tensor", "unknown"} else "unknown"
    dtypes = {value.dtype for value in some}
    if len(dtypes) == 1:
        dtype = first.dtype
    elif dtypes <= {"int", "bool"}:
        dtype = "int"
    elif dtypes <= PINNED:
        dtype = "float32"  # the narrower one
    elif "" in dtypes and sort != "dtype":
        dtype = ""
    else:
        dtype = "inherited"
    bounds = [value.bound for value in some]
    return Value(
        sort,
        whole=_common([value.whole for value in some]),
        floating=_common([value.floating for value in some]),
        bound=None if None in bounds else max(filter(None, bounds), default=0),
        dtype=dtype,
        source=next((value.source for value in some if value.source), ""),
        grid=any(value.grid for value in some),
        exponent=any(value.exponent for value in some),
        assumed=assumed,
        nominal=nominal,
    )


def _common(flags: list[bool | None]) -> bool | None:
    return flags[0] if all(flag is flags[0] for flag in flags) else None
