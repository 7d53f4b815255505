"""Write docs/reliability.md from the record of a run."""

from __future__ import annotations

from typing import Any

TITLE = """\
# Reliability

What people do to a library that they put under everything, tried many times over. Each try is compared with
plain torch, with the unguarded model in FP32, or with the process as it was before.

`tools/lab soak` makes the [record](data/reliability.json), and `tools/lab soak --page` this page from it. A
part is run alone with `--only`, with other draws by `--seed`, and with other counts by `--scale`.
`tools/lab upstream` runs the tests of DeepSpeed and transformers with an open guard and without.
"""
SAID = {
    "orders": """\
## Any order

Sequences of up to 25 steps. Guards are opened, and closed out of order, as decorators, in generators and
tasks. zero.Init is entered and left, methods are replaced by somebody else, models built and dropped. After
every step every global is what it must be.
""",
    "interrupts": """\
## Interrupts

KeyboardInterrupt and SIGTERM, half of them at places in safe_rope's code where Python runs handlers, half
at moments in time. Afterwards every global is the object that it was, no thread, process or mode is left, and
the next guard works.
""",
    "constructors": """\
## Constructors

Drawn calls of what zero.Init replaces, under a guard: dtypes, devices, memory formats, layouts, generators,
`out`, NumPy scalars, large integers, and arguments that are wrong. Each is compared with plain torch, or with
zero.Init alone where it leaves the dtype out.
""",
    "calls": """\
## Calls

Calls with random lengths for each kind of module, against the same model in FP32 without a guard. Memory is
that of the process, over the second half of the calls.
""",
    "guards": """\
## Guards

Guards opened and closed, with and without a model built inside.
""",
    "threads": """\
## Threads

Two guards with different options, each in a thread; a model compiled in one thread while another builds.
""",
    "processes": """\
## Processes

`safe-rope run` around scripts and launchers that end in every way. The exit status or the signal is the
command's, and the report is whole or absent.
""",
    "training": """\
## Save and resume

Training on two ranks at ZeRO 1, 2 and 3, saved and resumed with the guard, without it, and from one to the
other.
""",
}


def page(record: dict[str, Any]) -> str:
    """Return the page, with a section for each part of the record."""
    sections = [TITLE]
    for name, said in SAID.items():
        if name in record:
            sections.append(said)
            sections.append(table(record[name]))
            sections.append(made(record[name]))
    return "\n".join(sections)


def table(part: dict[str, Any]) -> str:
    rows = ["| what | tries | failures |", "|---|---|---|"]
    rows += [
        f"| {kind} | {entry['tries']:,} | {entry['failed']:,} |" for kind, entry in part["kinds"].items()
    ]
    text = "\n".join(rows) + "\n"
    if part["measured"]:
        rows = [
            "| measured | |",
            "|---|---|",
            *(f"| {name} | {shown(value)} |" for name, value in part["measured"].items()),
        ]
        text += "\n" + "\n".join(rows) + "\n"
    return text


def shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def made(part: dict[str, Any]) -> str:
    versions = part["versions"]
    share = "" if part["scale"] == 1 else f", {part['scale']:g} of the usual counts"
    return (
        f"Seed {part['seed']}{share}, {part['date']}, commit `{part['commit']}`: torch {versions['torch']},\n"
        f"transformers {versions['transformers']}, DeepSpeed {versions['deepspeed']}.\n"
    )
