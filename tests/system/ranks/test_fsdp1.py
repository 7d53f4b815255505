"""FSDP1 with mixed precision on one rank: a guarded model does what the stock one does, in its dtypes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from _process import free_port
from fsdp1_worker import POLICIES
from support.children import launch, with_our_modules
from support.small_models import KINDS

SECONDS = 300

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("fsdp1") / "outcomes.json"
    worker = Path(__file__).with_name("fsdp1_worker.py")
    command = [sys.executable, "-W", "ignore", str(worker), str(output), str(free_port())]
    status, said = launch(command, with_our_modules(), output.with_suffix(".log"), SECONDS)
    assert status == 0, said[-6000:]
    found: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_guarded_model_does_as_the_stock_one(
    kind: str, policy: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    stock, guarded = (outcomes[f"{kind}, {policy}"][who] for who in ("stock", "guarded"))
    if "error" in stock:
        pytest.skip(f"the stock model does not run: {stock['error']}"[:120])
    assert "error" not in guarded, guarded["error"]
    assert guarded["dtype"] == stock["dtype"]
    assert guarded["distance"] <= 1.5 * stock["distance"] + 2**-8
