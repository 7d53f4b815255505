"""What docs/audit.md says of the survey is what the audit said of each architecture."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from markdown import ROOT

RECORDS = sorted((ROOT / "docs" / "data").glob("audit-*.jsonl"))
UNKNOWN_SHARE = 0.02


def rows_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def verdicts_of(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((ours, audits) for row in rows for _, _, ours, audits in row["cells"])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_the_audit_agrees_with_the_survey(record: Path) -> None:
    rows = rows_of(record)
    found = verdicts_of(rows)
    unknown = sum(count for (_, audits), count in found.items() if audits == "unknown")
    assert not found["ok", "damaged"]
    assert not found["damaged", "ok"]
    assert unknown <= UNKNOWN_SHARE * sum(found.values())
    assert all(row["unknown"] for row in rows if any(cell[3] == "unknown" for cell in row["cells"]))


def test_the_page_has_the_figures_of_every_record() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    assert len(RECORDS) == 3
    for record in RECORDS:
        rows = rows_of(record)
        found = verdicts_of(rows)
        tables = sum(row["tables"] > 0 for row in rows)
        counts = [len(rows), tables, found["damaged", "damaged"], found["ok", "ok"]]
        counts.append(sum(count for (_, audits), count in found.items() if audits == "unknown"))
        cells = " | ".join(f"{count:,}" for count in counts)
        assert f"| [{rows[0]['pair'].replace(' + ', ', DeepSpeed ')}](data/{record.name}) | {cells} |" in page
