"""cos and sin for any position, made on CPU, the same bits on every device.

Two kinds of table share one interface:

* ``RotaryTable`` ("exact"): the phase is the exact product of an integer position and the FP32 inv_freq.
  A position is split into digits; each digit has a small table in float64, and the angle addition theorems
  combine them.
* ``StockTable`` ("fp32"): bit for bit what the stock model computes in FP32 on CPU.

A table is not module state: the numbers live in a process-wide store, by content, and a table that is copied
or pickled carries its inv_freq and two factors only. To a compiler a lookup is one operator,
``safe_rope::rotary_lookup``, whose arithmetic it can neither fuse nor contract.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.positions import check_arguments, must_stay_opaque
from safe_rope._base.torch_private import is_exporting_to_onnx, is_transformed, operator
from safe_rope.tables._exact import ExactLookup
from safe_rope.tables._stock import StockLookup

__all__ = ["RotaryTable", "StockTable", "shared_table"]

Kind = Literal["exact", "fp32"]

_KEPT = 16
"""Tables that stay although nobody holds them; dynamic NTK makes a new inv_freq for every length."""


class _Lookup(Protocol):
    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...


_Lookups: dict[str, Callable[[tuple[float, ...], float, float], _Lookup]] = {
    "exact": ExactLookup,
    "fp32": StockLookup,
}

T = TypeVar("T")


class _Interned(Generic[T]):
    """One live object per key: all that somebody holds, and the most recently used that nobody does."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._live: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, T] = OrderedDict()

    def __getitem__(self, key: str) -> T:
        with self._lock:
            value = self._live.get(key)
            if value is None:
                value = self._live.setdefault(key, self._make(key))
            self._recent[key] = value
            self._recent.move_to_end(key)
            if len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
            return value


def _make_key(kind: str, inv_freq: Tensor, attention_scaling: float, position_divisor: float) -> str:
    """Return the text that describes a table fully: kind, inv_freq's bytes, both factors, in hexadecimal."""
    _check_inv_freq(inv_freq)
    factors = []
    for name, value in (("attention_scaling", attention_scaling), ("position_divisor", position_divisor)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value}; pass 1.0 for none")
        factors.append(float(value).hex())
    values = inv_freq.detach().tolist()
    return ":".join((kind, struct.pack(f"<{len(values)}f", *values).hex(), *factors))


def _check_inv_freq(inv_freq: Tensor) -> None:
    remedy = "build it with RopeSpec.inv_freq()"
    if not isinstance(inv_freq, Tensor):
        raise TypeError(f"inv_freq must be a torch.float32 tensor, got {type(inv_freq).__name__}; {remedy}")
    if inv_freq.dtype != torch.float32:
        raise TypeError(f"inv_freq must be torch.float32, got {inv_freq.dtype}; {remedy}")
    if inv_freq.device.type != "cpu":
        raise ValueError(f"inv_freq must be on cpu, got {inv_freq.device}; {remedy}")
    if inv_freq.dim() != 1 or inv_freq.numel() == 0:
        raise ValueError(
            f"inv_freq must have the shape [rotary_dim // 2], got {list(inv_freq.shape)}; {remedy}"
        )
    if not bool(inv_freq.isfinite().all()):
        raise ValueError(f"inv_freq must be finite, got {inv_freq.tolist()}; {remedy}")


def _parse_key(key: str) -> tuple[str, tuple[float, ...], float, float]:
    kind, inv_freq, attention_scaling, position_divisor = key.split(":")
    data = bytes.fromhex(inv_freq)
    values = struct.unpack(f"<{len(data) // 4}f", data)
    return kind, values, float.fromhex(attention_scaling), float.fromhex(position_divisor)


def _make_lookup(key: str) -> _Lookup:
    kind, inv_freq, attention_scaling, position_divisor = _parse_key(key)
    return _Lookups[kind](inv_freq, attention_scaling, position_divisor)


_lookups: _Interned[_Lookup] = _Interned(_make_lookup)


@operator(
    "safe_rope::rotary_lookup",
    "(Tensor position_ids, str key, ScalarType dtype) -> (Tensor, Tensor)",
    direct=("CPU", "CUDA"),
)
def _rotary_lookup(position_ids: Tensor, key: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    check_arguments(position_ids, dtype)
    cos, sin = _lookups[key](position_ids, dtype)
    # An operator's results must not share memory, as those of positions that are all the same do.
    is_shared = cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
    return cos, sin.clone() if is_shared else sin


@_rotary_lookup.register_fake
def _(position_ids: Tensor, key: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    check_arguments(position_ids, dtype)
    shape = (*position_ids.shape, len(key.split(":")[1]) // 8)
    return position_ids.new_empty(shape, dtype=dtype), position_ids.new_empty(shape, dtype=dtype)


def _mapped(info: Any, dims: Any, position_ids: Tensor, key: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Look up what vmap maps at once: a result has the dimensions of the positions, and one more behind."""
    return torch.ops.safe_rope.rotary_lookup(position_ids, key, dtype), (dims[0], dims[0])


if hasattr(_rotary_lookup, "register_vmap"):  # from torch 2.5 on; before, vmap calls the operator in a loop
    _rotary_lookup.register_vmap(_mapped)


class _Table:
    """What both kinds of table share."""

    kind: Kind

    def __init__(self, key: str) -> None:
        self.key = key
        self._lookup = _lookups[key]
        _, self._inv_freq, self.attention_scaling, self.position_divisor = _parse_key(key)

    @property
    def inv_freq(self) -> Tensor:
        """A new FP32 CPU tensor ``[rotary_dim // 2]``."""
        return originals.tensor(self._inv_freq, dtype=torch.float32, device="cpu")

    def lookup(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return cos and sin of every rotary phase, times attention_scaling.

        Args:
            position_ids: integer positions, any shape ``[...]``, any device; negative ones (padding of -1)
                give cos and sin of the negative phase.
            dtype: float32, float64, bfloat16 or float16.

        Returns:
            cos, sin: each contiguous ``[..., rotary_dim // 2]``, on position_ids' device.

        Raises:
            TypeError: position_ids is not an integer tensor, or dtype is none of the four.
            ValueError: a position is -2**63, or a uint64 beyond int64 (see the class for accelerators).
        """
        if must_stay_opaque(position_ids) or is_transformed():
            if is_exporting_to_onnx():
                check_arguments(position_ids, dtype)
                return self.evaluate(position_ids, dtype)
            cos, sin = torch.ops.safe_rope.rotary_lookup(position_ids, self.key, dtype)
            return cos, sin
        check_arguments(position_ids, dtype)
        return self._lookup(position_ids, dtype)

    def evaluate(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return what `lookup` does, by operators that every runtime has, at positions of any real dtype.

        An exact table multiplies in float64, where the product of an FP32 position and an FP32 frequency is
        exact; a stock table in FP32.
        """
        is_exact = self.kind == "exact" and positions.device.type != "mps"
        wide = torch.float64 if is_exact else torch.float32
        phase = (positions.to(wide) / self.position_divisor)[..., None] * self.inv_freq.to(
            positions.device, wide
        )
        cos, sin = phase.cos() * self.attention_scaling, phase.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)

    def __reduce__(self) -> tuple[Callable[[str], _Table], tuple[str]]:
        return _table_from_key, (self.key,)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rotary_dim={2 * len(self._inv_freq)}, "
            f"attention_scaling={self.attention_scaling}, position_divisor={self.position_divisor})"
        )


class RotaryTable(_Table):
    """cos and sin of the exact phase ``position * inv_freq``, evaluated in float64 and rounded once.

    Within 1 ulp of FP32 at every position below 10 million, the same bits on every device, eager and
    compiled. It takes less than 7 MB per device at rotary_dim 128, never grows, and is built at the first
    lookup. On CPU there is no upper bound on the position. An accelerator is never waited for; since a bad
    position cannot be refused there, one whose magnitude is 2**31 or more gives NaN. A device without
    float64 (mps) is served from the CPU, at the price of two copies and a sync.

    Args:
        inv_freq: FP32 CPU tensor ``[rotary_dim // 2]``, radians per position.
        attention_scaling: multiplies cos and sin before the rounding.

    Raises:
        TypeError: inv_freq is no FP32 tensor.
        ValueError: inv_freq is not finite, not on CPU or not one-dimensional, or the scaling not above 0.
    """

    kind: Kind = "exact"

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        super().__init__(_make_key(self.kind, inv_freq, attention_scaling, 1.0))


class StockTable(_Table):
    """cos and sin of ``fl32(position / position_divisor) * inv_freq`` in FP32, times the scaling in FP32.

    Bit-identical to the stock model on the same CPU. On another device rows come from a table that is
    computed on CPU and grown in powers of two. Each lookup there waits for the device, to learn the largest
    position. From 2**18 positions on, nothing is kept: the CPU computes and the result is copied. A CUDA
    graph waits for nothing: rows that the table lacks when it is captured are rounded from float64 there.

    Args:
        inv_freq: FP32 CPU tensor ``[rotary_dim // 2]``, radians per position.
        attention_scaling: multiplies cos and sin.
        position_divisor: divides the positions (linear scaling, in Llama before transformers 4.43).

    Raises:
        TypeError: inv_freq is no FP32 tensor.
        ValueError: inv_freq is not finite, not on CPU or not one-dimensional, or a factor not above 0.
    """

    kind: Kind = "fp32"

    def __init__(
        self, inv_freq: Tensor, attention_scaling: float = 1.0, position_divisor: float = 1.0
    ) -> None:
        super().__init__(_make_key(self.kind, inv_freq, attention_scaling, position_divisor))


_TABLES: dict[str, type[_Table]] = {"exact": RotaryTable, "fp32": StockTable}


def _new_table(key: str) -> _Table:
    table_class = _TABLES[key.partition(":")[0]]
    table = table_class.__new__(table_class)
    _Table.__init__(table, key)
    return table


_tables: _Interned[_Table] = _Interned(_new_table)


def _table_from_key(key: str) -> _Table:
    return _tables[key]


def shared_table(
    kind: Kind, inv_freq: Tensor, attention_scaling: float = 1.0, position_divisor: float = 1.0
) -> Any:
    """Return the process-wide table of this content.

    Args:
        kind: "exact" for a RotaryTable, "fp32" for a StockTable.
        inv_freq: FP32 CPU tensor ``[rotary_dim // 2]``.
        attention_scaling: multiplies cos and sin.
        position_divisor: divides the positions; an exact table takes 1.0 only.

    Returns:
        The same object for the same content, as long as somebody holds it (and a while longer). Thread-safe.

    Raises:
        TypeError, ValueError: as the classes do; ValueError for an unknown kind.
    """
    if kind not in _TABLES:
        raise ValueError(f'kind must be "exact" or "fp32", got {kind!r}; see RotaryTable and StockTable')
    return _tables[_make_key(kind, inv_freq, attention_scaling, position_divisor)]
