"""What a survey found, as text and as a table for the docs."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]
TITLES = {
    "S1": "direct `zero.Init`",
    "S2": "ZeRO-3 `from_pretrained`",
    "S3": "S2, then `deepspeed.initialize`",
    "S4": "`from_pretrained` BF16, then ZeRO-2",
    "S4a": "`from_config` in BF16",
    "S5": "`.to(bfloat16)`",
}

ONE_ROUNDING = 0.501
"""Units in the last place that one rounding, of what FP32 itself has rounded, is off by at most."""

NOT_ASKED = "not asked"

_LEARNED = ("mlcd", "mlcd_vision_model")
"""Where an angle is a weight (the class token's), and is rounded as every weight is."""


class Problem(NamedTuple):
    """What is not as it should be: where, what, and whether it is known to be the guard's."""

    where: str
    text: str
    known: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def problems(row: Row) -> Iterator[Problem]:
    """Yield what is wrong with an architecture that was built; of each scenario two tables at most."""
    for name, results in row.get("scenarios", {}).items():
        guarded = results.get("guard", {})
        for path, problem in list((guarded.get("damaged") or {}).items())[:2]:
            yield Problem(name, f"`{path}` is damaged with the guard: {problem}")
        if _fails_only_guarded(results):
            yield Problem(name, f"fails with the guard only: {guarded['error']}")
        elif "error" in guarded and "stock" not in results:
            text = f"fails with the guard, {NOT_ASKED} without it: {guarded['error']}"
            yield Problem(name, text, known=False)
    for name, kind, ours, verdict, why in audits([row]):
        if verdict not in (ours, "unknown"):
            yield Problem(f"{name}, {kind}", f"is {ours}, and the audit says {verdict}: {'; '.join(why)}")
    for kind, problem in row.get("run", {}).items():
        if problem not in (None, "same"):
            yield Problem(f"forward in {kind.upper()}", problem)
    for _, _, error in rotations([row]):
        if error > ONE_ROUNDING:
            yield Problem("rotation", f"q and k have an error of {error} units in the last place")


def fails(row: Row) -> bool:
    """Whether the survey of an architecture did not end, or found what is known to be the guard's fault."""
    return row["status"] not in ("built", "unbuildable") or any(problem.known for problem in problems(row))


def counts(rows: list[Row]) -> dict[str, Any]:
    """Count the architectures of one version pair."""
    built = [row for row in rows if row["status"] == "built"]
    holding = [row for row in built if row["tables"]]
    return {
        "architectures": len(rows),
        "built": len(built),
        "with position tables": len(holding),
        "protection": Counter(_protection(row) for row in holding),
        "scenarios": {name: _scenario(holding, name) for name in TITLES},
        "run": {kind: _runs(holding, kind) for kind in ("fp32", "bf16")},
        "not built": {
            row["model_type"]: row.get("reason", row["status"]) for row in rows if row["status"] != "built"
        },
    }


def _scenario(rows: list[Row], name: str) -> list[str]:
    """How many were damaged without the guard and with it, and how many fail only with it."""
    results = [row["scenarios"][name] for row in rows if name in row["scenarios"]]
    found = []
    for kind in ("stock", "guard"):
        asked = [result[kind] for result in results if kind in result]
        damaged, ran = (sum(map(bool, (r.get("damaged") for r in asked))), sum("damaged" in r for r in asked))
        found.append(f"{damaged} of {ran}" if asked else NOT_ASKED)
    return [*found, NOT_ASKED if NOT_ASKED in found else str(sum(map(_fails_only_guarded, results)))]


def _fails_only_guarded(results: Row) -> bool:
    return "error" in results.get("guard", {}) and "error" not in results.get("stock", {"error": NOT_ASKED})


def _runs(rows: list[Row], kind: str) -> dict[str, int]:
    results = [row["run"][kind] for row in rows if row.get("run", {}).get(kind) is not None]
    return {"ran": len(results), "same": results.count("same")}


def audits(rows: list[Row]) -> Iterator[tuple[str, str, str, str, list[str]]]:
    """Scenario, stock or guard, what our own comparison says, what the audit says, and why."""
    for row in rows:
        for name, results in row.get("scenarios", {}).items():
            for kind, result in results.items():
                if "audit" in result:
                    ours = "damaged" if result["damaged"] else "ok"
                    yield name, kind, ours, result["audit"]["verdict"], result["audit"]["why"]


def verdicts(row: Row) -> Row:
    """Return what the audit said of an architecture: scenario, kind, our own verdict and the audit's."""
    found = list(audits([row]))
    why = [text for *_, verdict, why in found if verdict == "unknown" for text in why[:1]]
    kept = {name: row[name] for name in ("model_type", "pair", "tables")}
    return kept | {"cells": [cell[:4] for cell in found]} | ({"unknown": why[0]} if why else {})


def _confusion(rows: list[Row]) -> list[str]:
    """The audit's verdicts against our own, with and without the guard, and why it cannot tell."""
    cells = Counter((kind, ours, verdict) for _, kind, ours, verdict, _ in audits(rows))
    if not cells:
        return []
    lines = [f"{'the audit says':24}" + "".join(f"{verdict:>10}" for verdict in _VERDICTS)]
    for kind, ours in itertools.product(("stock", "guard"), _VERDICTS[:2]):
        counted = "".join(f"{cells[kind, ours, verdict]:>10}" for verdict in _VERDICTS)
        lines.append(f"{kind + ', is ' + ours:24}{counted}")
    reasons = {row["model_type"]: list(audits([row])) for row in rows}
    unknown = {
        name: next((why[0] for *_, verdict, why in found if verdict == "unknown" and why), None)
        for name, found in reasons.items()
    }
    return [*lines, *(f"  unknown: {name}: {why}" for name, why in unknown.items() if why)]


_VERDICTS = ("ok", "damaged", "unknown")


def rotations(rows: list[Row]) -> list[tuple[str, str, float]]:
    """Architecture, body of the function that rotates, and its largest error in units of the last place."""
    measured = [(row["model_type"], row.get("rotation")) for row in rows if row["model_type"] not in _LEARNED]
    return [(name, *one) for name, found in measured if isinstance(found, dict) for one in found.items()]


def _protection(row: Row) -> str:
    protection = row.get("protection") or {}
    if protection.get("unprotected"):
        return "not protected"
    kinds = [kind for kind in ("full", "tables", "pinned") if protection.get(kind)]
    return " and ".join(kinds) or "none"


def summarize(rows: list[Row]) -> str:
    """Say what was found, in lines for a terminal."""
    found = counts(rows)
    lines = [
        f"{found['architectures']} architectures, {found['built']} built, "
        f"{found['with position tables']} with position tables",
        "protection: " + ", ".join(f"{kind} {count}" for kind, count in found["protection"].most_common()),
        f"{'':40}{'damaged':>14}{'with the guard':>16}{'broken by it':>14}",
    ]
    for name, (stock, guarded, broken) in found["scenarios"].items():
        lines.append(f"{name + ' ' + TITLES[name]:40}{stock:>14}{guarded:>16}{broken:>14}")
    lines += _confusion(rows)
    for kind, result in found["run"].items():
        lines.append(f"forward in {kind}: {result['same']} of {result['ran']} as without the guard")
    lines += [f"  {row['model_type']}, {problem}" for row in rows for problem in problems(row)]
    lines += [f"  not built: {name}: {reason}" for name, reason in found["not built"].items()]
    return "\n".join(lines)


_HEAD = """\
# Coverage of transformers' architectures

Every config class of a transformers release is shrunk (fewer layers, narrower, the same structure). The base
model that belongs to it is built, with and without the guard, through six ways of building or loading that
damage position tables. Every table that a model stores, and cos and sin as its rotary modules return
them up to position 4,095, is compared with a clean FP32 model on CPU.

*Fully protected*: cos and sin come from the library's own tables, and q and k are rotated in FP32. *Pinned*:
the tables stay as the stock constructor makes them in FP32 on CPU. The stock code computes with them, in
FP32 where it rotates q and k: [how, for each family](contracts.md#how-each-familys-application-is-protected).

This page is what `tools/lab zoo --summary --markdown` makes of the files in `docs/data`, one line of JSON for
each config class. `tools/lab zoo --output FILE` makes such a file for the installed release; it can be
interrupted, and takes up to three seconds of one core for each class. CI runs the same code on a fixed
choice, which `tests/system/zoo/conftest.py` lists: 40 and one of every patch on the newest release, fewer on
the older ones."""

_ASIDE = """\
A scenario counts if it runs without the guard. Some architectures cannot be built under a direct zero.Init
(a weight is initialised after it has been partitioned), or cannot read the checkpoint that they saved."""


def markdown(rows: list[Row]) -> str:
    """Return docs/coverage.md: a section for each version pair among ``rows``."""
    sections = [_HEAD]
    for pair in sorted({row["pair"] for row in rows}, key=_release, reverse=True):
        found = sorted((row for row in rows if row["pair"] == pair), key=lambda row: row["model_type"])
        sections.append(_section(pair, found))
    text = "\n\n".join(sections)
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 110, break_long_words=False, break_on_hyphens=False)


def _release(pair: str) -> list[int]:
    return [int(number) for number in pair.split(" ")[0].split(".")]


def _section(pair: str, rows: list[Row]) -> str:
    found = counts(rows)
    transformers, deepspeed = pair.split(" + ")
    lines = [
        f"## transformers {transformers}, DeepSpeed {deepspeed}",
        "",
        f"{found['architectures']} config classes; {found['built']} could be built, of which "
        f"{found['with position tables']} hold position tables.",
        "",
        "| scenario | damaged without the guard | damaged with it | fail only with it |",
        "|---|---|---|---|",
    ]
    for name, cells in found["scenarios"].items():
        lines.append(f"| {name}: {TITLES[name]} | {' | '.join(cells)} |")
    fp32, bf16 = found["run"]["fp32"], found["run"]["bf16"]
    lines += [
        "",
        _ASIDE,
        "",
        f"Forward, for the {fp32['ran']} that take a simple input: results in FP32 with "
        f'`tables="fp32"` are the stock model\'s to the bit for {fp32["same"]}. After `.to(bfloat16)` '
        f"{bf16['same']} of the {bf16['ran']} that then run without the guard run with it, and give the same "
        "dtypes.",
    ]
    measured = rotations(rows)
    if measured:
        lines += [
            "",
            "How the guarded model rotates q and k in BF16 was measured in "
            f"{len({m[0] for m in measured})} of them ({len({m[1] for m in measured})} distinct "
            "functions). "
            f"They are at most {max(m[2] for m in measured):.3f} units in the last place from float64, "
            "where one rounding is 0.5.",
        ]
    wrong = [f"- {row['model_type']}, {problem}" for row in rows for problem in problems(row)]
    if wrong:
        lines += ["", "Not as it should be:", "", *wrong]
    holding = [row for row in rows if row["status"] == "built" and row["tables"]]
    for title, names in _by_protection(holding):
        lines += ["", f"**{title}** ({len(names)}): {', '.join(names)}."]
    reasons: dict[str, list[str]] = {}
    for name, reason in found["not built"].items():
        reasons.setdefault(_plain_reason(reason), []).append(name)
    total = len(found["not built"])
    lines += ["", f"**Not built** ({total}), from the default config or anything smaller:", ""]
    lines += ["| reason | architectures |", "|---|---|"]
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {reason.replace('|', '/')} | {', '.join(names)} |")
    return "\n".join(lines)


def _by_protection(holding: list[Row]) -> list[tuple[str, list[str]]]:
    titles = {
        "full": "Fully protected",
        "full and pinned": "Fully protected, other tables in the same model pinned",
        "pinned": "Pinned",
        "none": "Nothing is stored, forward computes everything anew",
    }
    groups: dict[str, list[str]] = {title: [] for title in titles.values()}
    for row in holding:
        kind = _protection(row)
        title = titles.get(kind, f"Protection: {kind}")
        tables = ""
        if kind == "pinned":
            kept = sorted(
                name for name in row["names"] if "(" not in name and not name.startswith("original_")
            )
            tables = f" (`{'`, `'.join(kept[:3])}`)" if kept else ""
        groups.setdefault(title, []).append(row["model_type"] + tables)
    return [(title, names) for title, names in groups.items() if names]


def _plain_reason(reason: str) -> str:
    if re.search(r"million parameters at its smallest|allocate memory", reason):
        return "too large however much it is shrunk"
    if reason.startswith(("ImportError", "ModuleNotFoundError")):
        missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", reason)
        name = next((part for part in missing.groups() if part), "") if missing else ""
        return f"needs the package {name}" if name else "needs a package that is not installed"
    if re.match(r"no model class|A configuration of type|not done after", reason):
        return reason
    return "its default config does not describe a model: " + re.sub(r"^(\w+): ", r"", reason)[:90]
