"""The guard may open before deepspeed and transformers are imported, and imports nothing in zero.Init."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.children import with_our_modules
from support.one_rank import environment

pytestmark = pytest.mark.contract

HERE = Path(__file__).parent


CHILD = """
import sys, torch
from safe_rope.constructors import ConstructorGuard, pristine
with pristine():
    assert torch.ones(1).dtype == torch.float32
assert not any(name.partition(".")[0] in ("deepspeed", "transformers") for name in sys.modules)
guard = ConstructorGuard()
{before}
guard.open()
{after}
deepspeed.init_distributed("gloo")
from support.zero_init import zero_init
with zero_init():
    assert torch.ones(2, dtype=torch.float32).dtype == torch.float32
    assert torch.ones(2).dtype == torch.bfloat16
guard.close()
with zero_init():
    assert torch.ones(2, dtype=torch.float32).dtype == torch.bfloat16
assert torch.ones is torch._C._VariableFunctions.ones
"""

NO_IMPORT = """
import sys, torch, deepspeed
import safe_rope, safe_rope._protection, safe_rope.rotation
from safe_rope.constructors import ConstructorGuard, pristine
from support.zero_init import zero_init
deepspeed.init_distributed("gloo")
class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.FloatTensor([0.5, 0.25, 0.125])  # torch shows nobody that it makes this
state = torch.get_rng_state()
with zero_init(), torch.device("meta"):
    before = set(sys.modules)
    with ConstructorGuard(), torch.device("cpu"):
        table = torch.arange(1, 9, dtype=torch.float32)
        assert torch.nn.Parameter(torch.log(2 * table)).dtype == torch.bfloat16
        with pristine():
            assert torch.nn.Parameter(torch.log(2 * torch.arange(1.0, 9.0))).dtype == torch.bfloat16
    with safe_rope.guard():
        model = torch.nn.Sequential(Slopes())
    new = sorted(name for name in set(sys.modules) - before if name.startswith("torch"))
    assert not new, new
assert torch.equal(torch.get_rng_state(), state)
"""


@pytest.mark.slow
def test_libraries_imported_inside_the_guard_are_covered_and_left_as_they_were() -> None:
    printed = run_child(str(HERE / "late_imports.py"))
    seen = json.loads(printed.splitlines()[-1])
    assert max(seen["errors"].values()) <= 1.0
    assert seen["left"] == []
    assert seen["replaced"] == []


def test_the_guard_makes_torch_import_nothing_inside_zero_init() -> None:
    # With Tensor.__new__ replaced, the import of torch._dynamo fails half way: torch.compile is then broken.
    run_child("-c", NO_IMPORT)


@pytest.mark.parametrize("after", [True, False], ids=["guard first", "deepspeed first"])
def test_deepspeed_may_be_imported_before_or_after_the_guard_opens(after: bool) -> None:
    halves = {"before": "", "after": ""} | {"after" if after else "before": "import deepspeed"}
    run_child("-c", CHILD.format(**halves))


def run_child(*arguments: str) -> str:
    """Run Python with the arguments as the only rank; return what it prints."""
    with environment():
        surroundings = with_our_modules()
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
