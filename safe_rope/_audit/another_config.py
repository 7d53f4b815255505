"""Whether a config was changed after a module was built, so that nobody can say what it was built from."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from safe_rope._audit.embedding import KEPT_OF_CONFIG
from safe_rope._audit.report import Finding
from safe_rope._base.dtypes import LOW
from safe_rope._protection.rewrite import is_protected

NOT_AS_BUILT = "not what the same forward returns on the tables that its constructor makes"
CHANGED = "its config may have been changed after it was built"


def doubted(finding: Finding) -> Finding:
    """Return an answer that is not the constructor's as unknown, and any other finding as it is."""
    if finding.source != NOT_AS_BUILT:
        return finding
    return replace(finding, severity="unknown", source=f"{NOT_AS_BUILT}; {CHANGED}")


def keeps_another(module: nn.Module, built: nn.Module | None) -> bool:
    """Whether what a module has kept of its config is not what its constructor keeps of the config now."""
    if built is None or is_protected(module):
        return False
    scales = vars(built).get("attention_scaling", 1.0) != 1.0
    names = KEPT_OF_CONFIG if scales else KEPT_OF_CONFIG[:-1]
    return any(vars(module).get(name) != vars(built).get(name) for name in names)


def may_be_frequencies(table: Tensor) -> bool:
    """Whether a table holds positive numbers that fall throughout, as the frequencies of a config do."""
    is_row = table.dim() == 1 and len(table) > 1 and table.is_floating_point() and table.dtype not in LOW
    return is_row and bool((table.isfinite() & (table > 0)).all()) and bool((table.diff() < 0).all())
