"""Where a tensor comes from: whether its values were counted out, and what was made of the count.

A position table is recognised by what it is computed from, not by its name: from a count (``arange``,
``linspace``, a running sum, a literal list) by arithmetic. A tensor from a random generator is none. A tensor
that went through sin, cos or a logarithm is ready to be used; a frequency still has to be multiplied by
positions.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import tensors_in
from safe_rope._base.torch_private import PythonOfCompiled, storage_key


class Origin(enum.Flag):
    """What a tensor's values have been made from and by."""

    NONE = 0
    COUNTED = enum.auto()
    """From a range, a grid or a running sum."""
    LITERAL = enum.auto()
    """From numbers that Python or NumPy computed."""
    RANDOM = enum.auto()
    FINISHED = enum.auto()
    """Through sin, cos, a logarithm or the like: no phase any more that a position is multiplied with."""
    KEPT = enum.auto()
    """From a table that was noted so before."""
    COARSE = enum.auto()
    """From counts in 16 bits, which go further than those count."""
    EMPTY = enum.auto()
    """Memory that nothing has been written to."""
    GIVEN = enum.auto()
    """From the values of an argument that `note` was told of: activations, or positions in low precision."""
    STEPS = enum.auto()
    """From counts that are no table's: made by an operation, given, or there before."""


_OF_VALUES = Origin.GIVEN | Origin.EMPTY | Origin.KEPT
"""What comes with values that are read, and not with a dtype or a shape."""

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided"}
_COUNTED = {"arange", "linspace", "logspace", "range", "cumsum", "cumprod", "triu_indices", "tril_indices"}
_RUNNING = {"cumsum", "cumprod", "cumsum_", "cumprod_"}
_LITERAL = {"tensor", "as_tensor", "from_numpy", "asarray", "scalar_tensor", "new_tensor", "full", "zeros",
            "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"}  # fmt: skip
_RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
           "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "trunc_normal_", "exponential_",
           "cauchy_", "log_normal_", "geometric_", "random_"}  # fmt: skip
_FINISHING = {"sin", "cos", "sin_", "cos_", "sinc", "polar", "log", "log2", "log10", "log1p", "tanh",
              "sigmoid", "sign", "matrix_exp", "linalg_matrix_exp"}  # fmt: skip

_UNDOING = {"exp", "exp_", "exp2", "exp2_", "angle", "atan2", "atan2_", "arctan2", "arctan2_", "atan",
            "arctan", "acos", "arccos", "asin", "arcsin"}  # fmt: skip
"""What makes frequencies of their logarithms, and phases of their sines and cosines; `exp` of complex numbers
takes those."""
_ALIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""What reads of any argument but the first no values."""


_WITHOUT_VALUES = {"requires_grad_", "share_memory_", "detach_", "rename_", "as_strided_", "squeeze_",
                   "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_",
                   "resize_", "resize_as_"}  # fmt: skip
"""What changes a tensor in place, and no value of it."""

_EACH_ITS_OWN = {"broadcast_tensors", "meshgrid", "align_tensors", "atleast_1d", "atleast_2d", "atleast_3d"}
"""What makes of each tensor one of its own."""


class Provenance(TorchFunctionMode):
    """While active, remembers the `Origin` of every tensor that operations of this thread make.

    Args:
        foreign: of what was there before and is nobody's that `note` was told of, such as a global tensor.
    """

    def __init__(self, foreign: Origin = Origin.NONE) -> None:
        super().__init__()
        self._foreign = foreign
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        self._written: set[int] = set()
        self._python = PythonOfCompiled()

    def __enter__(self) -> Provenance:
        self._python.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._python.__exit__(*error)

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Return what ``tensor`` was made from."""
        known = self._known.get(id(tensor))
        origin = known[1] if known is not None and known[0]() is tensor else Origin.NONE
        if origin & Origin.EMPTY and storage_key(tensor) in self._written:
            origin &= ~Origin.EMPTY  # through whichever alias
        return origin

    def note(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Add ``origin`` to what is known of ``tensor``."""
        key, merged = id(tensor), self.origin(tensor) | origin
        self._known[key] = (weakref.ref(tensor, lambda _: self._known.pop(key, None)), merged)

    def alive(self) -> Iterator[tuple[torch.Tensor, Origin]]:
        """Yield every tensor of a known origin that somebody still holds."""
        for reference, origin in list(self._known.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, origin

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        origin = _source(name)
        if origin is Origin.EMPTY and not any(one.numel() for one in tensors_in(result)):
            origin = Origin.LITERAL  # there is nothing to write to it
        if _is_overwritten(func, name, args):
            self._known.pop(id(args[0]), None)
        for tensor in tensors_in((args, kwargs)):
            origin |= self.origin(tensor)
        if origin & _OF_VALUES:
            read = functools.reduce(operator.or_, map(self.origin, _read(name, args, kwargs)), _source(name))
            read &= ~Origin.GIVEN if _is_truth(result) else read
            origin &= read | ~_OF_VALUES
        if self._foreign and any(map(self._is_foreign, tensors_in((args, kwargs)))):
            origin |= self._foreign
        if name in _UNDOING and isinstance(result, torch.Tensor):
            origin = origin | Origin.FINISHED if result.is_complex() else origin & ~Origin.FINISHED
        written = (*tensors_in(args[:1] if _writes(func, name) else ()), *tensors_in(kwargs.get("out")))
        if written:
            origin &= ~Origin.EMPTY
        for tensor in written:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._written.add(storage_key(tensor))
        if name in _EACH_ITS_OWN:
            for tensor, made in zip(tensors_in(args), tensors_in(result), strict=False):
                self.note(made, self.origin(tensor))
        elif origin is not Origin.NONE:
            for tensor in tensors_in(result):
                self.note(tensor, origin)
            for tensor in written:
                self._note_all_of(tensor, origin)
        return result

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and self.origin(tensor) is Origin.NONE

    def _note_all_of(self, tensor: torch.Tensor, origin: Origin) -> None:
        # A write through a view is a write to what it views.
        self.note(tensor, origin)
        base = tensor._base
        if base is not None:
            self.note(base, origin)


class Activations(Provenance):
    """As `Provenance`; a running sum of what is no mask is made of its values, as any sum is.

    ``coarse`` is the low dtype that counts were made in or cast to beyond what it holds; None where none was.
    """

    coarse: torch.dtype | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in _RUNNING:
            of = [one for one in tensors_in((args, kwargs)) if self.origin(one) & Origin.GIVEN]
            if not all(bool((one == one.round()).all()) for one in of):
                self.note(result, Origin.GIVEN)
        for made in tensors_in(result) if self.coarse is None else ():
            origin = self.origin(made)
            if (
                made.dtype in LOW
                and origin & Origin.COUNTED
                and not origin & (Origin.GIVEN | Origin.FINISHED)
            ):
                self.coarse = made.dtype if _is_beyond(made) else None
        return result


def _is_beyond(counts: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers beyond those that its dtype has."""
    largest = counts.abs().max() if counts.numel() else counts.new_zeros(())
    return bool((counts == counts.round()).all() & (largest > 2 / torch.finfo(counts.dtype).eps))


def _source(name: str) -> Origin:
    if name in _FINISHING:
        return Origin.FINISHED
    if name in _COUNTED:
        return Origin.COUNTED | Origin.STEPS
    if name in _RANDOM:
        return Origin.RANDOM
    if name in _EMPTY:
        return Origin.EMPTY
    return Origin.LITERAL if name in _LITERAL else Origin.NONE


def _read(name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors whose values an operation reads: not their dtypes or shapes, nor to count on."""
    if name.startswith("new_") or name.endswith("_like") or name in _COUNTED:
        return iter(())
    return tensors_in(args[:1] if name in _ALIKE else (args, kwargs))


def _is_truth(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.dtype == torch.bool


def _is_overwritten(func: Callable[..., Any], name: str, args: Any) -> bool:
    """Whether nothing is left of the values that the first argument had."""
    if getattr(func, "__self__", None) is torch.Tensor.data:
        return len(args) == 2
    return name == "copy_" and bool(args) and isinstance(args[0], torch.Tensor) and args[0]._base is None


def _writes(func: Callable[..., Any], name: str) -> bool:
    if name == "__set__":
        return getattr(func, "__self__", None) is not torch.Tensor.requires_grad
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__") and name not in _WITHOUT_VALUES)
        or (name.startswith("__i") and name.endswith("__"))
    )
