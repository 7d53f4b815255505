"""Compare what a module's forward answers with what the same forward does in its constructor's own module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import device_of, isolated
from safe_rope._audit.reference import TOLERANCE, Errors, sizes
from safe_rope._base import changes, originals
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import in_real_numbers, tensors_in
from safe_rope._protection.rewrite import is_pinned
from safe_rope._recognition.ask import UnansweredError, ask, copied
from safe_rope._recognition.holdings import entries, get_table
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import Convention, calling_convention
from safe_rope.rotation import plain


class Answers:
    """What forward returned for some positions, beside what it should return.

    Attributes:
        positions: int64 CPU ``[n]``.
        pairs: each tensor of the answer, FP32 on CPU ``[n, channels]``, with what it should be.
        rewritten: names of the tables that forward puts others in the place of; of a module whose tables are
            kept, those of its constructor's own module.
    """

    def __init__(
        self,
        module: nn.Module,
        built: nn.Module,
        convention: Convention,
        layer_type: str | None,
        positions: list[int],
    ) -> None:
        """Ask both.

        Raises:
            UnansweredError: forward raises, or returns something other than values for each position.
        """
        self.positions = originals.tensor(positions, dtype=torch.int64, device="cpu")
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.rewritten: set[str] = set()
        problem = UnansweredError("forward takes positions in a way that is not known")
        for form in _forms(convention, self.positions):
            try:
                true, made = _asked(built, form, layer_type, None)
                expected = self._rows(true, form)
            except UnansweredError as error:
                problem = error
                continue
            device = device_of(module) or torch.device("cpu")
            x = originals.empty((1, 1, 1, 8), dtype=torch.float32, device=device).zero_()
            asked = form if isinstance(form, int) else form.to(device)
            x = x if isinstance(form, int) else x.new_zeros((*form.shape[-2:], 8))
            answer, self.rewritten = _asked(module, asked, layer_type, x)
            if is_pinned(module):  # what keeps its tables puts others there, too
                self.rewritten = made
            actual = self._rows(answer, form)
            if [a.shape for a in actual] != [e.shape for e in expected]:
                raise UnansweredError("forward returns other shapes than its constructor's own module does")
            self.pairs = list(zip(actual, expected, strict=True))
            return
        raise problem

    def _rows(self, answer: Any, form: Tensor | int) -> list[Tensor]:
        rows = []
        for table in map(plain, tensors_in(answer)):
            count = form if isinstance(form, int) else len(self.positions)
            real = in_real_numbers(table).flatten(-2) if table.is_complex() else table
            if count not in real.shape[:-1]:
                raise UnansweredError(f"forward returned {list(table.shape)} for {count} positions")
            if table.is_meta:
                raise UnansweredError("forward returned a tensor on meta")
            flat = real.detach().float().cpu().movedim(real.shape.index(count), 0).flatten(1)
            rows.append(flat[self.positions] if isinstance(form, int) else flat)
        if not rows:
            raise UnansweredError(f"forward returned {type(answer).__name__}, no tensors")
        return rows

    def allow_rounding(self) -> None:
        """Take what is right but for one rounding to a 16-bit dtype for what it was rounded from."""
        for at, (actual, expected) in enumerate(self.pairs):
            if any(torch.equal(actual, expected.to(dtype).float()) for dtype in LOW):
                self.pairs[at] = expected, expected

    def errors(self) -> Errors:
        """How far the answers are off, by position; of a phase what the values tell."""
        off = torch.stack([_between(*pair).amax(-1) for pair in self.pairs]).amax(0)
        finite = [e.masked_fill(~e.isfinite(), 0.0).abs().amax(-1).double() for _, e in self.pairs]
        size = sizes(torch.stack(finite).amax(0), self.positions)
        allowed = TOLERANCE * size * self.positions.double().clamp(min=1.0)
        return Errors(self.positions, (off / size).clamp(max=torch.pi), off, off / allowed)

    def is_told(self) -> bool:
        """Whether what the answers should be are numbers: a constructor that makes NaN tells nothing."""
        return not any(bool(expected.isnan().any()) for _, expected in self.pairs)

    def are_measured(self) -> bool:
        """Whether each channel should be a number at some position."""
        return not any(bool(expected.isnan().all(0).any()) for _, expected in self.pairs)

    def tables(self) -> dict[str, Tensor]:
        """What `AuditReport.tables` holds of it."""
        (cos, like), (sin, _) = self.pairs[0], self.pairs[-1]
        half = like.shape[-1] // 2
        if torch.equal(like[:, :half], like[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        elif torch.equal(like[:, ::2], like[:, 1::2]):
            cos, sin = cos[:, ::2], sin[:, ::2]
        return {"positions": self.positions, "cos": cos.contiguous(), "sin": sin.contiguous()}


def _between(actual: Tensor, expected: Tensor) -> Tensor:
    """How far single values are apart: infinitely where one is no number, and not where both are none."""
    off = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    return off.masked_fill((actual == expected) | (actual.isnan() & expected.isnan()), 0.0)


def _forms(convention: Convention, positions: Tensor) -> Iterator[Tensor | int]:
    """The ways to ask for positions: a length; or ids of one axis, or of three."""
    if convention == "length":
        yield int(positions.max()) + 1
        return
    ids = positions[None]
    yield ids
    yield ids.expand(3, *ids.shape)


def _asked(
    module: nn.Module, form: Tensor | int, layer_type: str | None, x: Tensor | None
) -> tuple[Any, set[str]]:
    """What a copy of a module answers, and names of the tables that its forward replaces or writes to."""
    duplicate = isolated(module)
    before = {name: (table, _version(table)) for name, table in entries(duplicate)}
    answer = ask(duplicate, form, layer_type, x=x)
    after = dict(entries(duplicate))
    changed = {name for name, (table, _) in before.items() if after.get(name) is not table}
    return answer, changed | {name for name, (table, version) in before.items() if _version(table) != version}


def _version(table: Any) -> int | None:
    return table._version if isinstance(table, Tensor) and not table.is_inference() else None


def served(built: nn.Module, rows: int, layer_type: str | None) -> nn.Module:
    """Return a copy of the constructor's own module that was asked for so many rows.

    Raises:
        UnansweredError: forward raises.

    """
    other, by_length = copied(built), calling_convention(stock_class(built)) == "length"
    ids = originals.tensor([[0, rows - 1]], dtype=torch.int64, device="cpu")
    ask(other, rows if by_length else ids, layer_type)
    return other


def grown(built: nn.Module, name: str, rows: int, layer_type: str | None) -> Tensor | None:
    """What the table ``name`` of the constructor's own module is once that was asked for so many rows."""
    try:
        made = get_table(served(built, rows, layer_type), name)
    except UnansweredError:
        return None
    return made if isinstance(made, Tensor) else None


def may_be_made_anew(module: nn.Module) -> set[str]:
    """Names of the tables that forward puts others in the place of, or may: what they hold says nothing."""
    stock = stock_class(module)
    convention = calling_convention(stock)
    if convention is not None and device_of(module) is not None:
        for form in _forms(convention, originals.tensor([*range(8)], dtype=torch.int64, device="cpu")):
            with contextlib.suppress(UnansweredError, RuntimeError):
                return _asked(module, form, None, None)[1]
    return {name for name, _ in entries(module)} if changes.stores_when_called(stock) else set()
