"""Measure one rotary embedding of a module: its frequencies, its ready tables, what forward returns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from safe_rope._audit.around import stands_around
from safe_rope._audit.causes import BUILT_FROM, Explanation, explain_cos_sin, explain_table
from safe_rope._audit.forward import call, device_of
from safe_rope._audit.reference import (
    TOLERANCE,
    CosSinTable,
    Errors,
    PhaseReference,
    compare,
    halves,
    relative_error,
)
from safe_rope._audit.report import BAD_RADIANS, Severity
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.forwards import may_differ
from safe_rope._base.tensors import is_shared
from safe_rope._base.text import class_name
from safe_rope._protection.rewrite import is_protected
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import UNTOLD
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import own_class, stock_class
from safe_rope._recognition.specs import layer_types, position_buffers
from safe_rope.rotation import plain

if TYPE_CHECKING:
    from safe_rope._audit.module import ModuleAuditor


_ANOTHER_CONFIG = (
    "what another config asks for: the config was changed after the module was built, or the module was "
    "given other frequencies"
)
_SET_BACK = Explanation(
    "the frequencies of the trained length, while the module notes a longer sequence (functional_call puts "
    "buffers back): calls of lengths in between use them until a shorter or a longer one comes",
    None,
)
KEPT_OF_CONFIG = ("rope_type", "original_max_seq_len", "attention_scaling")
"""What rotary modules of transformers keep of their config."""


def usual_positions(length: int) -> list[int]:
    """Where forward is measured unless somebody asks for other positions."""
    usual = {0, 1, 255, 256, 257, 2047, 2048, 2049, length - 1, 2 * length}
    return sorted(p for p in usual if 0 <= p <= 2 * length)


def _first_bad(slope: float, at: int) -> int | None:
    """The first position up to ``at`` whose phase is off by more than 0.1 rad."""
    if not math.isfinite(slope):
        return 1
    first = math.floor(BAD_RADIANS / slope) + 1
    return first if first <= at else None


class EmbeddingAuditor:
    """Measures what one layer type uses, or every layer, and has its module's auditor write it down."""

    def __init__(self, owner: ModuleAuditor, reference: PhaseReference, asked: list[int] | None) -> None:
        self._owner = owner
        self._module = owner.module
        self._reference = reference
        self._positions = asked or usual_positions(reference.farthest)
        # Why frequencies and ready tables are damaged; the largest error of a frequency, rad per position.
        self._inv_freq: Explanation | None = None
        self._cache: Explanation | None = None
        self._slope = 0.0
        self._is_of_another_config = self._was_built_for_another()
        self._is_read = False  # by some calls, although none was measured
        self.names: set[str] = set()
        """The tables that the config's formula tells all about."""

    def run(self) -> None:
        """Measure everything."""
        self._audit_inv_freq()
        self._audit_cache()
        self._audit_forward()

    def _add(self, what: str, severity: Severity, source: str, *details: Any, **measured: Any) -> None:
        layer_type = self._reference.layer_type
        self._owner.add(what, severity, source, *details, layer_type=layer_type, **measured)

    def _names(self, *endings: str) -> list[str]:
        own = self._reference.prefix
        others = tuple(f"{t}_" for t in layer_types(self._module) if t is not None and f"{t}_" != own)
        names = [
            name
            for name in position_buffers(self._module)
            if name.endswith(endings)
            and isinstance(getattr(self._module, name), Tensor)
            and name.startswith(own)
            and not name.startswith(others)
        ]
        self.names.update(names)
        return names

    def _has_values(self, name: str) -> bool:
        tensor = getattr(self._module, name)
        if tensor.is_meta:
            spare = name.endswith("original_inv_freq") and not self._reference.spec.depends_on_length
            said = "it is on the meta device and holds no values yet"
            self._add(name, "note" if spare else "unknown", said, dtype=tensor.dtype)
        return not tensor.is_meta

    def _severity(self, certain: bool, explained: Explanation) -> Severity:
        if not explained.shown and self._is_of_another_config:
            return "unknown"
        # A class that nobody can build again may have a formula of its own that its config does not tell.
        patch, stock = self._owner.patch, own_class(stock_class(self._module))
        known = patch is not None and stock.__name__ in patch.rotary_classes
        known = known or is_protected(self._module)
        known = known or self._owner.reference.module is not None
        return "damaged" if certain or known else "unknown"

    def _audit_inv_freq(self) -> None:
        for name in filter(self._has_values, self._names("inv_freq")):
            actual = plain(getattr(self._module, name)).detach()
            expected = self._reference.expected(name)
            if expected is None or actual.shape != expected.shape:
                self._add(name, "unknown", "the config does not say what it holds", dtype=actual.dtype)
                continue
            relative = relative_error(actual, expected)
            if relative <= TOLERANCE:
                continue
            explained = explain_table(actual.cpu(), expected, self._owner.reference.replays(name))
            if self._is_set_back(actual):
                self._is_read = True
                explained = _SET_BACK
            if not explained.shown and not is_protected(self._module):
                explained = self._judged(name, actual, explained)
            off = (
                actual.to("cpu", torch.float64) - expected.to(torch.float64)
            ).abs() / self._reference.divisor
            slope = float(off.nan_to_num(nan=torch.inf).max())
            last = max(self._positions)
            at = min(last, self._reference.farthest - 1)
            self._add(
                name,
                self._severity(explained.certain, explained),
                explained.said,
                explained.where,
                actual.dtype,
                relative_error=relative,
                phase_error_rad=slope * at if at else 0.0,
                first_bad_position=_first_bad(slope, last),
                first_damaged_position=next((p for p in self._positions if p > 0), None),
            )
            if name == f"{self._reference.prefix}inv_freq":
                self._inv_freq, self._slope = explained, slope

    def _is_set_back(self, actual: Tensor) -> bool:
        """Whether these are the trained length's frequencies, and the module notes a longer sequence.

        `torch.func.functional_call` puts buffers back after a call, and leaves other attributes as they are.
        """
        reference = self._reference
        is_dynamic = reference.spec.rope_type == "dynamic" and reference.convention == "positions"
        if not is_dynamic or is_protected(self._module):
            return False
        is_noted = bool(reference.cached_length() > reference.max_position)
        return is_noted and relative_error(actual, reference.base) <= TOLERANCE

    def _judged(self, name: str, actual: Tensor, explained: Explanation) -> Explanation:
        """What is to be said of frequencies whose difference from the config's shows no damage."""
        said = damaged_in_itself(name, actual.cpu())
        if said is not None:
            return Explanation(said, explained.where)
        again = self._owner.reference.again
        is_told = self._owner.patch is not None or again is None or again.complete
        if not is_told and low_dtype_of(actual) is None:
            self._is_of_another_config = True
            return Explanation(UNTOLD, None, certain=False, shown=False)
        if not (self._is_of_another_config or self._reference.is_of_another_config(actual)):
            return explained
        self._is_of_another_config = True
        return Explanation(_ANOTHER_CONFIG, None, certain=False, shown=False)

    def _was_built_for_another(self) -> bool:
        """Whether what the module has kept of its config is not what its config says now."""
        built, kept = self._owner.reference.module, vars(self._module)
        if built is None or is_protected(self._module):
            return False
        names = KEPT_OF_CONFIG if self._reference.spec.scales_attention else KEPT_OF_CONFIG[:-1]
        return any(kept.get(name) != vars(built).get(name) for name in names)

    def _audit_cache(self) -> None:
        names = sorted(self._names("cos_cached", "sin_cached"))
        if len(names) != 2 or not all([self._has_values(name) for name in names]):
            return
        tables = (plain(getattr(self._module, name)).detach() for name in names)
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
        what, pairs = ", ".join(names), len(self._reference.base)
        if cos.shape != sin.shape or cos.shape[-1] not in (pairs, 2 * pairs):
            said = f"the tables have the shape {list(cos.shape)}, which the config does not ask for"
            self._add(what, "unknown", said)
            return
        if not len(cos):
            return
        by_length = self._reference.convention == "length"
        length = int(self._reference.cached_length()) if by_length else len(cos)
        table = CosSinTable(cos, sin, torch.arange(len(cos), dtype=torch.int64), length)
        errors, _ = compare(self._reference, table)
        if errors.damaged and not all(map(self._is_as_built, names)):
            cause = self._cache = explain_cos_sin(what, self._reference, [table], self._inv_freq)
            severity = self._severity(cause.certain, cause)
            self._add(what, severity, cause.said, cause.where, cos.dtype, **errors.measured())

    def _is_as_built(self, name: str) -> bool:
        """Whether a table holds the very numbers that the constructor gives, whatever the config tells."""
        built, actual = self._owner.reference.module, getattr(self._module, name)
        made = None if built is None else get_table(built, name)
        if made is None or made.is_meta or is_shared(actual, made):
            return False
        return torch.equal(plain(actual).detach().cpu(), made)

    def _audit_forward(self) -> None:
        if device_of(self._module) is None and not is_protected(self._module):
            return  # on the meta device, which was said
        try:
            tables = call(self._module, self._reference, self._positions, torch.float32)
        except UnansweredError as error:
            self._add("forward", "unknown", f"what forward returns cannot be measured: {error}")
            return
        measured = [compare(self._reference, table) for table in tables]
        errors = Errors.joined([errors for errors, _ in measured])
        # What grows with the distance has no effect beyond the window; rounded positions have.
        within = math.inf if self._inv_freq is None else 2 * self._reference.farthest
        self._owner.result.rows += errors.rows(self._reference.layer_type, within)
        self._keep(tables, measured[-1][1])  # at position 0, every layout fits
        if errors.damaged:
            self._add_forward(errors, tables)
        else:
            self._excuse()
        self._audit_wrappers()
        self._note_rounding(tables)

    def _audit_wrappers(self) -> None:
        """Tell of a wrapper that rounds; what else it makes of positions may be what it is there for."""
        if any(finding.severity == "damaged" for finding in self._owner.findings):
            return
        for wrapper in self._owner.wrappers:
            try:
                tables = call(wrapper, self._reference, self._positions, torch.float32)
            except UnansweredError:
                continue
            errors = Errors.joined([compare(self._reference, table)[0] for table in tables])
            cause = explain_cos_sin("forward", self._reference, tables) if errors.damaged else None
            if cause is not None and cause.certain:
                said = f"in a {class_name(type(wrapper))} around it, {cause.said}"
                self._add("forward", "damaged", said, cause.where, tables[0].cos.dtype, **errors.measured())
                return

    def _keep(self, tables: list[CosSinTable], layout: str) -> None:
        """Put one value of each pair into the report."""
        pairs = len(self._reference.base)
        cos = [halves(table.cos, pairs, layout)[0].to("cpu", torch.float32) for table in tables]
        sin = [halves(table.sin, pairs, layout)[0].to("cpu", torch.float32) for table in tables]
        self._owner.report.tables[self._owner.table_name(self._reference.layer_type)] = {
            "positions": torch.cat([table.positions for table in tables]),
            "cos": torch.cat(cos),
            "sin": torch.cat(sin),
        }

    def _excuse(self) -> None:
        """Call a damaged tensor a note where forward, which was measured, gives what is right without it.

        Not where the tensor is kept for others to read; nobody reads numbers of one on the meta device.
        """
        if self._is_read:
            return
        findings, is_kept = self._owner.findings, self._owner.result.protected
        severity: Severity = "note" if any(self._positions) else "unknown"
        for index, finding in enumerate(findings):
            held = get_table(self._module, finding.what) if finding.what in self.names else None
            is_empty = isinstance(held, Tensor) and held.is_meta
            if is_empty if is_kept else self._is_its_own(finding.what):
                it = "them" if "," in finding.what else "it"
                said = f"forward does not use {it}"
                if not any(self._positions):
                    said = f"position 0 does not tell whether forward uses {it}"
                findings[index] = replace(finding, severity=severity, source=f"{finding.source}; {said}")

    def _is_its_own(self, what: str) -> bool:
        """Whether nobody but the module itself reads it: frequencies, and caches by private names."""
        own, names = f"{self._reference.prefix}inv_freq", what.split(", ")
        return what == own or (self.names.issuperset(names) and all(name.startswith("_") for name in names))

    def _add_forward(self, errors: Errors, tables: list[CosSinTable]) -> None:
        reference, inv_freq, cache = self._reference, self._inv_freq, self._cache
        what = "forward" if reference.layer_type is None else f"forward({reference.layer_type})"
        by_length = reference.convention == "length"
        rebuilt = by_length and len(tables) > 1 and bool(errors.excess[-1] > 1)
        cause = inv_freq or cache
        if by_length and cache is not None:
            cause = cache
            if inv_freq is not None and rebuilt:
                said = f"{cache.said}; for longer sequences they are built anew, and {inv_freq.said}"
                cause = cache._replace(said=said)
        elif rebuilt and inv_freq is not None:
            said = f"tables beyond the cached length are built anew, and {inv_freq.said}"
            cause = Explanation(said, "cache rebuild")
        certain = any(finding.severity == "damaged" for finding in self._owner.findings)
        otherwise = False
        if cause is None:
            cause = explain_cos_sin(what, reference, tables)
            certain = cause.certain
            # Frequencies that are right, or that somebody has put a parametrization on.
            follows = cause.said.endswith(BUILT_FROM)
            otherwise = follows or (not certain and self._is_set_otherwise())
        measured = errors.measured()
        if cause is inv_freq and not by_length:
            # Computed from a damaged inv_freq, the error is known beyond a full turn, and between positions.
            matter = errors.positions <= max(2 * reference.farthest, int(errors.positions.min()))
            last = int(errors.positions[(errors.excess > 1) & matter].max())
            measured["phase_error_rad"] = self._slope * last
            bad = None if reference.spec.depends_on_length else _first_bad(self._slope, last)
            if bad is not None:
                measured["first_bad_position"] = bad
        severity = "unknown" if otherwise else self._severity(certain, cause)
        self._add(what, severity, cause.said, cause.where, tables[0].cos.dtype, **measured)

    def _is_set_otherwise(self) -> bool:
        """Whether somebody may have set what forward reads, so that it is to return something else."""
        built = self._owner.reference.module
        if stands_around(self._module, built):
            return True
        return built is not None and may_differ(self._module, built, own_class(stock_class(self._module)))

    def _note_rounding(self, tables: list[CosSinTable]) -> None:
        """Say so where the module rounds right tables to the model's 16-bit dtype when it hands them out."""
        dtype = self._owner.dtypes[0]
        if dtype not in LOW:
            return
        try:
            lowered = call(self._module, self._reference, self._positions, dtype)
        except UnansweredError as error:
            self._add("forward", "unknown", f"called in the model's dtype, {error}", dtype=dtype)
            return
        given = lowered[0].cos.dtype
        if given not in LOW:
            return
        # Tables beyond a cached length are built anew for each dtype: only the first call is rounding alone.
        calls = 1 if self._reference.convention == "length" else len(tables)
        off = max(
            float((low.double() - full.double()).abs().max())
            for pair in list(zip(lowered, tables, strict=True))[:calls]
            for low, full in zip(pair[0][:2], pair[1][:2], strict=True)
        )
        if off > 0:  # else the tables hold rounded values already
            name = dtype_name(given)
            said = f"rounded: cos and sin are handed out in {name} and q and k are rotated in it"
            self._add("forward", "note", said, "application", given, cos_error=off)
