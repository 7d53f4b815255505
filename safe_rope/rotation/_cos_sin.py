"""`CosSin`: a table on its way from a position module to whoever uses it, exact until it meets the model.

A protected module returns cos and sin as `CosSin`. An FP32-aware application function (`safe_rope.rotation`)
takes the FP32 table out of it. Any other code sees a tensor that computes in FP32 as long as only positions
take part. When it meets a tensor of the model, it is rounded once, to the dtype that the stock model has at
that place.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from safe_rope._base import torch_private
from safe_rope._base.dtypes import LOW
from safe_rope._base.inductor import cacheable
from safe_rope._base.positions import is_watched
from safe_rope._base.tensors import mapped
from safe_rope._base.torch_private import (
    ASSERT_METADATA,
    DISABLED_TORCH_FUNCTION,
    SET_DATA,
    is_transformed,
    make_wrapper_subclass,
    pytree,
)
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation._operator_kinds import kind_of

_COPY = torch.ops.aten.copy_.default
_SET = torch.ops.aten.set_
_VIEW_AS_DTYPE = torch.ops.aten.view.dtype
_writes = 0
_this_thread = threading.local()


@cacheable
class CosSin(torch.Tensor):
    """An FP32 (or wider) position tensor, with the dtype that it has in the stock model.

    Shape and values are those of ``table``, which holds the memory. A cast to bfloat16 or float16 leaves it
    as it is and notes the dtype (a move to another device is done); whoever needs a plain tensor calls
    `plain`. Autograd follows the mark, and never the table: what operators do to that it does not see.

    Args:
        table: the values.
        nominal: the dtype in the stock model, to which the values are rounded where they meet a tensor of
            the model; None where that is not known: then FP32 meets the model.
        faced: whether ``dtype`` says the nominal dtype, and not the table's.
        phase: the name of the frequencies that it was made from, as long as it is to go through cos and sin.
        strides: those that it shows, if not the table's: what is lent has them once it has its own memory.
    """

    table: torch.Tensor
    nominal: torch.dtype | None
    faced: bool
    phase: str | None
    source: torch.Tensor
    """The table that a view is one of: what writes to the view writes to it."""
    of_graph = False
    """Whether a compiled region has returned it."""
    lent = False
    """Whether it is a copy that has not been made yet: its memory is another table's."""
    row: Any = None
    """The `safe_rope.rotation._ahead.Row` that it is, as long as it is lent."""
    wide: tuple[Any, int, torch.Tensor, tuple[int, ...]] | None = None
    """What `_lent` gave last: counts, `written` by then, the values expanded, and the strides of a copy."""
    lowered: tuple[int, torch.Tensor] | None = None
    """What `_memory` gave last, and `written` by then."""
    detached = False
    """Whether somebody has detached it, as a ``state_dict`` does: a file then has what it shows."""
    traced = False
    """Whether its own memory holds what it shows, for the file of a trace that has it."""
    ready: dict[Any, Any] | None = None
    """What an application has made of it, for the next one; good as long as `written` says the same."""

    @staticmethod
    def __new__(
        cls,
        table: torch.Tensor,
        nominal: torch.dtype | None = None,
        faced: bool = False,
        phase: str | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> CosSin:
        if table.requires_grad and torch.is_grad_enabled() and not is_transformed():
            followed: CosSin = _Marked.apply(table, nominal, faced, phase)  # type: ignore[no-untyped-call]
            return followed
        dtype = nominal if faced and nominal is not None else table.dtype
        self: CosSin = make_wrapper_subclass(
            cls, table.shape, strides=strides or table.stride(), dtype=dtype, device=table.device
        )
        self.table = self.source = table
        self.nominal, self.faced, self.phase = nominal, faced, phase
        return self

    def own(self) -> None:
        """Make the copy that it is, before somebody may write to it."""
        if self.lent:
            own = self.table.new_empty_strided(self.size(), self.stride())
            self.table = self.source = own.copy_(self.table)
            self.lent, self.row = False, None
            _lents.pop(id(self), None)

    def _memory(self) -> torch.Tensor:
        """Return a plain tensor of the dtype and strides that it shows, for what reads memory."""
        self.own()
        if self.dtype == self.table.dtype:
            return self.table
        if self.lowered is None or self.lowered[0] != _writes:
            self.lowered = _writes, _with_memory(self.table, self.dtype)
        return self.lowered[1]

    def _fill(self) -> None:
        """Have C++ find what it shows, as the file of a trace does."""
        self.traced = True
        torch_private.give_memory(self, self._memory())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return memory that holds what it shows; compilers ask for the wrapper's own."""
        if torch_private.is_compiler_at_work() or is_watched():
            return super().untyped_storage()
        return self._memory().untyped_storage()

    def _around(self, table: torch.Tensor) -> CosSin:
        made = CosSin(table, self.nominal, self.faced, self.phase)
        made.detached = self.detached
        return made

    __torch_function__ = DISABLED_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = kind_of(func)
        kwargs = kwargs or {}
        if torch_private.is_module_traced():
            for table in _flat(args):
                if isinstance(table, CosSin) and not table.traced:
                    table._fill()
        if kind.composite and torch.is_inference_mode_enabled():
            return func.decompose(*args, **kwargs)  # elsewhere autograd has taken it apart by now
        if func is _VIEW_AS_DTYPE:
            return func(args[0]._memory(), *args[1:])
        if func is ASSERT_METADATA and args[3:4] == (args[0].dtype,):
            args = (*args[:3], args[0].table.dtype, *args[4:])  # exported programs ask for what it shows
        if kind.moves and type(args[0]) is CosSin:
            if kind.repeats and (lent := _lent(args[0], tuple(args[1]))) is not None:
                return lent
            if kind.views:
                args[0].own()
            return _moved(kind.function(args[0].table, *args[1:], **kwargs), args[0], kind.views)
        if kind.converts:
            return _converted(func, args[0], kwargs)
        leaves = [leaf for leaf in _flat((*args, *kwargs.values())) if isinstance(leaf, torch.Tensor)]
        tables = [leaf for leaf in leaves if isinstance(leaf, CosSin)]
        nominal = _common_dtype(tables)
        others = [leaf for leaf in leaves if not isinstance(leaf, CosSin) and _takes_part(leaf)]
        # Autograd sees the operators on a table, and nothing of what takes it out of the mark.
        learned = any(leaf.requires_grad and not isinstance(leaf, CosSin) for leaf in leaves)
        # A number that is trained has no say in the dtype: what it is multiplied with has the model's.
        meets = nominal is not None and (any(o.dtype in LOW for o in others) or (learned and not others))
        if kind.writes:
            return _written(func, args, kwargs, tables, meets_the_model=meets)
        if meets:
            _warn_of_phases(tables)
            return _called_with(_rounded, func, args, kwargs)
        asked = None if nominal is None else kwargs.get("dtype")
        if asked in LOW:
            nominal, kwargs = asked, {**kwargs, "dtype": None}
        result = _called_with(_plain if kind.aliases else _read, func, args, kwargs)
        if asked is not None and asked not in LOW:
            return result
        keeps = not (others or learned) if nominal is not None else kind.keeps_the_mark and not learned
        if not keeps:
            return result
        phase = None if kind.ends_a_phase else tables[0].phase
        moves = kind.keeps_the_mark and not kind.ends_a_phase
        return _marked_alike(result, tables, nominal, phase, moves=moves)

    def _is_followed(self) -> bool:
        """Whether torch has to see every operator."""
        return self.requires_grad or is_watched() or torch.is_inference_mode_enabled()

    # What a step of decoding does with a table, past the dispatcher, which costs more than the operators.

    def repeat(self, *sizes: Any) -> torch.Tensor:
        """Return a copy that is made when somebody writes, where the same values are repeated in front."""
        lent = None if self._is_followed() else _lent(self, sizes)
        return super().repeat(*sizes) if lent is None else lent

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Choose rows by a tensor of positions; else as in torch."""
        is_rows = type(index) is torch.Tensor and index.dtype == torch.int64 and index.dim()
        if is_rows and not self._is_followed():
            return CosSin(self.table[index], self.nominal, self.faced, self.phase)
        return super().__getitem__(index)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Note a lower dtype; else as in torch."""
        is_dtype = len(args) == 1 and not kwargs and type(args[0]) is torch.dtype
        if is_dtype and args[0] in LOW and args[0] != self.dtype and not self._is_followed():
            return CosSin(self.table.clone(), args[0], self.faced, self.phase)
        return super().to(*args, **kwargs)

    def __neg__(self) -> torch.Tensor:
        """Negate; sin of a row is then that row's for a turn back."""
        row = self.row
        if row is None or row.cos == id(self) or self.nominal is None or self._is_followed():
            return super().__neg__()
        negated = CosSin(self.table.neg(), self.nominal, True, self.phase)
        negated.lent, negated.row = True, row._replace(is_back=not row.is_back)
        return negated

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """Return views, as torch does."""
        if self._is_followed():
            return super().split(split_size, dim)  # type: ignore[no-untyped-call]
        if self.lent:
            self.own()
        take: Any = torch_private.SPLIT if type(split_size) is int else torch.Tensor.split
        views = []
        for part in take(self.table, split_size, dim):
            views.append(view := CosSin(part, self.nominal, self.faced, self.phase))
            view.source = self.source
        return tuple(views)

    def detach(self) -> torch.Tensor:
        """Return a view without autograd, of which a file gets a plain tensor."""
        view = super().detach()
        if type(view) is CosSin:
            view.detached = True
        return view

    # What lets torch.compile take such a tensor as an input of a compiled region.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self.own()
        return ["table"], (self.nominal, self.faced, self.phase)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> CosSin:
        made = CosSin(inner["table"], *context)
        made.of_graph = True
        return made

    # What torch refuses to subclasses, or answers wrongly for them, is asked of the table itself.
    def numpy(self, **kwargs: Any) -> Any:
        self.own()
        return self.table.numpy(**kwargs)

    def tolist(self) -> Any:
        return self.table.tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.own()
        return self.table.__dlpack__(**kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.own()
        array = self.table.numpy() if dtype is None else self.table.numpy().astype(dtype)
        return array.copy() if copy else array

    @property
    def data(self) -> torch.Tensor:
        """The table, without autograd; what is assigned or written to it is written to the module's table."""
        self.own()
        same = self._around(self.table)
        same.source = self.source
        return same

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.own()
        self.table.data = plain(value)
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            self.nominal = value.dtype if self.faced else self.nominal
            SET_DATA(self, self._around(self.table))  # what it shows is of the wrapper
        _note_write(self)

    def data_ptr(self) -> int:
        return self._memory().data_ptr()  # a kernel reads the dtype that the tensor says it has

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CosSin({self.table!r})"

    def __format__(self, spec: str) -> str:
        return format(plain(self).to(self.dtype), spec)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.own()
        if self.detached or self._is_saved_by_itself(sys._getframe(1)):
            shown = self._memory().detach().requires_grad_(self.requires_grad)
            return shown.__reduce_ex__(protocol)  # type: ignore[no-any-return, no-untyped-call]
        return CosSin, (self.table, self.nominal, self.faced, self.phase)

    def _is_saved_by_itself(self, frame: Any) -> bool:
        """Whether torch.save writes it with other tensors, and with no module, which would need safe_rope."""
        leaves = pytree.tree_leaves(torch_private.saved_by_torch(frame))
        is_there = any(leaf is self for leaf in leaves)
        return is_there and not any(isinstance(leaf, torch.nn.Module) for leaf in leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> CosSin:
        self.own()
        return self._around(self.table.clone())


_lents: dict[int, weakref.ref[CosSin]] = {}
"""Copies that have not been made: a write to any table makes them first."""


class _Marked(torch.autograd.Function):
    """Marks what a gradient flows to, which takes the gradient of the mark."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, nominal: Any, faced: bool, phase: str | None) -> CosSin:
        ctx.dtype = table.dtype
        return CosSin(table.detach(), nominal, faced, phase)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return plain(gradient).to(ctx.dtype), None, None, None


class _Plain(torch.autograd.Function):
    """Takes the mark from what a gradient flows to."""

    @staticmethod
    def forward(ctx: Any, marked: CosSin) -> torch.Tensor:
        ctx.context = (marked.nominal, marked.faced, marked.phase) if marked.of_graph else None
        return _plain(marked).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # The gradient of what a graph returns has to be of the same class.
        return plain(gradient) if ctx.context is None else CosSin(plain(gradient), *ctx.context)


def _note_write(table: CosSin) -> None:
    global _writes
    _writes += 1
    if table.traced:
        table._fill()
    torch.autograd.graph.increment_version(table.source)


def written() -> int:
    """Return how often somebody has written to a marked table, whichever it was."""
    return _writes


def _takes_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a say in type promotion: as in torch, a number in a tensor does not."""
    return tensor.dim() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _common_dtype(tables: list[CosSin]) -> torch.dtype | None:
    known = [table.nominal for table in tables if table.nominal is not None]
    return functools.reduce(torch.promote_types, known) if len(known) == len(tables) else None


def _converted(func: Any, source: CosSin, kwargs: dict[str, Any]) -> torch.Tensor:
    dtype = kwargs.get("dtype")
    if dtype in LOW:
        return CosSin(func(source.table, **{**kwargs, "dtype": None}), dtype, source.faced, source.phase)
    moved: torch.Tensor = func(source.table, **kwargs)
    if dtype is None or (source.nominal is None and dtype == source.table.dtype):
        return source._around(moved)
    return moved


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield an operator's arguments, of which only lists hold others."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _called_with(
    make: Callable[[CosSin], Any], func: Any, args: Any, kwargs: dict[str, Any], targets: tuple[Any, ...] = ()
) -> Any:
    """Return what an operator gives for what ``make`` makes of the tables among its arguments.

    ``targets``: what is written to; other tensors of 16 bits are raised to FP32, which a table has.
    """

    def made(value: Any) -> Any:
        if isinstance(value, CosSin):
            return make(value)
        if targets and isinstance(value, torch.Tensor) and value.dtype in LOW:
            return value if any(value is target for target in targets) else value.float()
        return [made(one) for one in value] if isinstance(value, list | tuple) else value

    return func(*map(made, args), **{name: made(value) for name, value in kwargs.items()})


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tables: list[CosSin], *, meets_the_model: bool
) -> Any:
    """Run an operator that writes: into the memory of tables, or into other tensors."""
    target = kwargs.get("out", args[0] if args else None)
    targets = tuple(_flat((target,)))  # the operators of ``torch._foreach_add_`` and its kin have lists
    for reference in list(_lents.values()):  # no allocation, and by that no callback, while it iterates
        if (copy := reference()) is not None:
            copy.own()
    written = [one for one in targets if isinstance(one, CosSin)]
    if isinstance(target, list):
        result = func(*(_each_like(targets, arg) for arg in args), **kwargs)
        for table in written:
            _note_write(table)
        return result
    if func.overloadpacket is _SET and written:
        shown = torch.empty(0, dtype=written[0].dtype, device=written[0].device)
        written[0].data = _called_with(_rounded, func, (shown, *args[1:]), kwargs)
        return target
    if written:
        if func is _COPY:
            args = (target, _not_rounded(written[0], args[1]), *args[2:])
        result = _called_with(_plain, func, args, kwargs, targets)
        for table in written:
            if (table.size(), table.stride()) != (table.table.size(), table.table.stride()):
                SET_DATA(table, table._around(table.table))  # ``unsqueeze_``, ``resize_``
            _note_write(table)
        return target if isinstance(result, torch.Tensor) else result
    if meets_the_model:
        _warn_of_phases(tables)
    return _called_with(_rounded if meets_the_model else _plain, func, args, kwargs)


def _each_like(targets: tuple[Any, ...], argument: Any) -> Any:
    """Return an operator's list with what belongs to a table in FP32, and the rest as the model has it."""
    if not isinstance(argument, list) or len(argument) != len(targets):
        return _plain(argument) if isinstance(argument, CosSin) else argument

    def made(target: Any, value: Any) -> Any:
        if isinstance(value, CosSin):
            return _plain(value) if isinstance(target, CosSin) else _rounded(value)
        is_low = isinstance(target, CosSin) and isinstance(value, torch.Tensor) and value.dtype in LOW
        return value.float() if is_low else value

    return [made(target, value) for target, value in zip(targets, argument, strict=True)]


def _not_rounded(table: CosSin, values: torch.Tensor) -> torch.Tensor:
    """Return what is to be copied to a table: nothing that is its own value rounded, as DDP sends it."""
    if type(values) is not torch.Tensor or values.dtype not in LOW or values.shape != table.shape:
        return values
    own = table.table
    if own.device != values.device:
        return values
    return torch.where(own.to(values.dtype) == values, own, values.to(own.dtype))


def low_phases() -> int:
    """How often this thread has rounded phases before cos and sin."""
    return getattr(_this_thread, "low_phases", 0)


def _warn_of_phases(tables: list[CosSin]) -> None:
    for table in tables:
        if table.phase is not None and table.numel() > 1:
            _this_thread.low_phases = low_phases() + 1
            warnings.warn(
                f"{table.phase} meets positions or activations of low precision before cos and sin: phases "
                "are rounded there, as in the stock model. Compute them in torch.float32",
                PrecisionWarning,
                stacklevel=2,
            )


def _marked_alike(
    result: Any, tables: list[CosSin], nominal: torch.dtype | None, phase: str | None, *, moves: bool
) -> Any:
    # What is computed from a table has the dtype of the stock model, also where the table shows its own.
    faced = any(table.faced for table in tables) or (nominal is not None and not moves)

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        if (tensor.is_nested or tensor.layout is not torch.strided) and nominal is not None:
            return tensor.to(nominal)  # no wrapper has its sizes
        if tensor.is_complex() and nominal is not None and not nominal.is_complex:
            return tensor.to(torch.promote_types(nominal, torch.complex32))
        known = tensor.is_floating_point() or tensor.is_complex()
        return CosSin(tensor, nominal, faced, phase) if known else tensor

    return mark(result) if isinstance(result, torch.Tensor) else mapped(mark, result)


def _lent(table: CosSin, counts: tuple[Any, ...]) -> CosSin | None:
    """Return ``table.repeat(*counts)`` as a copy that is made when somebody needs it.

    None where anything but new dimensions in front is repeated.
    """
    known = table.wide
    if known is None or known[:2] != (counts, _writes):
        values = table.table
        added = len(counts) - values.dim()
        if added < 0 or any(
            type(n) is not int or n < 1 or (n > 1 and i >= added) for i, n in enumerate(counts)
        ):
            return None
        shape = (*counts[:added], *values.shape)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        with torch.no_grad():
            known = table.wide = counts, _writes, values.expand(shape), tuple(strides)
    copy = CosSin(known[2], table.nominal, table.faced, table.phase, known[3])
    copy.lent = True
    key = id(copy)
    _lents[key] = weakref.ref(copy, lambda _: _lents.pop(key, None))
    return copy


def _moved(result: Any, table: CosSin, is_view: bool) -> Any:
    if not isinstance(result, torch.Tensor):
        return type(result)([_moved(one, table, is_view) for one in result])
    if not is_view:
        return table._around(result)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(table.is_inference()):  # torch takes a view for what it is a view of
            moved = table._around(result)
    else:
        moved = table._around(result)
    moved.source = table.source
    return moved


def rounded(tensor: CosSin) -> torch.Tensor:
    """Return a plain tensor in the dtype that the stock model has there, rounded once."""
    tensor.own()
    table: torch.Tensor = plain(tensor)
    return table if tensor.nominal is None else table.to(tensor.nominal)


def read(table: CosSin) -> torch.Tensor:
    """Return what a table holds, for what neither writes to it nor hands it on."""
    return plain(table) if table.requires_grad else table.table


def plain(value: Any) -> Any:
    """Return a tensor without the `CosSin` mark, as a view of the same memory; anything else as it is."""
    if not isinstance(value, CosSin):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        torch_private.leave_graph_that_loses_gradients()
        return _Plain.apply(value)  # type: ignore[no-untyped-call]
    return _plain(value)


# Below autograd, which has noted what an operator does to the mark.


def _rounded(tensor: CosSin) -> torch.Tensor:
    tensor.own()
    return tensor.table if tensor.nominal is None else tensor.table.to(tensor.nominal)


def _read(table: CosSin) -> torch.Tensor:
    return table.table


def _plain(value: CosSin) -> torch.Tensor:
    if value.lent and (value.row is not None or value.table.stride() != value.stride()):
        value.own()  # the memory of many rows, or of fewer values than there are
    return value.table


def _with_memory(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of ``table`` in new memory of another dtype, with the strides that they have."""
    reach = 1 + sum((n - 1) * step for n, step in zip(table.size(), table.stride(), strict=True))
    flat = table.as_strided((reach if table.numel() else 0,), (1,)).to(dtype, copy=True)
    return flat.as_strided(table.size(), table.stride(), 0)
