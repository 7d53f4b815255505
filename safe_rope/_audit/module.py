"""Measure one rotary module: what is applied, each of its embeddings, and the verdict."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from safe_rope._audit.causes import dtype_name
from safe_rope._audit.embedding import EmbeddingAuditor
from safe_rope._audit.forward import isolated, with_tables_of_its_forward
from safe_rope._audit.reference import PhaseReference
from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, Severity, Where, worst
from safe_rope._audit.wrappers import own_class
from safe_rope._protection.rewrite import is_pinned, is_protected, state_of
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import calling_convention, layer_types
from safe_rope.errors import SafeRopeError
from safe_rope.registry import RopePatch
from safe_rope.rotation import _installed


class ModuleAuditor:
    """Measures one module and writes what it finds into the report.

    Attributes:
        report: where everything is written.
        module: what is measured: the module, or a copy of it.
        patch: what covers it, or None.
        model_dtype: the dtype of the model's activations.
        result: the module's entry in the report.
    """

    def __init__(
        self,
        report: AuditReport,
        path: str,
        module: nn.Module,
        patch: RopePatch | None,
        dtype: torch.dtype,
        pending_cast: torch.dtype | None = None,
    ) -> None:
        kept = is_protected(module) or is_pinned(module)
        # A protected module puts its buffers back; of another, a copy is cast as FSDP is going to cast it.
        self._pending_cast = None if kept else pending_cast
        self.report = report
        self.module = module if self._pending_cast is None else _as_cast(module, self._pending_cast)
        self.patch = patch
        self.model_dtype = dtype
        self.result = ModuleAudit(
            path=path,
            module_class=class_name(own_class(stock_class(module))),
            family=_family(module, patch),
            protected=kept,
            guard=_what_the_guard_does(module, patch),
        )

    def run(self, asked: list[int] | None) -> None:
        """Measure everything; add the module, its rows and its findings to the report."""
        self.report.modules.append(self.result)
        self._check_application()
        for layer_type in layer_types(self.module):
            self._audit_embedding(layer_type, asked)
        self.result.verdict = worst(finding.severity for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """What was found about this module so far."""
        return [finding for finding in self.report.findings if finding.path == self.result.path]

    def add(
        self,
        what: str,
        severity: Severity,
        source: str,
        where: Where | None = None,
        dtype: torch.dtype | None = None,
        **measured: Any,
    ) -> None:
        """Add a finding; ``measured`` are the fields of `Finding` that hold numbers."""
        if self._pending_cast is not None and where == "module cast":
            source += f"; FSDP does that at the first forward (buffer_dtype={self._pending_cast})"
        self.report.findings.append(
            Finding(
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
        )

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

    def _audit_embedding(self, layer_type: str | None, asked: list[int] | None) -> None:
        convention = calling_convention(stock_class(self.module))
        if convention is None:
            self.add("forward", "unknown", "forward takes neither position_ids nor seq_len")
            return
        if self.patch is None and not self.result.protected:
            self.module = with_tables_of_its_forward(self.module, convention)
        try:
            reference = PhaseReference(self.module, self.patch, layer_type, convention)
        except SafeRopeError as error:
            self.add("config", "unknown", f"what the tables should be cannot be told: {error}")
            return
        self.result.max_position_embeddings = reference.spec.max_position_embeddings
        if reference.keeps_own:
            self.add(
                "inv_freq", "note", "the constructor builds frequencies of its own; they are the reference"
            )
        EmbeddingAuditor(self, reference, asked).run()


def _as_cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        duplicate = isolated(module)
    except UnansweredError:
        return module
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


def class_name(cls: type) -> str:
    """Return the class's name with its Python module."""
    return f"{cls.__module__}.{cls.__qualname__}"
