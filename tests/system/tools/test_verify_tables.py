"""tools/lab verify-tables: the stratum that CI checks, and that the check finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laboratory.verify_tables import check as verifier

ROOT = Path(__file__).resolve().parents[3]
FIRST = 9_990_000


def block(theta: float = 1e6) -> tuple[torch.Tensor, ...]:
    """Positions, frequencies, and what a table has for them."""
    subject = verifier.Subject(theta, (128,))
    positions = torch.arange(FIRST, FIRST + 100)
    return positions, subject.inv_freq[128], *subject.tables[128].lookup(positions)


@pytest.mark.parametrize("theta", verifier.THETAS)
def test_no_entry_of_the_stratum_is_off_by_more_than_one_ulp(theta: float) -> None:
    found, complete = verifier.verify(
        (theta,), verifier.DIMS, verifier.stratum(seed=0), verifier.Record(None)
    )
    assert complete
    positions = verifier.STRATUM + verifier.RANDOM_BLOCKS * verifier.RANDOM_BLOCK
    for dim in verifier.DIMS:
        count = found[theta, dim]
        assert count.entries == positions * dim
        assert count.over_one_ulp == 0, count.listed
        assert count.not_correctly_rounded <= 2, count.listed  # nine or ten among the 1.28e9 below 10 million
    assert found[theta, 128].by_mpmath > 0, "nothing was near the middle: the rule is not applied"


@pytest.mark.parametrize("units", [1, 3])
def test_an_entry_that_is_off_is_found(units: int) -> None:
    positions, inv_freq, cos, sin = block()
    assert verifier.check_values(positions, inv_freq, cos, sin).not_correctly_rounded == 0
    sin.view(torch.int32)[7, 21] += units
    found = verifier.check_values(positions, inv_freq, cos, sin)
    assert (found.not_correctly_rounded, found.over_one_ulp) == (1, int(units > 1))
    (entry,) = found.listed
    assert (entry["function"], entry["position"], entry["index"]) == ("sin", FIRST + 7, 21)
    assert units - 0.5 <= entry["error_ulp"] <= units + 0.5


def test_a_value_that_is_no_number_is_found() -> None:
    positions, inv_freq, cos, sin = block()
    cos[3, 60] = torch.nan
    assert verifier.check_values(positions, inv_freq, cos, sin).over_one_ulp == 1


def test_a_value_near_the_middle_is_left_to_mpmath() -> None:
    unit = 2.0**-24  # of FP32, just below 1
    distances = [unit * x for x in (0.5, 0.5 + 2.0**-21, 0.5 + 2.0**-19, 0.0)]
    wide = 1 - torch.tensor(distances, dtype=torch.float64)
    assert verifier._near_the_middle(wide).tolist() == [True, True, False, False]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "tools" / "lab", "verify-tables", "--here", "--python", sys.executable]
    command += ["--theta", "1e4", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_an_interrupted_check_goes_on_where_it_was(tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    options = ("--dim", "64", "--range", "65000:132000", "--record", record)
    stopped = run(*options, "--seconds", "1e-9")
    assert stopped.returncode == 3
    assert json.loads(stopped.stdout)["complete"] is False
    done = run(*options)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["found"]
    assert found["entries"] == (132_000 - 65_000) * 64
    pieces = json.loads(Path(record).read_text())
    assert [key.split("/")[2] for key in pieces] == ["65000-65536", "65536-131072", "131072-132000"]
    for piece in pieces.values():  # what is recorded is not computed again
        piece["64"]["not_correctly_rounded"] = 5
    Path(record).write_text(json.dumps(pieces))
    assert json.loads(run(*options).stdout)["found"][0]["not_correctly_rounded"] == 15


@pytest.mark.parametrize("span", ["5:5", "9:3", "-1:4", "0:600000000"])
def test_a_range_that_makes_no_sense_is_refused(span: str) -> None:
    done = run(f"--range={span}")
    assert done.returncode == 2
    assert "FIRST:LAST" in done.stderr
