"""Architectures that nobody has described to the library go through every damaging load path unharmed.

Real models of the installed transformers under the real DeepSpeed, built by tools/lab zoo: every position
table against that of a clean FP32 model on CPU, and the model's own forward.
"""

from __future__ import annotations

from typing import Any

import pytest
from laboratory.zoo.summary import audits

Rows = dict[str, dict[str, Any]]
SCENARIOS = ("S1", "S2", "S3", "S4", "S4a", "S5")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), pytest.mark.contract]


def holding(survey: Rows) -> Rows:
    return {name: row for name, row in survey.items() if row["status"] == "built" and row["tables"]}


def test_enough_architectures_could_be_built(survey: Rows) -> None:
    assert len(holding(survey)) >= 4
    assert not {name: row for name, row in survey.items() if row["status"] in ("crash", "timeout")}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_position_table_is_damaged_with_the_guard(survey: Rows, scenario: str) -> None:
    results = {name: row["scenarios"][scenario] for name, row in holding(survey).items()}
    assert not {
        name: result["guard"]["damaged"] for name, result in results.items() if _damaged(result, "guard")
    }
    if scenario == "S5":  # what the survey measures is real: without the guard the same cast does damage
        assert sum(_damaged(result, "stock") for result in results.values()) >= len(results) // 3


def _damaged(result: dict[str, Any], kind: str) -> bool:
    return bool(result[kind].get("damaged"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_loads_without_the_guard_loads_with_it(survey: Rows, scenario: str) -> None:
    results = {name: row["scenarios"][scenario] for name, row in holding(survey).items()}
    assert not {
        name: result["guard"]["error"]
        for name, result in results.items()
        if "error" in result["guard"] and "error" not in result["stock"]
    }


def test_fp32_results_are_the_stock_ones_to_the_bit(survey: Rows) -> None:
    results = {name: row["run"]["fp32"] for name, row in holding(survey).items()}
    assert sum(result == "same" for result in results.values()) >= len(results) // 2
    assert not {name: result for name, result in results.items() if result not in (None, "same")}


def test_a_model_cast_to_bf16_runs_and_gives_the_stock_dtypes(survey: Rows) -> None:
    results = {name: row["run"]["bf16"] for name, row in holding(survey).items()}
    assert sum(result == "same" for result in results.values()) >= len(results) // 2
    assert not {name: result for name, result in results.items() if result not in (None, "same")}


def test_q_and_k_are_rotated_in_fp32_and_rounded_once(survey: Rows) -> None:
    rotated = {name: row["rotation"] for name, row in holding(survey).items() if row.get("rotation")}
    rotated.pop("mlcd", None)  # the angle of its class token is a weight, and rounded as every weight is
    assert rotated
    assert not {n: r for n, r in rotated.items() if isinstance(r, str) or max(r.values()) > 0.501}


def test_every_architecture_that_holds_positions_is_protected(survey: Rows) -> None:
    assert not {
        name: row["protection"] for name, row in holding(survey).items() if row["protection"]["unprotected"]
    }
    assert any(row["protection"].get("full") for row in holding(survey).values())


def test_the_audit_says_what_the_comparison_of_the_survey_says(survey: Rows) -> None:
    wrong = []
    for name, row in survey.items():
        for scenario, kind, ours, verdict, why in audits([row]):
            if verdict != ours:
                wrong.append(f"{name}, {scenario}, {kind}: is {ours}, and the audit says {verdict}: {why}")
    assert not wrong, "\n".join(["", *wrong])
    assert len([*audits([*survey.values()])]) >= 4 * len(holding(survey))
