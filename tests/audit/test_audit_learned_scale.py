"""What a file fills beside frequencies is no damage, and nobody can say whether it has been rounded."""

from __future__ import annotations

import pytest
import torch
from support.learned_scale import Holder, learned

import safe_rope

pytestmark = pytest.mark.contract


def _loaded(is_guarded: bool) -> Holder:
    if is_guarded:
        with safe_rope.guard():
            model = Holder()
    else:
        model = Holder()
    model.rotary.load_state_dict({"alpha": learned()})
    return model


@pytest.mark.parametrize("is_guarded", [False, True])
def test_what_a_file_fills_is_no_damage(is_guarded: bool) -> None:
    report = safe_rope.audit(_loaded(is_guarded))
    assert report.ok, str(report)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_what_has_been_rounded_is_unknown(is_guarded: bool) -> None:
    model = _loaded(is_guarded)
    model.rotary.alpha = model.rotary.alpha.to(torch.bfloat16)
    (finding,) = safe_rope.audit(model).findings
    assert (finding.what, finding.severity) == ("alpha", "unknown")


def test_rounded_frequencies_beside_it_are_damage() -> None:
    model = _loaded(is_guarded=False)
    model.rotary.inv_freq = model.rotary.inv_freq.to(torch.bfloat16)
    damaged = safe_rope.audit(model).damaged
    assert {"inv_freq", "forward"} >= {finding.what for finding in damaged} >= {"inv_freq"}


def test_what_holds_no_numbers_is_no_learned_scale() -> None:
    model = _loaded(is_guarded=False)
    model.rotary.alpha.fill_(torch.nan)
    assert not safe_rope.audit(model).ok
