"""A signal at any moment leaves every global as it was; `tools/lab soak` tries more of them."""

from __future__ import annotations

import pytest
from laboratory.soak import interrupts
from laboratory.soak.trial import Trial

SCALE = 0.06


@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.filterwarnings("ignore")
def test_interrupts_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "set_imports_aside", lambda: None)  # the tests have done so
    trial = Trial(seed=1, scale=SCALE)
    interrupts.run(trial)
    failures = [failure for kind in trial.kinds.values() for failure in kind["failures"]]
    assert not failures
    assert sum(kind["tries"] for kind in trial.kinds.values()) == 2 * round(interrupts.TRIES * SCALE)
