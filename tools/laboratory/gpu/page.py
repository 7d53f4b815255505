"""Write docs/gpu.md from the records of `tools/lab gpu`, docs/data/gpu-*.json."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

TITLE = """\
# On a GPU

`tools/lab gpu --out DIR` runs everything that needs a CUDA device and writes `DIR/record.json`. As
`docs/data/gpu-NAME.json` it is a record, and `tools/lab gpu --page` makes this page from all of them. A part
that stands under "not ended" ran out of the time that the machine was there for; what it had found stands
beside it.
"""


def page(records: dict[str, dict[str, Any]]) -> str:
    """Return the page as Markdown, a section for each record by its name."""
    lines = [TITLE]
    for name, record in records.items():
        lines += [*_machine(name, record), ""]
        for part, (title, write) in SECTIONS.items():
            if part in record:
                lines += [f"### {title}", "", *write(record[part]), ""]
        if record.get("not ended"):
            lines += [
                "### Not ended",
                "",
                *(_prose(f"- {line}").replace("\n", "\n  ") for line in record["not ended"]),
                "",
            ]
    return "\n".join(lines)


def _prose(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _columns(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"


def _machine(name: str, record: dict[str, Any]) -> Iterator[str]:
    there = record["there"]
    packages = ("torch", "triton", "transformers", "deepspeed", "liger-kernel")
    found = ", ".join(f"{package} {there[package]}" for package in packages if there.get(package))
    yield f"## {', '.join(there['devices'])}"
    yield ""
    yield _prose(f"{found}, CUDA {there['cuda']}, {there['cpus']} cores; the [record](data/{name}.json).")


def _tests(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from _columns("what", "passed", "failed")
    for name, counts in found.items():
        yield f"| {name} | {counts['tests'] - counts['failed']} | {counts['failed']} |"


def _rotation(found: dict[str, Any]) -> Iterator[str]:
    """Rows of `tools/lab bench application`: the kernel, against a copy of the same bytes and the others."""
    yield _prose(
        "Device time, the best of twenty turns, with the cache emptied before each. The copy is of the same "
        "bytes, and the target is 1.15 of it. Liger-Kernel rotates in BF16 and in place; the target is 1.00."
    )
    yield ""
    yield from _columns(
        "q, k [batch, heads, length, head_dim]", "µs", "of a copy", "of Liger-Kernel", "of transformers"
    )
    rows = {(row["what"], row["against"]): row for row in found["application"]}
    for (what, against), row in rows.items():
        if against != "a device copy":
            continue
        shape = what.removeprefix("Triton, ")
        liger, stock = rows.get((what, "Liger-Kernel")), rows[f"eager, {shape}", "transformers"]
        of_liger = f"{liger['ratio']:.2f}" if liger else ""
        ratios = f"{row['ratio']:.2f} | {of_liger} | {stock['ratio']:.2f}"
        yield f"| {shape} | {1e6 * row['ours']:.1f} | {ratios} |"


def _lookups(found: dict[str, Any]) -> Iterator[str]:
    """Rows of `tools/lab bench tables`."""
    ratios = [row["ratio"] for row in found["tables"] if "positions" in row["what"]]
    yield _prose(
        f"Cos and sin of one position to 32,768, contiguous, packed and at random, take {min(ratios):.2f} to "
        f"{max(ratios):.2f} of the time of transformers' rotary forward, which launching takes most of."
    )


def _launches(found: dict[str, Any]) -> Iterator[str]:
    yield "Four layers, BF16, twelve tokens."
    yield ""
    yield from _columns("model", "stock", "guarded")
    for name in _models(found):
        stock, guarded = (found[f"{name}, {kind}"]["kernels"] for kind in ("stock", "guarded"))
        yield f"| {name} | {stock} | {guarded} |"


def _memory(found: dict[str, int]) -> Iterator[str]:
    most = max(found[f"{name}, guarded"] - found[f"{name}, stock"] for name in _models(found))
    yield _prose(
        f"{', '.join(_models(found))}: a guarded forward takes {max(most, 0) / 1e6:.1f} MB more than the "
        "stock one at most. These are the tables of a frequency on the device, which all layers share."
    )


def _models(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.partition(", ")[0] for key in found))


def _waits(found: dict[str, str]) -> Iterator[str]:
    waiting = [name for name, said in found.items() if said != "no"]
    said = ", ".join(waiting) or "none of them"
    yield _prose(f"{', '.join(_models(found))}: a forward waits for the device in {said}.")


def _graphs(found: dict[str, Any]) -> Iterator[str]:
    differing = [name for name, same in found.items() if same is not True]
    said = f"all but {', '.join(differing)}" if differing else ", ".join(found)
    yield f"A captured forward gives the bits of the forward itself: {said}."


def _outputs(found: dict[str, Any]) -> Iterator[str]:
    yield _prose(
        "How far outputs are from those of the stock model in FP32 on the CPU, as a share of the largest. "
        "Random weights, two layers."
    )
    yield ""
    yield from _columns("model", "FP32, stock", "FP32, guarded", "BF16, stock", "BF16, guarded")
    columns = [f"{kind}, {dtype}" for dtype in ("float32", "bfloat16") for kind in ("stock", "guarded")]
    for name, row in found.items():
        if isinstance(row, dict):
            yield f"| {name} | {' | '.join(f'{row[column]:.1e}' for column in columns)} |"
    left_out = [name for name, row in found.items() if not isinstance(row, dict)]
    if left_out:
        yield ""
        yield f"Not measured: {', '.join(left_out)}."


def _decoding(found: dict[str, Any]) -> Iterator[str]:
    yield _prose(
        "Times as ratios to the stock model, medians over turns; in brackets those of a second stock model. "
        "The layers are a few hundred elements wide: what the program takes to launch is all there is."
    )
    yield ""
    yield from _columns("model", "level", "what", "batch", "stock, ms", "guarded", "operators")
    for row in found["rows"]:
        for case in row["cases"]:
            if "ratio" not in case:
                continue
            ratio = f"{case['ratio']:.3f} ± {case['off']:.3f} ({case['control']:.3f})"
            level = "pinned" if row.get("pinned") else "fully"
            operators = "{} / {}".format(*case["operators"])
            yield (
                f"| {row['model_type']} | {level} | {case['what']} | {case['batch']} | "
                f"{case['stock_ms']:.2f} | {ratio} | {operators} |"
            )


def _training(found: dict[str, Any]) -> Iterator[str]:
    row, *controls = found["training"]
    others = ", ".join(f"{control['ratio']:.3f}" for control in controls)
    yield _prose(
        f"A Llama of two layers, 512 wide: {1e3 * row['ours']:.2f} ms with the guard, "
        f"{1e3 * row['other']:.2f} ms without, {row['ratio']:.3f}; three that are without it are at {others}."
    )


def _zero(found: dict[str, Any]) -> Iterator[str]:
    stages = {name: row for name, row in found.items() if name.startswith("stage")}
    losses = {tuple(row["losses"]) for row in stages.values() if isinstance(row, dict)}
    same = "the same losses" if len(losses) == 1 else f"losses {sorted(losses)}"
    fine = all(isinstance(row, dict) and row["audit"] for row in stages.values())
    said = (
        f"{', '.join(stages)} give {same}, and the audit says {'ok' if fine else 'something is not right'}."
    )
    yield _prose(f"{found['ranks']} rank by NCCL, a guarded Llama in BF16, two steps. {said}")


def _autocast(found: dict[str, Any]) -> Iterator[str]:
    stages = {name: row for name, row in found.items() if name.startswith("stage")}
    yield _prose(
        "The engine of `safe_rope.initialize`, three steps in BF16 of the same Llama: how far the loss and "
        "the gradients are from DDP's under torch.autocast, at most, as shares."
    )
    yield ""
    yield from _columns("ZeRO", "loss", "gradients")
    for name, row in stages.items():
        cells = [f"{row[key]:.1e}" for key in ("loss", "gradients")] if isinstance(row, dict) else [row, ""]
        yield f"| {name} | {' | '.join(cells)} |"


def _damage(found: dict[str, Any]) -> Iterator[str]:
    yield "Models with position tables that the load path damages, without the guard and with it."
    yield ""
    yield from _columns("load path", "models", "damaged", "with the guard")
    for path, row in found.items():
        yield f"| {path} | {row['models']} | {row['stock']} | {row['guard']} |"


SECTIONS = {
    "tests": ("Tests", _tests),
    "application": ("The rotation of q and k", _rotation),
    "tables": ("Looking positions up", _lookups),
    "launches": ("Kernels that a forward launches", _launches),
    "memory": ("Memory", _memory),
    "decode": ("Whole models", _decoding),
    "training": ("A training step", _training),
    "waits": ("Waiting for the device", _waits),
    "graphs": ("CUDA graphs", _graphs),
    "zero": ("ZeRO", _zero),
    "autocast": ("torch.autocast on ZeRO", _autocast),
    "loads": ("Position tables after a load", _damage),
    "outputs": ("Outputs", _outputs),
}
"""The heading of each part and what writes it, in the order of the page."""
