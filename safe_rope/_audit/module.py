"""Measure one rotary module: its tensors, what its forward returns, and what explains the difference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from safe_rope._audit.causes import Explanation, dtype_name, explain_cos_sin, explain_inv_freq
from safe_rope._audit.forward import (
    UnmeasurableError,
    call,
    isolated,
    measure_forward,
    with_tables_of_its_forward,
)
from safe_rope._audit.reference import (
    BAD_RADIANS,
    LOW,
    TOLERANCE,
    CosSinTable,
    Errors,
    Reference,
    compare,
    relative_error,
)
from safe_rope._audit.report import AuditReport, Finding, MeasuredRow, ModuleAudit, Severity, Where
from safe_rope._audit.wrappers import own_class
from safe_rope._protection.rewrite import is_pinned, is_protected, state_of
from safe_rope._recognition import specs as recognition
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import layer_types, position_buffers
from safe_rope.errors import SafeRopeError
from safe_rope.registry import RopePatch
from safe_rope.rotation import _installed, plain


def _usual_positions(length: int) -> list[int]:
    usual = {0, 1, 255, 256, 257, 2047, 2048, 2049, length - 1, 2 * length}
    return sorted(p for p in usual if 0 <= p <= 2 * length)


def _first_bad(slope: float, at: int) -> int | None:
    """The first position up to ``at`` whose phase is off by more than 0.1 rad."""
    if not math.isfinite(slope):
        return 1
    first = math.floor(BAD_RADIANS / slope) + 1
    return first if first <= at else None


class _Cause(NamedTuple):
    """Why a tensor is damaged, and its largest error in radians per position where it holds frequencies."""

    explained: Explanation
    slope: float


class ModuleAuditor:
    """Measures one module and writes what it finds into the report."""

    def __init__(
        self,
        report: AuditReport,
        path: str,
        module: nn.Module,
        patch: RopePatch | None,
        dtype: torch.dtype,
        pending_cast: torch.dtype | None = None,
    ) -> None:
        self.report = report
        # A protected module puts its buffers back; of another, a copy is cast as FSDP is going to cast it.
        self.pending_cast = None if _is_kept(module) else pending_cast
        self.module = module if self.pending_cast is None else _as_cast(module, self.pending_cast)
        self.patch = patch
        self.model_dtype = dtype
        self.result = ModuleAudit(
            path=path,
            module_class=class_name(own_class(stock_class(module))),
            family=_family(module, patch),
            protected=_is_kept(module),
            guard=_what_the_guard_does(module, patch),
        )

    def run(self, asked: list[int] | None) -> None:
        """Measure everything; add the module, its rows and its findings to the report."""
        first = len(self.report.findings)
        self.report.modules.append(self.result)
        self._check_application()
        for layer_type in layer_types(self.module):
            self._audit_embedding(layer_type, asked)
        found = {finding.severity for finding in self.report.findings[first:]}
        self.result.verdict = "damaged" if "damaged" in found else "unknown" if "unknown" in found else "ok"

    def _add(
        self,
        what: str,
        severity: Severity,
        source: str,
        *,
        where: Where | None = None,
        dtype: torch.dtype | None = None,
        phase: float | None = None,
        cos: float | None = None,
        bad: int | None = None,
        damaged: int | None = None,
    ) -> None:
        if self.pending_cast is not None and where == "module cast":
            source += f"; FSDP does that at the first forward (buffer_dtype={self.pending_cast})"
        self.report.findings.append(
            Finding(
                path=self.result.path,
                module_class=self.result.module_class,
                what=what,
                severity=severity,
                source=source,
                dtype=None if dtype is None else dtype_name(dtype),
                phase_error_rad=phase,
                cos_error=cos,
                first_bad_position=bad,
                first_damaged_position=damaged,
                protected=self.result.protected,
                where=where,
            )
        )

    def _add_measured(
        self,
        what: str,
        severity: Severity,
        cause: Explanation,
        errors: Errors,
        dtype: torch.dtype,
        phase: float | None,
        bad: int | None = None,
    ) -> None:
        self._add(
            what,
            severity,
            cause.said,
            where=cause.where,
            dtype=dtype,
            phase=float(errors.phase.max()) if phase is None else phase,
            cos=float(errors.cos.max()),
            bad=errors.first(errors.phase > BAD_RADIANS) if bad is None else bad,
            damaged=errors.first(errors.excess > 1),
        )

    def _check_application(self) -> None:
        if not is_protected(self.module) or state_of(self.module).apply != "fp32":
            return
        applied = state_of(self.module).applied
        if applied is not None and not _installed.installed(applied.places):
            names = ", ".join(applied.names)
            self._add(
                "application",
                "unknown",
                f"{names} was replaced after the model was protected, so q and k may be rotated in low "
                "precision; call safe_rope.protect(model) again after whatever replaces it",
                where="application",
            )

    def _audit_embedding(self, layer_type: str | None, asked: list[int] | None) -> None:
        convention = recognition.calling_convention(stock_class(self.module))
        if convention is None:
            self._add("forward", "unknown", "forward takes neither position_ids nor seq_len")
            return
        if self.patch is None and not self.result.protected:
            self.module = with_tables_of_its_forward(self.module, convention)
        try:
            reference = Reference(self.module, self.patch, layer_type, convention)
        except SafeRopeError as error:
            self._add("config", "unknown", f"what the tables should be cannot be told: {error}")
            return
        self.result.max_position_embeddings = reference.spec.max_position_embeddings
        if reference.keeps_own:
            self._add(
                "inv_freq", "note", "the constructor builds frequencies of its own; they are the reference"
            )
        measured = asked or _usual_positions(reference.max_position)
        sources = self._audit_inv_freq(reference, measured)
        self._audit_cache(reference, sources)
        self._audit_forward(reference, measured, sources)

    # ------------------------------------------------------------------ tensors

    def _names(self, reference: Reference, endings: tuple[str, ...]) -> list[str]:
        others = [f"{t}_" for t in layer_types(self.module) if t is not None and f"{t}_" != reference.prefix]
        return [
            name
            for name in position_buffers(self.module)
            if name.endswith(endings)
            and isinstance(getattr(self.module, name), Tensor)
            and name.startswith(reference.prefix)
            and not name.startswith(tuple(others))
        ]

    def _is_without_values(self, name: str, reference: Reference) -> bool:
        tensor = getattr(self.module, name)
        if not tensor.is_meta:
            return False
        spare = name.endswith("original_inv_freq") and not reference.spec.depends_on_length
        severity: Severity = "note" if spare else "unknown"
        self._add(name, severity, f"{name} is on the meta device and holds no values yet", dtype=tensor.dtype)
        return True

    def _audit_inv_freq(self, reference: Reference, positions: list[int]) -> dict[str, _Cause]:
        """Return, for the damaged tensors, the source and the largest error per position."""
        sources: dict[str, _Cause] = {}
        for name in self._names(reference, ("inv_freq",)):
            if self._is_without_values(name, reference):
                continue
            actual = plain(getattr(self.module, name)).detach()
            expected = reference.expected(name)
            if expected is None or actual.shape != expected.shape:
                self._add(
                    name, "unknown", f"the config does not say what {name} should hold", dtype=actual.dtype
                )
                continue
            relative = relative_error(actual, expected)
            if relative <= TOLERANCE:
                continue
            explained = explain_inv_freq(name, actual, reference, expected)
            off = (actual.to("cpu", torch.float64) - expected.to(torch.float64)).abs() / reference.divisor
            slope = float(off.nan_to_num(nan=torch.inf).max())
            at = min(max(positions), reference.max_position - 1)
            bad = _first_bad(slope, at=max(at, max(positions)))
            damaged = next((p for p in positions if p > 0), None)
            self._add(
                name,
                self._severity(explained.certain),
                f"{explained.said}, relative error {relative:.2g}",
                where=explained.where,
                dtype=actual.dtype,
                phase=slope * at if at else 0.0,
                bad=bad,
                damaged=damaged,
            )
            sources[name.removeprefix(reference.prefix)] = _Cause(explained, slope)
        return sources

    def _severity(self, certain: bool) -> Severity:
        # A class that no patch covers may have a formula of its own that its config does not tell.
        return "damaged" if certain or self.patch is not None or is_protected(self.module) else "unknown"

    def _audit_cache(self, reference: Reference, sources: dict[str, _Cause]) -> None:
        names = self._names(reference, ("cos_cached", "sin_cached"))
        if len(names) != 2 or any([self._is_without_values(name, reference) for name in names]):
            return
        names.sort()  # cos, sin
        cos, sin = (plain(getattr(self.module, name)).detach() for name in names)
        cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
        what = ", ".join(names)
        if cos.shape != sin.shape or cos.shape[-1] not in (len(reference.base), 2 * len(reference.base)):
            self._add(
                what,
                "unknown",
                f"the tables have the shape {list(cos.shape)}, which the config does not ask for",
            )
            return
        if not len(cos):
            return
        positions = torch.arange(len(cos), dtype=torch.int64)
        length = int(reference.cached_length()) if reference.convention == "length" else len(cos)
        table = CosSinTable(cos, sin, positions, length)
        errors, _ = compare(reference, table)
        if not errors.damaged:
            return
        explained = explain_cos_sin(what, reference, [table])
        self._add_measured(what, "damaged", explained, errors, cos.dtype, None)
        sources["cos_cached"] = _Cause(explained, 0.0)

    # ------------------------------------------------------------------ forward

    def _audit_forward(self, reference: Reference, positions: list[int], sources: dict[str, _Cause]) -> None:
        witnesses = [getattr(self.module, name) for name in position_buffers(self.module)]
        devices = [w.device for w in witnesses if isinstance(w, Tensor) and not w.is_meta]
        if not devices and witnesses:
            return  # on the meta device, which was said
        device = devices[0] if devices else torch.device("cpu")
        try:
            errors, tables, dtype = measure_forward(self.module, reference, positions, device)
        except UnmeasurableError as error:
            self._add("forward", "unknown", f"what forward returns cannot be measured: {error}")
            return
        for row in zip(errors.positions, errors.phase, errors.cos, errors.excess, strict=True):
            position, phase, cos, excess = (float(value) for value in row)
            self.result.rows.append(MeasuredRow(int(position), phase, cos, excess <= 1, reference.layer_type))
        if errors.damaged:
            self._add_forward(reference, sources, errors, tables, dtype)
        else:
            self._excuse(reference)
        self._note_rounding(reference, positions, device, tables)

    def _excuse(self, reference: Reference) -> None:
        """Call a damaged tensor a note where forward, which was measured, gives what is right without it."""
        for index, finding in enumerate(self.report.findings):
            if finding.path == self.result.path and finding.what == f"{reference.prefix}inv_freq":
                said = f"{finding.source}; forward does not use it"
                self.report.findings[index] = replace(finding, severity="note", source=said)

    def _add_forward(
        self,
        reference: Reference,
        sources: dict[str, _Cause],
        errors: Errors,
        tables: list[CosSinTable],
        dtype: torch.dtype,
    ) -> None:
        what = "forward" if reference.layer_type is None else f"forward({reference.layer_type})"
        inv_freq, cache = sources.get("inv_freq"), sources.get("cos_cached")
        cause = inv_freq or cache
        rebuilt = reference.convention == "length" and len(tables) > 1 and bool(errors.excess[-1] > 1)
        if reference.convention == "length" and cache is not None:
            cause = cache
            if inv_freq is not None and rebuilt:
                said = f"{cache.explained.said}; for longer sequences they are built anew, and "
                cause = _Cause(cache.explained._replace(said=said + inv_freq.explained.said), 0.0)
        elif rebuilt and inv_freq is not None:
            said = "tables beyond the cached length are built anew, and "
            cause = _Cause(Explanation(said + inv_freq.explained.said, True, "cache rebuild"), 0.0)
        certain = any(f.severity == "damaged" for f in self._own())
        if cause is None:
            explained = explain_cos_sin(what, reference, tables)
            certain, cause = explained.certain, _Cause(explained, 0.0)
        phase = bad = None
        if cause is inv_freq and reference.convention == "positions":
            # Computed from a damaged inv_freq, the error is known beyond a full turn, and between positions.
            last = int(errors.positions[errors.excess > 1].max())
            phase = cause.slope * last
            bad = None if reference.spec.depends_on_length else _first_bad(cause.slope, last)
        self._add_measured(what, self._severity(certain), cause.explained, errors, dtype, phase, bad)

    def _own(self) -> list[Finding]:
        return [finding for finding in self.report.findings if finding.path == self.result.path]

    def _note_rounding(
        self,
        reference: Reference,
        positions: list[int],
        device: torch.device,
        tables: list[CosSinTable],
    ) -> None:
        """Say so where the module rounds right tables to the model's 16-bit dtype when it hands them out."""
        if self.model_dtype not in LOW:
            return
        try:
            lowered = call(self.module, reference, positions, device, self.model_dtype)
        except UnmeasurableError as error:
            self._add("forward", "unknown", f"called in the model's dtype, {error}", dtype=self.model_dtype)
            return
        if lowered[0][0].dtype not in LOW:
            return
        # Tables beyond a cached length are built anew for each dtype: only the first call is rounding alone.
        calls = 1 if reference.convention == "length" else len(tables)
        both = list(zip(lowered, tables, strict=True))[:calls]
        off = max(
            float((low_table.double() - full_table.double()).abs().max())
            for low, full in both
            for low_table, full_table in ((low[0], full[0]), (low[1], full[1]))
        )
        if off == 0:
            return  # the tables hold rounded values already
        name = LOW[lowered[0][0].dtype]
        self._add(
            "forward",
            "note",
            f"rounded: cos and sin are handed out in {name} and q and k are rotated in it",
            where="application",
            dtype=lowered[0][0].dtype,
            cos=off,
        )


def _as_cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        duplicate = isolated(module)
    except UnmeasurableError:
        return module
    for name, buffer in duplicate._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            duplicate._buffers[name] = buffer.to(dtype)
    return duplicate


def _is_kept(module: nn.Module) -> bool:
    return is_protected(module) or is_pinned(module)


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


def class_name(cls: type) -> str:
    """Return the class's name with its Python module."""
    return f"{cls.__module__}.{cls.__qualname__}"
