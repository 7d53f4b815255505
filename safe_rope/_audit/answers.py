"""Compare what a module's forward answers with what the same forward does in its constructor's own module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import device_of, isolated
from safe_rope._audit.reference import TOLERANCE, Errors
from safe_rope._base import originals
from safe_rope._base.tensors import tensors_in
from safe_rope._recognition.ask import UnansweredError, ask, copied
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.specs import Convention
from safe_rope.rotation import plain


class Answers:
    """What forward returned for some positions, beside what it should return.

    Attributes:
        positions: int64 CPU ``[n]``.
        pairs: each tensor of the answer, FP32 on CPU ``[n, channels]``, with what it should be.
        rewritten: names of the tables that forward makes anew, whatever they held.
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
        for form in self._forms(convention):
            try:
                expected = self._rows(ask(copied(built), form, layer_type), form)
            except UnansweredError as error:
                problem = error
                continue
            device = device_of(module) or torch.device("cpu")
            x = originals.empty((1, 1, 1, 8), dtype=torch.float32, device=device).zero_()
            asked = form if isinstance(form, int) else form.to(device)
            x = x if isinstance(form, int) else x.new_zeros((*form.shape[-2:], 8))
            duplicate = isolated(module)
            before = dict(entries(duplicate))
            actual = self._rows(ask(duplicate, asked, layer_type, x=x), form)
            if [a.shape for a in actual] != [e.shape for e in expected]:
                raise UnansweredError("forward returns other shapes than its constructor's own module does")
            self.pairs = list(zip(actual, expected, strict=True))
            after = dict(entries(duplicate))
            self.rewritten = {name for name, table in before.items() if after.get(name) is not table}
            return
        raise problem

    def _forms(self, convention: Convention) -> Iterator[Tensor | int]:
        if convention == "length":
            yield int(self.positions.max()) + 1
            return
        ids = self.positions[None]
        yield ids
        yield ids.expand(3, *ids.shape)

    def _rows(self, answer: Any, form: Tensor | int) -> list[Tensor]:
        rows = []
        for table in map(plain, tensors_in(answer)):
            count = form if isinstance(form, int) else len(self.positions)
            real = torch.view_as_real(table).flatten(-2) if table.is_complex() else table
            if count not in real.shape[:-1]:
                raise UnansweredError(f"forward returned {list(table.shape)} for {count} positions")
            flat = real.detach().float().cpu().movedim(real.shape.index(count), 0).flatten(1)
            rows.append(flat[self.positions] if isinstance(form, int) else flat)
        if not rows:
            raise UnansweredError(f"forward returned {type(answer).__name__}, no tensors")
        return rows

    def errors(self) -> Errors:
        """How far the answers are off, by position; of a phase what the values tell."""
        off = torch.stack([(a.double() - e.double()).abs().amax(-1) for a, e in self.pairs]).amax(0)
        off = off.nan_to_num(nan=torch.inf)
        scale = max(float(expected.abs().max()) for _, expected in self.pairs) or 1.0
        allowed = TOLERANCE * scale * self.positions.double().clamp(min=1.0)
        return Errors(self.positions, (off / scale).clamp(max=torch.pi), off, off / allowed)

    def tables(self) -> dict[str, Tensor]:
        """What `AuditReport.tables` holds of it."""
        (cos, like), (sin, _) = self.pairs[0], self.pairs[-1]
        half = like.shape[-1] // 2
        if torch.equal(like[:, :half], like[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        elif torch.equal(like[:, ::2], like[:, 1::2]):
            cos, sin = cos[:, ::2], sin[:, ::2]
        return {"positions": self.positions, "cos": cos.contiguous(), "sin": sin.contiguous()}
