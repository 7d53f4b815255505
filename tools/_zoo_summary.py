"""What a survey found, as text and as a table for the docs."""

from __future__ import annotations

from collections import Counter
from typing import Any

Row = dict[str, Any]
TITLES = {
    "S1": "direct `zero.Init`",
    "S2": "ZeRO-3 `from_pretrained`",
    "S3": "S2, then `deepspeed.initialize`",
    "S4": "`from_pretrained` BF16, then ZeRO-2",
    "S4a": "`from_config` in BF16",
    "S5": "`.to(bfloat16)`",
}


def counts(rows: list[Row]) -> dict[str, Any]:
    """Count the architectures of one version pair."""
    built = [row for row in rows if row["status"] == "built"]
    holding = [row for row in built if row["tables"]]
    scenarios = {}
    for name in TITLES:
        results = [row["scenarios"][name] for row in holding if name in row["scenarios"]]
        scenarios[name] = {
            "ran": sum("damaged" in r.get("stock", {}) for r in results),
            "damaged": sum(bool(r.get("stock", {}).get("damaged")) for r in results),
            "guarded ran": sum("damaged" in r.get("guard", {}) for r in results),
            "guarded damaged": sum(bool(r.get("guard", {}).get("damaged")) for r in results),
            "broken": sum(
                "error" in r.get("guard", {}) and "error" not in r.get("stock", {}) for r in results
            ),
        }
    return {
        "architectures": len(rows),
        "built": len(built),
        "with position tables": len(holding),
        "protection": Counter(_protection(row) for row in holding),
        "scenarios": scenarios,
        "run": {kind: _runs(holding, kind) for kind in ("fp32", "bf16")},
        "not built": {
            row["model_type"]: row.get("reason", row["status"]) for row in rows if row["status"] != "built"
        },
    }


def _runs(rows: list[Row], kind: str) -> dict[str, int]:
    results = [row["run"][kind] for row in rows if row.get("run", {}).get(kind) is not None]
    return {"ran": len(results), "same": results.count("same")}


def _broken(result: dict[str, Any]) -> bool:
    return "error" in result.get("guard", {}) and "error" not in result.get("stock", {"error": ""})


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
        f"{'':40}{'damaged':>16}{'with the guard':>18}{'broken by it':>14}",
    ]
    for name, result in found["scenarios"].items():
        lines.append(
            f"{name + ' ' + TITLES[name]:40}{result['damaged']:>8} / {result['ran']:<5}"
            f"{result['guarded damaged']:>10} / {result['guarded ran']:<5}{result['broken']:>14}"
        )
    for kind, result in found["run"].items():
        lines.append(f"forward in {kind}: {result['same']} of {result['ran']} as without the guard")
    for row in rows:
        for kind, problem in row.get("run", {}).items():
            if problem not in (None, "same"):
                lines.append(f"  {row['model_type']} forward {kind}: {problem}")
        for name, results in row.get("scenarios", {}).items():
            guarded, stock = results.get("guard", {}), results.get("stock", {})
            for path, problem in list((guarded.get("damaged") or {}).items())[:2]:
                lines.append(f"  {row['model_type']} {name} {path}: {problem}")
            if "error" in guarded and "error" not in stock:
                lines.append(f"  {row['model_type']} {name} fails with the guard only: {guarded['error']}")
    lines += [f"  not built: {name}: {reason}" for name, reason in found["not built"].items()]
    return "\n".join(lines)


_HEAD = """\
# Coverage of transformers' architectures

What `tools/zoo_survey --markdown` prints. Config classes are shrunk and their base models built, with and
without the guard, through six ways of building or loading that damage position tables. Every table that a
model stores, and cos and sin as its rotary modules return them up to position 4,095, is compared with a
clean FP32 model on CPU.

*full*: own tables, q and k rotated in FP32. *pinned*: the stock computation on tables that stay as rebuilt
in FP32 on CPU. A scenario counts where it runs without the guard as well: what fails there (a weight
initialised after zero.Init has partitioned it, for example) fails with the guard, too.

Where a release has more config classes than are counted here, these are a random sample of them, together
with one architecture for each known way of holding positions."""


def markdown(rows: list[Row]) -> str:
    """Return docs/coverage.md: a section for each version pair among ``rows``."""
    sections = [_HEAD]
    for pair in sorted({row["pair"] for row in rows}, reverse=True):
        sections.append(_section(pair, [row for row in rows if row["pair"] == pair]))
    return "\n\n".join(sections)


def _section(pair: str, rows: list[Row]) -> str:
    found = counts(rows)
    transformers, deepspeed = pair.split(" + ")
    lines = [
        f"## transformers {transformers}, DeepSpeed {deepspeed}",
        "",
        f"{found['architectures']} config classes surveyed; {found['built']} could be built, of which "
        f"{found['with position tables']} hold position tables: "
        + ", ".join(f"{count} {kind}" for kind, count in found["protection"].most_common())
        + ".",
        "",
        "| scenario | damaged without the guard | damaged with it | fail only with it |",
        "|---|---|---|---|",
    ]
    for name, result in found["scenarios"].items():
        lines.append(
            f"| {name}: {TITLES[name]} | {result['damaged']} of {result['ran']} | "
            f"{result['guarded damaged']} of {result['guarded ran']} | {result['broken']} |"
        )
    fp32, bf16 = found["run"]["fp32"], found["run"]["bf16"]
    lines += [
        "",
        f'Forward, where a simple input suffices: FP32 results with `tables="fp32"` identical to the bit for '
        f"{fp32['same']} of {fp32['ran']}; after `.to(bfloat16)` {bf16['same']} of {bf16['ran']} run with "
        "the same dtypes.",
    ]
    lines += ["", "| architecture | position tables | protection |", "|---|---|---|"]
    for row in rows:
        if row["status"] == "built" and row["tables"]:
            names = ", ".join(f"`{name}`" for name in row["names"][:4])
            lines.append(f"| {row['model_type']} | {row['tables']}: {names} | {_protection(row)} |")
    reasons = Counter(reason for reason in found["not built"].values())
    lines += ["", "Could not be built:", "", "| reason | architectures |", "|---|---|"]
    for reason, _ in reasons.most_common():
        names = ", ".join(name for name, why in found["not built"].items() if why == reason)
        lines.append(f"| {reason.replace('|', '/')} | {names} |")
    return "\n".join(lines)
