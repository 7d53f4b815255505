"""What a recognised application function computes (`_samples`), done by a kernel to the same bits.

Every layer of a model asks the same of the same tables: what they all need is made for the first and kept.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from safe_rope._base.positions import is_watched
from safe_rope._base.torch_private import FakeTensor
from safe_rope.rotation._checks import fault_of_states, fault_of_tables
from safe_rope.rotation._cos_sin import CosSin, read, written
from safe_rope.rotation._marks import exact
from safe_rope.rotation.kernels import Form, _eager, _few, rotate

_KEPT = 64
"""Kinds of states of which a body remembers whether and how they are laid side by side."""
_LARGEST_COMPARED = 1 << 10
"""Entries of a table beyond which it is not compared with the last one."""
_UNKNOWN: Any = object()
_BY_KERNEL: Any = object()
"""In the place of a plan: what a kernel of the device rotates."""
_PLAIN = (Tensor, FakeTensor)


class _Last(NamedTuple):
    """A call with one of some rows, and what rotates the next one that is like it (`_few.Plan`)."""

    kinds: tuple[Any, ...]
    rows: list[tuple[Tensor, ...]]
    dim: int
    sizes: tuple[int, ...]
    is_outermost: bool
    partners_at: Tensor | None


@dataclass(eq=False)
class Body:
    """How a recognised function takes its arguments, and what it computes.

    Args:
        names: the function's parameters, in order.
        states: how many of the first parameters are rotated; the result is a tuple if it is a tuple for one.
        form: which elements and columns make pairs.
        rest: what of a head passes through where tables are narrower, its "last" elements or its "first";
            None where tables have to be as wide.
        unsqueeze: where the heads' dimension goes into cos and sin, unless the call says it.
        gathers: whether cos and sin are whole tables, of which position_ids chooses the rows.
        is_tuple: whether the result is a tuple.
    """

    names: tuple[str, ...]
    states: int
    form: Form
    rest: str | None
    unsqueeze: int
    gathers: bool
    is_tuple: bool

    def __post_init__(self) -> None:
        self._count = len(self.names)
        self._cos_at, self._sin_at = self.names.index("cos"), self.names.index("sin")
        known = {*self.names[: self.states], "cos", "sin", "position_ids", "unsqueeze_dim"}
        self._others = [at for at, name in enumerate(self.names) if name not in known]
        self._unsqueeze_at = self.names.index("unsqueeze_dim") if "unsqueeze_dim" in self.names else None
        turns_halves = (
            self.names[2:4] == ("cos", "sin")
            and self.form.pairs == self.form.out == "half"
            and self.rest != "first"
            and self.is_tuple
            and not self.gathers
        )
        is_alone = (
            {self._cos_at, self._sin_at} == {1, 2}
            and self.form.pairs == self.form.out
            and self.rest != "first"
            and not self.is_tuple
            and not self.gathers
        )
        self.again = self.rotate_again
        """Return `rotate` of a call that is like an earlier one; None where nothing is known of it."""
        if turns_halves:
            self.again = self.rotate_in_row
        elif is_alone:
            self.again = self.rotate_alone
        self._last_alone: Any = None
        self._plans: dict[Any, _few.Plan | Literal[False] | None] = {}  # False: they do not fit
        self._arranged: dict[Any, tuple[Tensor, Tensor, _few.Plan | None]] = {}
        self._by_kernel: set[Any] = set()  # what states and tables have in common that a kernel takes

    def rotate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function returns for the plain values of a call; None if it has to be asked."""
        bound = self._bound(args, kwargs)
        if bound is None:
            return None
        given, cos, sin, unsqueeze = bound
        xs = self._turning(given, cos)
        if not torch.compiler.is_compiling() and xs[0].is_cpu and not is_watched() and _is_short(xs):
            return self._whole(given, self._rotate_short(args, xs, cos, sin, unsqueeze))
        results = self._rotate(xs, cos, sin, unsqueeze)
        if results is not None and not torch.compiler.is_compiling() and xs[0].is_cuda and not is_watched():
            self._note_rows(args, xs, cos, sin, unsqueeze)
        return self._whole(given, results)

    def by_kernel(self, arguments: dict[str, Any]) -> Any:
        """Return what a kernel gives for plain arguments, however few; None if it has to be asked itself."""
        bound = self._bound((), arguments)
        if bound is None:
            return None
        xs, cos, sin, unsqueeze = bound
        return self._whole(xs, self._rotate(self._turning(xs, cos), cos, sin, unsqueeze))

    def _turning(self, xs: tuple[Tensor, ...], cos: Tensor) -> tuple[Tensor, ...]:
        """Return what is rotated of ``xs``, with what passes through behind it."""
        if self.rest != "first":
            return xs
        width = self.form.rotary_dim(cos.shape[-1])
        return tuple([x[..., -width:] for x in xs])

    def _whole(self, xs: tuple[Tensor, ...], results: tuple[Tensor, ...] | None) -> Any:
        """Return the function's result of what has been made of `_turning`."""
        if results is None:
            return None
        if self.rest == "first":
            pairs = zip(xs, results, strict=True)
            results = tuple([torch.cat([x[..., : -turned.shape[-1]], turned], dim=-1) for x, turned in pairs])
        return results if self.is_tuple else results[0]

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, int] | None:
        """Return the states, cos, sin and unsqueeze_dim of a call; None where they are of another kind."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names[: len(args)], args, strict=True))  # Dynamo before torch 2.5 wants as many
        if kwargs and any(name in kwargs for name in given):
            return None
        given.update(kwargs)  # not "|=", which a Dynamo before 2.8 does not know
        cos, sin = _values(given.pop("cos", None)), _values(given.pop("sin", None))
        xs = tuple([given.pop(name, None) for name in self.names[: self.states]])
        position_ids = given.pop("position_ids", None)
        unsqueeze = given.pop("unsqueeze_dim", self.unsqueeze)
        if type(unsqueeze) is not int or any(value is not None for value in given.values()):
            return None
        if not (_is_plain(cos) and _is_plain(sin) and all(map(_is_plain, xs))):
            return None
        if self.gathers:
            if not isinstance(position_ids, Tensor) or cos.dim() != 2 or sin.dim() != 2:
                return None
            cos, sin = cos[position_ids], sin[position_ids]
        return None if fault_of_tables(cos, sin, unsqueeze) is not None else (xs, cos, sin, unsqueeze)

    def _rotate(
        self, xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, unsqueeze: int
    ) -> tuple[Tensor, ...] | None:
        cos, sin = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
        return rotate(xs, cos, sin, self.form) if self._fits(xs, cos) else None

    def _rotate_short(
        self, args: tuple[Any, ...], xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, unsqueeze: int
    ) -> tuple[Tensor, ...] | None:
        kinds = _kinds(xs)
        key = cos.shape, unsqueeze, *kinds
        rows, sin_rows = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
        plan = self._plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            fits = self._fits(xs, rows)
            plan = self._plans[key] = _few.plan(xs, cos, unsqueeze, self.form, kinds[0]) if fits else False
        if plan is False:
            return None
        if plan is None and kinds[0]:
            return rotate(xs, rows, sin_rows, self.form)
        arranged = self._columns(rows, sin_rows, plan)
        if (tables := self._tables_of(args)) is not None:
            self._keep(*tables, args, kinds, plan, arranged)
        return self._turned(xs, *arranged, plan)

    def _columns(self, cos: Tensor, sin: Tensor, plan: _few.Plan | None) -> tuple[Tensor, Tensor]:
        """Return what `_turned` multiplies by, of tables of the rank of what is rotated."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # they may be kept for a call outside of it
                return self._columns(cos, sin, plan)
        if plan is None:
            return _eager.columns(cos, sin, self.form)
        return _few.arrange(cos, sin, self.form, plan)

    def _turned(
        self, xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, plan: _few.Plan | None
    ) -> tuple[Tensor, ...]:
        """Rotate ``xs`` side by side as planned, or each by itself where there is no plan."""
        if plan is not None:
            return _few.turn(xs, cos, sin, self.form, plan)
        return tuple([_eager.rotated(x, cos, sin, self.form.pairs, self.form.out) for x in xs])

    def _keep(
        self,
        cos: CosSin,
        sin: CosSin,
        args: tuple[Any, ...],
        kinds: Any,
        plan: _few.Plan | None,
        arranged: tuple[Tensor, Tensor],
    ) -> None:
        """Keep arranged tables for a later call: of the same two, or of two that hold the same."""
        if cos.numel() <= _LARGEST_COMPARED:
            first, second = arranged
            # A clone stays what it is, whoever writes to the table.
            kept = (first.clone() if self.form.table == self.form.out else first), second
            if len(self._arranged) >= _KEPT:
                self._arranged.clear()  # of earlier steps, most of them
            self._arranged[self._equals(cos, sin, args, kinds)] = *kept, plan
            return
        self._note(cos, sin, args, kinds, (*arranged, plan))

    def _note_rows(
        self, args: tuple[Any, ...], xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, unsqueeze: int
    ) -> None:
        """Keep with a table that a kernel takes it for such states: looking at both costs as much."""
        tables = self._tables_of(args)
        if tables is None:
            return
        kinds = _kinds(xs)
        if self._unsqueeze(args) == unsqueeze:
            if len(self._by_kernel) >= _KEPT:
                self._by_kernel.clear()
            self._by_kernel.add((unsqueeze, _facts(cos), _facts(sin), *kinds))
        if not torch.is_inference_mode_enabled():
            rows = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze), _BY_KERNEL
            self._note(*tables, args, kinds, rows)

    def _tables_of(self, args: tuple[Any, ...]) -> tuple[CosSin, CosSin] | None:
        """Return the tables of a call with which something can be kept for calls with the same ones."""
        if len(args) != self._count or self.gathers:
            return None
        cos, sin = args[self._cos_at], args[self._sin_at]
        return (cos, sin) if type(cos) is type(sin) is CosSin and cos.row is None else None

    def _note(self, cos: CosSin, sin: CosSin, args: tuple[Any, ...], kinds: Any, found: Any) -> None:
        """Keep with a table what calls with the same objects find."""
        if cos.ready is None or len(cos.ready) >= _KEPT:
            cos.ready = {}
        # sin stays alive by that: its id is in the key.
        cos.ready[self._noted(args, kinds)] = *found, sin

    def _noted(self, args: tuple[Any, ...], kinds: Any) -> Any:
        """Return what calls with the same objects have in common, until somebody writes to a table."""
        return (self, written(), *map(id, args[self.states :]), *kinds)

    def rotate_in_row(self, args: tuple[Any, ...]) -> Any:
        """Return `rotate_again`; of q and k for a row at once, as long as they are like the last ones.

        It is one function that reads little. From one layer to the next the processor's caches lose what
        Python reads, and one function more costs as much as an operator on one token.
        """
        if len(args) != self._count or torch.is_grad_enabled():
            return self.rotate_again(args)
        q, k, cos, sin, *others = args
        if not (type(q) is type(k) is Tensor and type(cos) is type(sin) is CosSin):
            return self.rotate_again(args)
        row = cos.row
        if row is None or sin.row is not row or row.cos != id(cos) or sin is cos:
            return self.rotate_again(args)
        q_is, k_is = (q.shape, q.stride(), q.dtype, q.is_cpu), (k.shape, k.stride(), k.dtype, k.is_cpu)
        kinds = *q_is, *k_is, *map(id, others)
        last = row.ahead.last.get(self)
        if last is None or last[0] != kinds:
            last = self._first_in_row(args, kinds)
            if last is None:
                return self.rotate_again(args)
        _, rows, dim, sizes, is_outermost, at = last
        columns, partners = rows[row.at]
        together = torch.cat((q, k), dim)
        raised = together.float()
        swapped = raised.roll(raised.shape[-1] // 2, -1) if at is None else raised.gather(-1, at)
        raised.mul_(columns).add_(swapped.mul_(partners))
        if is_outermost:
            whole = raised if raised is together else together.copy_(raised)
            return torch.split_with_sizes(whole, sizes, dim)
        turned_q, turned_k = torch.split_with_sizes(raised, sizes, dim)
        return turned_q.to(q.dtype).contiguous(), turned_k.to(k.dtype).contiguous()

    def _first_in_row(self, args: tuple[Any, ...], kinds: tuple[Any, ...]) -> _Last | None:
        """Note what rotates a call and those like it; None where heads are not whole, or lie otherwise."""
        q, k, cos, sin = args[:4]
        plan = self._plans.get((cos.shape, self._unsqueeze(args), *_kinds((q, k))))
        if not plan or plan.order is not None or plan.width is not None or not cos.row.is_of(cos, sin):
            return None
        rows = cos.row.ahead.spread(self.form, False)
        together = (*q.shape[: plan.dim], sum(plan.sizes), *q.shape[plan.dim + 1 :])
        at = _few.partners_at(torch.Size(together), self.form.out)
        last = cos.row.ahead.last[self] = _Last(kinds, rows, plan.dim, plan.sizes, plan.is_outermost, at)
        return last

    def rotate_alone(self, args: tuple[Any, ...]) -> Any:
        """Return `rotate_again`; of one tensor at once, in one function as `rotate_in_row`."""
        if len(args) != self._count or torch.is_grad_enabled():
            return self.rotate_again(args)
        x, cos, sin = args[0], args[self._cos_at], args[self._sin_at]
        is_known = type(x) is Tensor and x.is_cpu and type(cos) is type(sin) is CosSin and cos.row is None
        if not is_known or is_watched():
            return self.rotate_again(args)
        first, second = cos.table, sin.table
        like = (
            *(x.dtype, x.shape, x.stride()),
            *(type(first), first.dtype, first.shape, first.is_cpu),
            *(type(second), second.dtype, second.shape, second.is_cpu),
            *map(id, args[3:]),
        )
        last = self._last_alone
        if last is None or last[0] != like or last[1] != _bytes(first) or last[2] != _bytes(second):
            again = self.rotate_again(args)
            self._last_alone = self._first_alone(args, like)
            return again
        columns, partners, at = last[3:]
        raised = x.clone() if x.dtype == torch.float32 else x.float()
        swapped = raised.roll(raised.shape[-1] // 2, -1) if at is None else raised.gather(-1, at)
        return raised.mul_(columns).add_(swapped.mul_(partners)).to(x.dtype)

    def _first_alone(self, args: tuple[Any, ...], like: tuple[Any, ...]) -> Any:
        """Return what rotates calls that are ``like`` this one, which has been made; None where others do."""
        x, cos, sin = args[0], args[self._cos_at], args[self._sin_at]
        if cos.ready is None or cos.numel() > _LARGEST_COMPARED or type(cos.table) is not Tensor:
            return None
        columns, partners, plan, _ = cos.ready.get(self._noted(args, _kinds((x,))), (None,) * 4)
        if type(plan) is not _few.Plan or plan.order is not None or plan.width is not None:
            return None
        partners_at = _few.partners_at(x.shape, self.form.out)
        return like, _bytes(cos.table), _bytes(sin.table), columns, partners, partners_at

    def rotate_again(self, args: tuple[Any, ...]) -> Any:
        """Return `rotate` of a call with the tables of an earlier one; None where nothing is known of it.

        Every layer asks the same of the same tables, or of another table's same rows: what they all need is
        made for the first.
        """
        if len(args) != self._count:
            return None
        table, other = args[self._cos_at], args[self._sin_at]
        if type(table) is not CosSin or table.requires_grad or getattr(other, "requires_grad", False):
            return None
        xs = given = args[: self.states]
        for x in given:
            if not isinstance(x, Tensor):
                return None
        if self.rest == "first":
            xs = self._turning(given, table)
        kinds = _kinds(xs)
        if table.row is not None:
            found = self._in_row(table, args, kinds)
        else:
            noted = None if table.ready is None else table.ready.get(self._noted(args, kinds))
            found = noted or self._alike(table, other, args, kinds)
        if found is None or (found[2] is None and kinds[0]):
            return None
        if found[2] is _BY_KERNEL:
            results = rotate(xs, found[0], found[1], self.form)
        else:
            results = self._turned(xs, *found[:3])
        if self.rest == "first":
            return self._whole(given, results)
        return results if self.is_tuple else results[0]

    def _in_row(self, table: CosSin, args: tuple[Any, ...], kinds: Any) -> Any:
        row = table.row
        if self.gathers or not row.is_of(table, args[self._sin_at]):
            return None
        plan = self._plans.get((table.shape, self._unsqueeze(args), *kinds))
        is_back = args[self._sin_at].row.is_back
        return None if not plan else (*row.ahead.spread(self.form, is_back)[row.at], plan)

    def _alike(self, table: CosSin, other: Any, args: tuple[Any, ...], kinds: Any) -> Any:
        """Return what is known of a call from one with other tables; None for nothing."""
        if type(other) is not CosSin or not (self._arranged or self._by_kernel) or is_watched():
            return None
        cos, sin = table.table, other.table
        if cos.is_cuda:
            return self._by_kernel_again(table, other, args, kinds)
        if not (type(cos) is type(sin) is Tensor and cos.is_cpu and sin.is_cpu and cos.dtype == sin.dtype):
            return None
        if cos.numel() > _LARGEST_COMPARED or cos.shape != sin.shape:
            return None
        found = self._arranged.get(self._equals(table, other, args, kinds))
        if found is not None:
            self._note(table, other, args, kinds, found)
        return found

    def _by_kernel_again(self, table: CosSin, other: CosSin, args: tuple[Any, ...], kinds: Any) -> Any:
        """Return the rows of two tables, as a kernel takes them that took two like them for such states."""
        cos, sin, unsqueeze = table.table, other.table, self._unsqueeze(args)
        if self.gathers or (unsqueeze, _facts(cos), _facts(sin), *kinds) not in self._by_kernel:
            return None
        found = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze), _BY_KERNEL  # type: ignore[arg-type]
        if not torch.is_inference_mode_enabled():
            self._note(table, other, args, kinds, found)
        return found

    def _equals(self, cos: CosSin, sin: CosSin, args: tuple[Any, ...], kinds: Any) -> Any:
        """Return what calls have in common that rotate by the same."""
        return (*kinds, self._unsqueeze(args), cos.shape, _bytes(cos.table), _bytes(sin.table))

    def _unsqueeze(self, args: tuple[Any, ...]) -> int | None:
        """Return unsqueeze_dim of a call that gives all arguments; None where nothing is known of one."""
        if self._others and any([args[at] is not None for at in self._others]):
            return None
        given = self.unsqueeze if self._unsqueeze_at is None else args[self._unsqueeze_at]
        return given if type(given) is int else None

    def _fits(self, xs: tuple[Tensor, ...], cos: Tensor) -> bool:
        """Whether ``xs`` can be rotated with the unsqueezed tables."""
        if any(
            fault_of_states(name, x, cos, self.form)
            for name, x in zip(self.names[: self.states], xs, strict=True)
        ):
            return False
        rotary_dim = self.form.rotary_dim(cos.shape[-1])
        return self.rest is not None or all(x.shape[-1] == rotary_dim for x in xs)


def _bytes(table: Tensor) -> bytes:
    """Return what a table on CPU holds, past torch: one operator costs more."""
    if not table.is_contiguous():
        table = table.contiguous()
    return (ctypes.c_char * table.nbytes).from_address(table.data_ptr()).raw


def _kinds(xs: tuple[Tensor, ...]) -> list[Any]:
    """Return what a plan depends on: whether a gradient is needed, and what each of ``xs`` is."""
    kinds: list[Any] = [False]
    learns = torch.is_grad_enabled()
    for x in xs:
        if learns and x.requires_grad:
            kinds[0] = True
        kinds.append((type(x), x.device, x.dtype, x.shape, x.stride()))
    return kinds


def _facts(table: Tensor) -> Any:
    """Return what decides whether a kernel takes a table."""
    return type(table), table.device, table.dtype, table.shape, table.requires_grad


def _is_short(xs: tuple[Tensor, ...]) -> bool:
    """Whether plain operations are faster than an autograd function, or need none."""
    return not _needs_gradient(xs) or sum([x.numel() for x in xs]) < _few.LARGEST_WITH_GRADIENT


def _needs_gradient(xs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in xs])


def _values(table: Any) -> Any:
    """Return what a table holds, to be read."""
    return read(table) if isinstance(table, CosSin) else exact(table)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN
