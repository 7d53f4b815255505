"""Write docs/decoding.md from the record of `tools/lab bench decode`."""

from __future__ import annotations

import statistics
from typing import Any

from laboratory.bench.decode import FULLY, PINNED, is_late

TITLE = """\
# Decoding

Whole models with the guard and without, one for each body of the survey that rotates. They share their
weights and take turns in one process. Times are ratios to the stock model, medians over turns. A second stock
model takes turns with them; its ratio stands in brackets and says what such a figure is worth.

`tools/lab bench decode --cases decode,prefill,training --json docs/data/decode.json` makes the
[record](data/decode.json), and `tools/lab bench decode --page` this page from it. Operators are those that a
step calls, stock and guarded; nothing else that runs on the machine changes them. *MB* is by how much a
process grows that builds one of the two and calls it, stock and guarded.
"""
AGAIN = """\
## A second run

Decoding was measured twice (`--again`), the second time without prefill and training. The difference is that
of the two ratios.
"""
COMPILED = """\
## Compiled

`torch.compile` of the whole model with a static cache, for a few of them (`--compiled --cases compiled
--batches 1`). A guarded step takes 0.1 to 0.4 ms more: the lookup is an operator that nothing is fused with,
and Dynamo checks what the guard reads. The less a step does, the larger is its ratio. There is no target.
"""
OWN_WIDTH = """\
## At their own width

The layers above are a few hundred elements wide, so that what Python costs shows. These are as wide as in
the default config of the architecture (`--width own --layers 2`). The vocabulary is small.
"""
CASES = {
    ("decode", 1): "decode, batch 1",
    ("decode", 16): "decode, batch 16",
    ("static", 1): "static cache",
    ("compiled", 1): "compiled, static cache",
    ("graphed", 1): "CUDA graph, static cache",
    ("prefill", 1): "prefill",
    ("training", 1): "training",
    ("forward", 1): "forward",
}


def page(found: dict[str, Any]) -> str:
    """Return the page as Markdown: two levels, the second run, and models of their own width."""
    lines = [TITLE]
    rows = found["rows"]
    measured = [row for row in rows if any("ratio" in case for case in row.get("cases", ()))]
    small = [row for row in measured if row["here"]["width"] == "small"]
    lines += [*_where(small), ""]
    for title, level, target in (
        ("Fully protected", False, FULLY),
        ("Pinned", True, PINNED),
    ):
        some = [row for row in small if bool(row["pinned"]) == level]
        lines += [f"## {title}", "", *_summary(some, target), "", *_table(some), ""]
    lines += [AGAIN, *_agreement(small, found["again"]), ""]
    compiled = found["compiled"]
    lines += [COMPILED, *_where(compiled), "", *_table(compiled), ""]
    own = [row for row in measured if row["here"]["width"] == "own"]
    lines += [OWN_WIDTH, *_where(own), "", *_table(own), ""]
    absent = [(row["model_type"], _reason(row)) for row in rows if row not in measured]
    if absent:
        lines += ["## Not measured", "", "| model | reason |", "|---|---|"]
        lines += [f"| {name} | {reason} |" for name, reason in absent] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _where(rows: list[dict[str, Any]]) -> list[str]:
    """Say what the times of one run's rows depend on besides the code."""
    here, load = rows[0]["here"], max(value for row in rows for value in row["here"]["load"])
    return [
        f"{here['layers']} layers where a model can have them, BF16, one new token after "
        f"{here['prompt']}. One run used",
        f"{here['threads']} thread of {here['cores']} cores on {here['processor']}, torch {here['torch']}, "
        f"transformers {here['transformers']} and Python {here['python']}.",
        f"The load was up to {load:.0f}.",
    ]


def _summary(rows: list[dict[str, Any]], target: float) -> list[str]:
    lines = [f"The target for decoding is {target:.2f}.", ""]
    lines += [
        "| | models | median ratio | median control | above the target by more than noise |",
        "|---|---|---|---|---|",
    ]
    for what, batch in CASES:
        found = [(row, case) for row in rows if (case := _case(row, what, batch)) is not None]
        if not found:
            continue
        late = [row["model_type"] for row, case in found if what == "decode" and is_late(row, case)]
        ratio, control = (statistics.median(c[key] for _, c in found) for key in ("ratio", "control"))
        lines.append(
            f"| {CASES[what, batch]} | {len(found)} | {ratio:.3f} | {control:.3f} | {', '.join(late)} |"
        )
    return lines


def _agreement(rows: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | models | median difference | largest difference | above the target both times |",
        "|---|---|---|---|---|",
    ]
    seconds = {row["model_type"]: row for row in again}
    for batch in (1, 16):
        differences, late = {}, []
        for row in rows:
            case = _case(row, "decode", batch)
            second = _case(seconds.get(row["model_type"], {"cases": ()}), "decode", batch)
            if case is not None and second is not None:
                differences[row["model_type"]] = abs(case["ratio"] - second["ratio"])
                if is_late(row, case) and is_late(row, second):
                    late.append(row["model_type"])
        name = max(differences, key=lambda n: differences[n])
        cells = CASES["decode", batch], len(differences), f"{statistics.median(differences.values()):.3f}"
        lines.append(
            f"| {' | '.join(map(str, cells))} | {differences[name]:.3f} ({name}) | {', '.join(late)} |"
        )
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    shown = [one for one in CASES if any(_case(row, *one) for row in rows)]
    header = ["model", *(CASES[one] for one in shown), "operators", "MB"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in rows:
        cells = [
            f"{case['ratio']:.3f} ({case['control']:.3f})" if (case := _case(row, *one)) else ""
            for one in shown
        ]
        first = next(case for case in row["cases"] if "ratio" in case)
        grown = [f"{one['MB']:.0f}" for one in row.get("memory", ()) if "MB" in one]
        ends = "{} / {}".format(*first["operators"]), " / ".join(grown)
        lines.append(f"| {' | '.join([row['model_type'], *cells, *ends])} |")
    return lines


def _case(row: dict[str, Any], what: str, batch: int) -> dict[str, Any] | None:
    found = (case for case in row["cases"] if (case["what"], case["batch"]) == (what, batch))
    case = next(found, None)
    return case if case is not None and "ratio" in case else None


def _reason(row: dict[str, Any]) -> str:
    reasons = [case["reason"] for case in row.get("cases", ()) if "reason" in case]
    reason: str = row.get("reason") or next(iter(reasons), "takes no input that is known")
    return reason.replace("|", "/").replace("\n", " ")[:90]
