"""The model stays right, and unprotected it does not: what a package with a patch should test."""

from __future__ import annotations

import torch
from safe_rope_myarch.modeling_myarch import MyModel

import safe_rope

IDS = torch.arange(64)[None] % 64


def test_the_patch_is_found() -> None:
    assert "myarch" in [patch.family for patch in safe_rope.registry.supported()]


def test_a_guarded_model_keeps_exact_tables_through_a_cast() -> None:
    with safe_rope.guard(strict=True) as session:
        model = MyModel()
    assert [entry.family for entry in session.report.protected] == ["myarch"]
    model.to(torch.bfloat16)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert model(IDS).isfinite().all()


def test_an_unguarded_model_does_not() -> None:
    assert safe_rope.audit(MyModel().to(torch.bfloat16)).damaged


def test_protecting_changes_nothing_in_fp32() -> None:
    torch.manual_seed(0)
    model = MyModel()
    with torch.no_grad():
        before = model(IDS)
        safe_rope.protect(model, tables="fp32")
        assert torch.allclose(model(IDS), before, rtol=1e-5, atol=1e-6)
