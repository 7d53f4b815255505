"""A signal at any moment leaves every global as it was; `tools/lab soak` tries more of them."""

from __future__ import annotations

import gc

import pytest
import torch
from laboratory.soak import interrupts
from laboratory.soak.trial import Trial

import safe_rope

SCALE = 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.filterwarnings("ignore")
def test_interrupts_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "set_aside", lambda: None)  # the tests have done so
    trial = Trial(seed=1, scale=SCALE)
    interrupts.run(trial)
    failures = [failure for kind in trial.kinds.values() for failure in kind["failures"]]
    assert not failures
    assert sum(kind["tries"] for kind in trial.kinds.values()) == 2 * round(interrupts.TRIES * SCALE)


def test_a_guard_that_never_got_to_its_exit_closes_when_it_is_dropped() -> None:
    before = torch.nn.Module.__init__
    guard = safe_rope.guard()
    guard.__enter__()
    assert torch.nn.Module.__init__ is not before
    del guard
    gc.collect()
    assert torch.nn.Module.__init__ is before


def test_a_guard_that_was_started_stays_open_when_it_is_dropped() -> None:
    before = torch.nn.Module.__init__
    safe_rope.guard().start()
    gc.collect()
    assert torch.nn.Module.__init__ is not before
    from safe_rope import constructors
    from safe_rope._protection import wrapped_methods

    (left,) = wrapped_methods.watches
    left.close()
    constructors._state.close()
    assert torch.nn.Module.__init__ is before


def test_a_guard_that_was_refused_is_dropped_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(safe_rope.ConfigError):
        safe_rope.guard(tables="none")  # type: ignore[arg-type]
    gc.collect()
    assert not recwarn.list
