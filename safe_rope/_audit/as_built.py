"""Measure what a forward answers beside what the same forward answers on its constructor's tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from safe_rope._audit.another_config import NOT_AS_BUILT
from safe_rope._audit.answers import Answers, grown, served
from safe_rope._audit.around import stands_around
from safe_rope._audit.embedding import usual_positions
from safe_rope._audit.forward import device_of
from safe_rope._audit.held import KEPT
from safe_rope._audit.reference import Errors
from safe_rope._audit.report import Severity
from safe_rope._audit.tables import Held
from safe_rope._audit.unread import is_read_beside_forward, is_unread
from safe_rope._protection.rewrite import is_pinned, is_protected, state_of
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.holdings import entries, get_table
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import Convention
from safe_rope.rotation import plain

if TYPE_CHECKING:
    from safe_rope._audit.module import ModuleAuditor

_LONGEST = 2**20
_NO_NUMBERS = "it returns what is no number, on the tables that its constructor makes too"
_OF_OTHERS = "; it was built from other arguments than its attributes tell, or its tables were replaced"


class AsBuiltAuditor:
    """Measures one layer type, or every layer, and has its module's auditor write it down.

    Attributes:
        names: of the tables that forward makes anew, and correctly.
        rewritten: what a forward that answers right writes to, but for buffers.
        unanswered: why forward could not be asked, or None.
    """

    def __init__(
        self, owner: ModuleAuditor, layer_type: str | None, asked: list[int] | None, convention: Convention
    ) -> None:
        self._owner = owner
        self._module = owner.module
        self._layer_type = layer_type
        self._asked = asked
        self._convention = convention
        self.names: set[str] = set()
        self.rewritten: set[str] = set()
        self.unanswered: UnansweredError | None = None

    def run(self, tables: dict[str, Held]) -> None:
        """Ask for the usual positions, or those asked for, and compare.

        A table that forward makes anew for more positions only is measured as it was made for its rows.
        """
        built = self._owner.reference.module
        if built is None or device_of(self._module) is None:
            return
        try:
            answers, errors = self._answers(built)
        except UnansweredError as error:
            self.unanswered = error
            return
        if errors.damaged:
            alike = next((one for one in self._answers_once_served(built) if not one[2].damaged), None)
            if alike is not None:
                built, answers, errors = alike
                told = (one for one in tables.values() if one.expected is not None)
                self.names = {one.name for one in told if _is_as(one, get_table(built, one.name))}
        self._write_down(built, answers, errors)
        if errors.damaged or is_protected(self._module):
            self.names = set()
        else:
            self.rewritten = answers.rewritten - self._module._buffers.keys()
            self._find_made_anew(built, answers, tables)

    def _write_down(self, built: nn.Module, answers: Answers, errors: Errors) -> None:
        owner = self._owner
        owner.result.rows += errors.rows(self._layer_type)
        owner.report.tables[owner.table_name(self._layer_type)] = answers.tables()
        if not (errors.damaged or answers.are_measured()):
            owner.add("forward", "unknown", _NO_NUMBERS)
        if errors.damaged and not any(finding.severity == "damaged" for finding in owner.findings):
            rebuilt = owner.reference.rebuilt
            is_filled = rebuilt is None or not rebuilt.empty(owner.reference.path)
            is_told = is_filled and answers.is_told() and not stands_around(self._module, built)
            is_of_others = _was_built_from_others(self._module, built)
            severity: Severity = "damaged" if is_told and not is_of_others else "unknown"
            said = f"{NOT_AS_BUILT}{_OF_OTHERS if is_of_others else ''}"
            owner.add("forward", severity, said, "forward", **errors.measured())

    def _find_made_anew(self, built: nn.Module, answers: Answers, tables: dict[str, Held]) -> None:
        """Enter the tables that a forward, which answers right, makes anew without their numbers."""
        kind, longest = self._layer_type, int(answers.positions.max()) + 1
        asked_of, end = (built, KEPT) if is_pinned(self._module) else (self._module, "")
        unread = {name for name in answers.rewritten if is_unread(asked_of, name, kind, longest)}
        self.names |= {f"{name}{end}" for name in unread}
        others = (stock_class(self._module), self._owner.classes)
        self.names |= {name for name in unread if end and not is_read_beside_forward(name, *others)}
        for name in answers.rewritten:
            held = tables.get(f"{name}{end}")
            if held is None or held.name in self.names:
                continue
            for rows in _noted_lengths(self._module, built):
                if _is_as(held, grown(built, name, rows, kind)):
                    self.names.add(held.name)
            if held.actual is not None and held.expected is not None and held.actual.dim() > 1:
                true = grown(built, name, held.actual.shape[-2], kind)
                if true is not None and held.actual.shape[-2] > held.expected.shape[-2]:
                    tables[held.name] = held._replace(expected=true)

    def _answers(self, built: nn.Module) -> tuple[Answers, Errors]:
        """Ask for positions, and measure: by default the usual ones, or those that the tables have rows for.

        Raises:
            UnansweredError: forward raises, or returns something other than values for each position.

        """
        positions = self._asked or usual_positions(self._owner.result.max_position_embeddings or 2048)
        try:
            answers = Answers(self._module, built, self._convention, self._layer_type, positions)
        except UnansweredError:
            tables = [t for _, t in entries(built) if isinstance(t, Tensor) and t.dim() > 1]
            rows = min((len(table) for table in tables), default=0)
            within = sorted({p for p in positions if p < rows} | {rows - 1})
            if self._asked or rows < 2:
                raise
            answers = Answers(self._module, built, self._convention, self._layer_type, within)
        if is_pinned(self._module):
            answers.allow_rounding()  # its tables are exact, and it returns what the stock model is to get
        return answers, answers.errors()

    def _answers_once_served(self, built: nn.Module) -> Iterator[tuple[nn.Module, Answers, Errors]]:
        """Yield the constructor's own module after each length that this one notes, and `_answers` to it."""
        for rows in _noted_lengths(self._module, built):
            try:
                other = served(built, rows, self._layer_type)
                answers, errors = self._answers(other)
            except UnansweredError:
                continue
            yield other, answers, errors


def _noted_lengths(module: nn.Module, built: nn.Module) -> Iterator[int]:
    """Yield the whole numbers that a module notes and its constructor does not, as lengths it has served."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            value = value.item()
        if type(value) is int and 1 < value < _LONGEST and vars(built).get(name) != value:
            yield value


def _was_built_from_others(module: nn.Module, built: nn.Module) -> bool:
    """Whether a pinned module keeps other tables than the constructor makes of what its attributes say."""
    pins = state_of(module).pins if is_pinned(module) else {}
    made = {name: get_table(built, name) for name in pins}
    return any(
        isinstance(one, Tensor) and not torch.equal(plain(one).detach().cpu(), pins[name].values.cpu())
        for name, one in made.items()
    )


def _is_as(held: Held, made: object) -> bool:
    """Whether a table holds the very numbers that another module has made."""
    actual = held.actual
    there = isinstance(made, Tensor) and actual is not None and not (made.is_meta or actual.is_meta)
    return there and torch.equal(plain(actual).detach().cpu(), plain(made).detach().cpu())
