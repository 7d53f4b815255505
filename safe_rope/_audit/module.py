"""Measure one module: its position tables, what its forward answers, what is applied; and the verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.another_config import (
    CHANGED,
    doubted,
    keeps_another,
    may_be_frequencies,
)
from safe_rope._audit.answers import may_be_made_anew
from safe_rope._audit.around import is_of_constructors
from safe_rope._audit.as_built import AsBuiltAuditor
from safe_rope._audit.asked import told_by_forward
from safe_rope._audit.beyond import NOT_CONTINUED, goes_on
from safe_rope._audit.causes import BUILT_FROM, explain_cos_sin, explain_table, is_written_to
from safe_rope._audit.embedding import EmbeddingAuditor
from safe_rope._audit.forward import call, isolated
from safe_rope._audit.held import KEPT, fill_as_loaded, held_tables
from safe_rope._audit.kept import shown_by_calls
from safe_rope._audit.layers import add_layers
from safe_rope._audit.left import judged
from safe_rope._audit.reference import TOLERANCE, PhaseReference, compare, relative_error
from safe_rope._audit.remade import is_of_others, remade
from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, Severity, Where, worst
from safe_rope._audit.rotated import turned_by
from safe_rope._audit.tables import (
    Difference,
    Held,
    aligned,
    damaged_in_itself,
    difference,
    is_replayed,
    is_rounded,
)
from safe_rope._audit.unread import is_read_beside_forward, is_unread
from safe_rope._audit.untold import untold_tables
from safe_rope._audit.unused import (
    BESIDE_ALIBI,
    IN_WHICH,
    MADE_FIRST,
    MAY_BE_REAL,
    MAY_MAKE_ANEW,
    ROUNDED_LAST,
    is_beside_alibi,
    is_compared_with_fp32,
    is_left_real,
    is_replaced_unread,
    only_tells_its_dtype,
)
from safe_rope._base import changes
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.text import class_name
from safe_rope._protection.frozen import frozen_positions
from safe_rope._protection.rewrite import is_kept, is_pinned, is_protected, state_of
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import UNMADE, UNTOLD, is_cast
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import Reference, own_class, stock_class
from safe_rope._recognition.specs import Convention, calling_convention, layer_types
from safe_rope._recognition.tables import (
    LAZY,
    UNREAD,
    is_frequency,
    is_state,
    uninitialized,
    unreadable,
)
from safe_rope.errors import ConfigError, SafeRopeError
from safe_rope.registry import RopePatch
from safe_rope.rotation import _installed, plain

_GIVES_NAN = "its constructor gives NaN there by now, which tells nothing"


class ModuleAuditor:
    """Measures one module and writes what it finds into the report.

    Attributes:
        report: where everything is written.
        module: what is measured: the module, or a copy of it.
        reference: what its constructor makes.
        patch: what covers it, or None.
        classes: those of the model's modules.
        dtypes: those that its activations may have, the smallest first.
        is_compiled: whether it, or what holds it, is compiled.
        result: the module's entry in the report, which has it if there is something to measure.
        findings: what was found about this module so far.
        wrappers: modules without weights that stand around it and take positions as it does.
    """

    def __init__(
        self,
        report: AuditReport,
        path: str,
        module: nn.Module,
        reference: Reference,
        patch: RopePatch | None,
        pending_cast: torch.dtype | None = None,
        classes: Collection[type] = (),
    ) -> None:
        kept = is_kept(module)
        # A protected module puts its buffers back; of another, a copy is cast as FSDP is going to cast it.
        self._pending_cast = None if kept else pending_cast
        self.report = report
        self.module = module if self._pending_cast is None else _as_cast(module, self._pending_cast)
        if is_protected(module) and not state_of(module).is_settled(module):
            self.module = _as_settled(module)
        self.reference = reference
        self.patch = patch
        self.classes = classes
        self.dtypes: tuple[torch.dtype, ...] = (torch.float32,)
        self.is_compiled = False
        self.findings: list[Finding] = []
        self.wrappers: list[nn.Module] = []
        self._may_be_of_another = self._is_of_another = keeps_another(self.module, reference.module)
        self._unanswered: UnansweredError | None = None
        self._rewritten: set[str] = set()  # by a forward that answers right, and no buffers
        self.result = ModuleAudit(
            path=path,
            module_class=class_name(own_class(stock_class(module))),
            family=_family(module, patch),
            protected=kept,
            guard=_what_the_guard_does(module, patch),
        )

    def run(self, asked: list[int] | None) -> None:
        """Measure everything; add the module, its rows and its findings to the report."""
        tables = held_tables(self.module, self.reference, self.patch)
        convention = calling_convention(stock_class(self.module))
        if next(self.module.parameters(), None) is not None:
            convention = None  # more than a rotary module: it cannot be asked alone
        named = [found for found in frozen_positions((self.module,)) if found.name not in tables]
        unread, lazy = unreadable(self.module), uninitialized(self.module)
        left = untold_tables(self.module, self.reference)
        untold = {name: said for name, said in left if name not in tables}
        told = told_by_forward(self)
        noted = dict(shown_by_calls(self.module, self.dtypes[0], self.is_compiled))
        built = self.reference.module
        if convention is not None and built is not None and built is not self.module:
            noted.update(fill_as_loaded(self.module, built, tables))
        left_out = unread or lazy or untold or noted
        if not (tables or named or left_out) and told is None and convention is None:
            return
        self._check_application()
        if convention is not None:
            for layer_type in layer_types(self.module):
                for name in self._audit_embedding(layer_type, asked, convention, tables):
                    tables.pop(name, None)
            add_layers(self.report.tables, getattr(self.module, "config", None), f"{self.result.path}:")
        elif tables and (turned := turned_by(self.module, (t.actual for t in tables.values()), asked)):
            self.report.tables[self.table_name(None)] = turned
        if self._unanswered is not None and told is None:
            self.add("forward", "note", f"what it returns is not measured: {self._unanswered}")
        for held in tables.values():
            self._audit_table(held)
        if convention is not None:
            self._excuse_unread()
        for found in named:
            severity, why, dtype = judged(found, built)
            self.add(found.name, severity, why, dtype=dtype)
        for name in unread:
            self.add(name, "unknown", UNREAD)
        for name in lazy:
            self.add(name, "unknown", LAZY)
        for name, said in (*untold.items(), *noted.items()):
            self.add(name, "unknown", said)
        if self._is_of_another and not any(
            one.severity == "damaged" and one.what != "forward" for one in self.findings
        ):
            self.findings = [doubted(one) for one in self.findings]
        if told and not any(one.severity == "damaged" for one in self.findings):
            self.findings = [one for one in self.findings if one.what != "forward"] + told
        self._doubt_what_may_be_made_anew()
        if not self.result.rows and told is None:
            self._doubt_what_stands_around()
        if is_beside_alibi(self.module):
            self.findings = [replace(one, severity="note", source=BESIDE_ALIBI) for one in self.findings]
        self.result.verdict = worst(finding.severity for finding in self.findings)
        self.report.modules.append(self.result)
        self.report.findings += self.findings

    def add(
        self,
        what: str,
        severity: Severity,
        source: str,
        where: Where | None = None,
        dtype: torch.dtype | None = None,
        **measured: Any,
    ) -> None:
        """Add a finding; see `finding`."""
        self.findings.append(self.finding(what, severity, source, where, dtype, **measured))

    def finding(
        self,
        what: str,
        severity: Severity,
        source: str,
        where: Where | None = None,
        dtype: torch.dtype | None = None,
        **measured: Any,
    ) -> Finding:
        """Return a finding of the module; ``measured`` are the fields of `Finding` that hold numbers."""
        if self._pending_cast is not None and where == "module cast":
            source += f"; FSDP does that at the first forward (buffer_dtype={self._pending_cast})"
        return Finding(
            path=self.result.path,
            module_class=self.result.module_class,
            what=what,
            severity=severity,
            source=source,
            dtype=None if dtype is None else dtype_name(dtype),
            protected=self.result.protected,
            where=where,
            **measured,
        )

    # ------------------------------------------------------------------ what is measured

    def _audit_embedding(
        self, layer_type: str | None, asked: list[int] | None, convention: Convention, tables: dict[str, Held]
    ) -> set[str]:
        """Measure what forward answers; return the names of the tables that were measured with it."""
        formula = self._formula(layer_type, tables, convention)
        if formula is None:
            beside = AsBuiltAuditor(self, layer_type, asked, convention)
            beside.run(tables)
            self._unanswered = beside.unanswered or self._unanswered
            self._rewritten |= beside.rewritten
            return beside.names
        auditor = EmbeddingAuditor(self, formula, asked)
        auditor.run()
        # Forward puts frequencies for a length, which the constructor does not give and the formula does.
        kept = {name: tables.get(f"{name}{KEPT}") for name in auditor.names}
        told = {one.name for name, one in kept.items() if one is not None and formula.tells(name, one.actual)}
        return auditor.names | told

    def _formula(
        self, layer_type: str | None, tables: dict[str, Held], convention: Convention
    ) -> PhaseReference | None:
        """What the config asks for, where it tells that, and the constructor's own module is as it tells."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        held = tables.get(f"{prefix}original_inv_freq", tables.get(f"{prefix}inv_freq"))
        base, kept = None if held is None else held.expected, None
        if is_protected(self.module):
            kept = state_of(self.module).sets[layer_type]
            base = kept.original
        try:
            built = self.reference.module
            formula = PhaseReference(self.module, self.patch, layer_type, convention, base, kept)
            self.result.max_position_embeddings = formula.spec.max_position_embeddings
            if kept is not None and (built is None or _is_in_usual_order(self.module)):
                return formula
            if built is None:
                makes_anew = held is not None and self.patch is None and self._makes_anew(held.name, formula)
                return None if makes_anew else formula
            true = PhaseReference(built, self.patch, layer_type, convention, base)
            if not _is_as_told(built, true):
                return None
            answers = call(built, true, [0, 1, 7, true.max_position - 1], torch.float32)
            with contextlib.suppress(UnansweredError):  # it may have no rows beyond
                answers += call(built, true, [true.max_position], torch.float32)
            if not any(compare(true, answer)[0].damaged for answer in answers):
                return formula
            cause = explain_cos_sin("forward", true, answers)
            is_of_another_rule = cause.said.endswith(BUILT_FROM)  # for the length, of right frequencies
            return formula if cause.certain and not is_of_another_rule else None
        except (SafeRopeError, UnansweredError) as error:
            self._may_be_of_another |= isinstance(error, ConfigError)
            return None

    def _makes_anew(self, name: str, formula: PhaseReference) -> bool:
        """Whether forward puts another table in the place of this one, whatever it holds."""
        duplicate = isolated(self.module)
        before = get_table(duplicate, name)
        call(duplicate, formula, [0, 1], torch.float32, owned=True)
        return get_table(duplicate, name) is not before

    def _doubt_what_stands_around(self) -> None:
        """Say of a module that could not be asked that what is around its forward may round or repair."""
        has_weights = next(self.module.parameters(), None) is not None
        if has_weights or is_of_constructors(self.module, self.classes):
            return
        said = "hooks, or what stands in the place of its forward, may change what it answers"
        self.findings = [
            replace(one, severity="unknown", source=f"{one.source}; {said}")
            if one.severity == "damaged"
            else one
            for one in self.findings
        ]
        self.add("forward", "unknown", f"{said}: {self._unanswered or 'it cannot be asked'}")

    def _doubt_what_may_be_made_anew(self) -> None:
        """Say of 16-bit tables that code may use others for them, where forward could not be asked.

        Where it could, and answers right: of those that it rewrites and that no cast reaches.
        """
        low = {dtype_name(dtype) for dtype in LOW}
        for at, one in enumerate(self.findings):
            is_low = one.severity == "damaged" and one.dtype in low
            is_asked = bool(self.result.rows) and one.what not in self._rewritten
            if is_low and not is_asked and (said := self._why_unused(one)) is not None:
                self.findings[at] = replace(one, severity="unknown", source=f"{one.source}; {said}")

    def _why_unused(self, one: Finding) -> str | None:
        """Say what the code does with a table of 16 bits, if it may not use its numbers."""
        stock: Any = stock_class(self.module)
        if is_compared_with_fp32(one.what, stock):
            return MAY_MAKE_ANEW
        if is_replaced_unread(one.what, stock):
            return MADE_FIRST
        # A cast of the module reaches buffers alone, and frequencies or phases are not what comes last.
        is_put = one.what not in self.module._buffers and one.what in changes.changed_by_forward(stock)
        is_last = one.where == "module cast" and one.cos_error is not None
        return ROUNDED_LAST if is_put and is_last else None

    def _excuse_unread(self) -> None:
        """Call damaged tables a note where forward, which answers right, does so without their numbers."""
        stock, kinds = stock_class(self.module), layer_types(self.module)
        rows, findings = self.result.rows, self.findings
        is_right = bool(rows) and all(row.within_tolerance for row in rows)
        is_right &= all(one.severity == "note" for one in findings if one.what == "forward")
        if self.result.protected or not is_right:
            return
        longest = max(row.position for row in rows) + 1
        for at, one in enumerate(findings):
            is_off = one.severity == "damaged" or one.source == CHANGED
            if not is_off or is_read_beside_forward(one.what, stock, self.classes):
                continue
            if all(is_unread(self.module, one.what, kind, longest) for kind in kinds):
                said = f"{one.source}; forward does not use it"
                findings[at] = replace(one, severity="note", source=said)

    def table_name(self, layer_type: str | None) -> str:
        """What a dump calls one rotary embedding of the module."""
        return self.result.path if layer_type is None else f"{self.result.path}:{layer_type}"

    def _audit_table(self, held: Held) -> None:
        name, actual, expected = held.name, held.actual, held.expected
        if actual is None:
            self.add(name, "unknown", "it holds no tensor any more")
        elif actual.is_meta:
            self.add(name, "unknown", "it is on the meta device and holds no values yet", dtype=actual.dtype)
        elif expected is None:
            said = self._wrong_in_itself(name, plain(actual))
            self.add(
                name, "damaged" if said else "unknown", said or self._why_untold(name), dtype=actual.dtype
            )
        elif (pair := aligned(plain(actual), expected)) is None:
            shapes = f"{list(actual.shape)}, and its constructor makes {list(expected.shape)}"
            self.add(name, "unknown", f"it has the shape {shapes}", dtype=actual.dtype)
        elif bool((pair[1].isnan() & ~pair[0].isnan()).any()):
            self.add(name, "unknown", _GIVES_NAN, dtype=actual.dtype)
        else:
            slack = is_protected(self.module) or actual.device.type != "cpu"
            found = difference(*pair, finished=held.finished, slack=slack)
            if found.damaged and (wide := self._in_float64(held, slack)) is not None:
                pair, found = wide
            if found.damaged and is_of_others(self.module, self.reference, held, *pair):
                self._audit_remade(held, found, pair, slack)
            elif found.damaged:
                self._add_damage(held, found, *pair)
            elif not goes_on(plain(actual), expected):
                self.add(name, "unknown", NOT_CONTINUED, dtype=actual.dtype)

    def _audit_remade(self, held: Held, found: Difference, pair: tuple[Tensor, Tensor], slack: bool) -> None:
        true = remade(self.module, self.reference, held.name)
        made = None if true is None else aligned(pair[0], true)
        if made is not None:
            if (found := difference(*made, finished=held.finished, slack=slack)).damaged:
                self._add_damage(held, found, *made)
        elif explain_table(*pair, self.reference.replays(held.name)).certain or is_rounded(held.name, *pair):
            self._add_damage(held, found, *pair)
        else:
            self.add(held.name, "unknown", UNTOLD, dtype=pair[0].dtype)

    def _in_float64(self, held: Held, slack: bool) -> tuple[tuple[Tensor, Tensor], Difference] | None:
        """Return how a table differs from what its constructor makes with float64 as the default dtype.

        None where it is no cast of that, which is nearer to the truth than in FP32.
        """
        wide = self.reference.in_float64(held.name)
        if wide is None or held.actual is None or wide.dtype not in (torch.float64, torch.complex128):
            return None
        pair = aligned(plain(held.actual), wide)
        if pair is None or not (pair[0].is_complex() or pair[0].is_floating_point()):
            return None
        if held.frozen and held.finished and pair[0].dtype in LOW:
            pair = pair[0], pair[1].to(pair[0].dtype)  # once, as the model's dtype is
        found = difference(*pair, finished=held.finished, slack=slack)
        return (pair, found) if not found.damaged or is_cast(*pair) else None

    def _why_untold(self, name: str) -> str:
        built = self.reference.module
        made = None if built is None else get_table(built, name)
        if isinstance(made, Tensor) and not made.is_meta and bool(made.isnan().any()):
            return _GIVES_NAN
        return UNTOLD if built is None or made is not None else UNMADE

    def _add_damage(self, held: Held, found: Any, actual: Tensor, expected: Tensor) -> None:
        cause = explain_table(actual, expected, held.replays or self.reference.replays(held.name))
        certain = held.certain or cause.certain or is_written_to(actual, expected)
        if not certain and not held.frozen and (said := self._wrong_in_itself(held.name, actual)) is not None:
            cause, certain = cause._replace(said=said), True
        is_real = expected.is_complex() and not actual.is_complex() and actual.dtype not in LOW
        if is_real and is_left_real(held.name, stock_class(self.module)):
            cause, certain = cause._replace(said=f"{cause.said}; {MAY_BE_REAL}"), False
        if held.frozen:  # a checkpoint may have rounded or scaled it, and it may be meant so
            certain = not torch.equal(actual.isfinite(), expected.isfinite()) or is_written_to(
                actual, expected
            )
            certain = certain or (is_frequency(held.name) and actual.dtype in LOW)
            certain = certain or is_replayed(actual, held.name, self.reference)
        may_be_meant = self._may_be_of_another and not (cause.certain or held.frozen or held.finished)
        if may_be_meant and certain and may_be_frequencies(actual):
            said = self._wrong_in_itself(held.name, actual)
            if said is None:
                self._is_of_another, certain, cause = True, False, cause._replace(said=CHANGED)
        if self._may_be_set_since(held.name, actual, expected):
            if low_dtype_of(actual) is None:
                return
            certain = False
        severity: Severity = "damaged" if certain else "unknown"
        if only_tells_its_dtype(held.name, stock_class(self.module), self.classes):
            is_kind = actual.dtype == expected.dtype
            severity, end = ("note", "") if is_kind else ("unknown", IN_WHICH)
            cause = cause._replace(said=f"{cause.said}; nothing reads more than its dtype{end}")
        last = (self.result.max_position_embeddings or 2048) - 1
        self.add(
            held.name,
            severity,
            cause.said,
            cause.where,
            actual.dtype,
            # How far phases are off as a number of a formula is, such as the base, a formula alone tells.
            phase_error_rad=None if held.finished or expected.numel() == 1 else found.absolute * last,
            cos_error=found.absolute if held.finished else None,
            first_damaged_position=found.row if held.finished else None,
        )

    def _may_be_set_since(self, name: str, actual: Tensor, expected: Tensor) -> bool:
        """Whether a number is none that the constructor gives, and a method of the module may have set it."""
        if expected.numel() != 1 or not is_state(self.module, name) or not bool(actual.isfinite().all()):
            return False
        return not (is_cast(actual, expected) or is_replayed(actual, name, self.reference))

    def _wrong_in_itself(self, name: str, table: Tensor) -> str | None:
        said = damaged_in_itself(name, table)
        return None if said is None or name in may_be_made_anew(self.module) else said

    def _check_application(self) -> None:
        if not is_protected(self.module) or state_of(self.module).apply != "fp32":
            return
        applied = state_of(self.module).applied
        if applied is not None and not _installed.installed(applied.places):
            names = ", ".join(applied.names)
            said = (
                f"{names} was replaced after the model was protected, so q and k may be rotated in low "
                "precision; call safe_rope.protect(model) again after whatever replaces it"
            )
            self.add("application", "unknown", said, "application")


def _is_in_usual_order(module: nn.Module) -> bool:
    """Whether a protected module answers in an order of channels that a formula alone tells."""
    channels = state_of(module).channels
    return channels is None or channels.layout[0] is not None


def _is_as_told(built: nn.Module, formula: PhaseReference) -> bool:
    """Whether the frequencies that the constructor makes are those that its config tells."""
    name = f"{formula.prefix}inv_freq"
    made = getattr(built, name, None)
    if not isinstance(made, Tensor):
        return True
    expected = formula.expected(name)
    return expected is None or made.shape != expected.shape or relative_error(made, expected) <= TOLERANCE


def _as_settled(module: nn.Module) -> nn.Module:
    """A copy of a module whose tables a transformation has kept from being put back, with those in place."""
    duplicate = isolated(module)
    state_of(duplicate).restore(duplicate)
    return duplicate


def _as_cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        duplicate = isolated(module)
    except UnansweredError:  # it holds weights, which it shares: only its buffers are read
        duplicate = object.__new__(type(module))
        vars(duplicate).update(vars(module), _buffers=dict(module._buffers))
    for name, buffer in duplicate._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            duplicate._buffers[name] = buffer.to(dtype)
    return duplicate


def _family(module: nn.Module, patch: RopePatch | None) -> str | None:
    if patch is None and is_protected(module):
        return state_of(module).applied.family  # type: ignore[no-any-return]
    return patch.family if patch is not None else None


def _what_the_guard_does(module: nn.Module, patch: RopePatch | None) -> str:
    if is_protected(module):
        state = state_of(module)
        return f"protected: {state.tables} tables, {state.apply} application"
    if is_pinned(module):
        return "pinned: computes as it did, on the tables that its constructor makes in FP32"
    if patch is None:
        return "protects it where its tables are what its config asks for, else pins them"
    return f"protects it, by the patch {patch.family}"
