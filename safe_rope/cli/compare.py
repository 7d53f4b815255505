"""`safe-rope compare`: whether two devices, dtypes, models or environments have the same position tables."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from safe_rope._audit.command.job import load_model_config, read_side
from safe_rope._audit.command.outcome import grouped, number
from safe_rope._audit.command.process import measure
from safe_rope._base.text import aligned, shortened, wrapped
from safe_rope.cli._progress import following
from safe_rope.cli.audit import LONGEST, read_positions, require

SCHEMA = "safe_rope.compare/2"
_HEADER = ("positions", "max ulp", "max rad", "at", "differs from", "beyond from", "module")
_NAME_WIDTH = 32


def _read_number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse what is no number: nothing would be beyond it."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number, got nan")
    return value


_NUMBER: dict[str, Any] = {"type": click.FloatRange(min=0), "callback": _read_number}


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--model", metavar="MODEL", help="What devices and dtypes are compared on (default: Llama 2).")
@click.option(
    "--tables",
    type=click.Choice(("stock", "exact")),
    default="stock",
    show_default=True,
    help="The model's own tables, or those of safe_rope.",
)
@click.option("--positions", callback=read_positions, metavar="0,1,…", help="Compare at these positions.")
@click.option("--max", "longest", type=click.IntRange(1, LONGEST), metavar="N", help="Compare below N.")
@click.option("--tolerance", **_NUMBER, metavar="RAD", help="The largest angle allowed.")
@click.option("--ulp", **_NUMBER, metavar="N", help="The largest difference allowed.")
@click.option("--format", "style", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.option("--quiet", "-q", is_flag=True, help="The report and errors only.")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
@click.pass_context
def command(context: click.Context, /, a: str, b: str, **options: Any) -> None:
    """Compare the cos and sin tables of A and B.

    Each is a device (cpu, cuda:0), a dtype (bf16: the model cast to it), or a model (a checkpoint folder or a
    config.json). It can also be a dump that safe-rope audit --dump wrote, here or elsewhere. Without
    --tolerance and --ulp, the tables may differ by what FP32 arithmetic explains: 2**-20 of a phase. Angles
    are known modulo a full turn. The lengths of the pairs count as well, relative to what they are. Which
    channels make a pair, halves or neighbours, is not compared.

    Exit status: 0 within the tolerance, 1 beyond it or something has no counterpart, 2 an error.
    """
    if options["positions"] and options["longest"]:
        raise click.UsageError("give --positions or --max, not both")
    model = None if options["model"] is None else load_model_config(options["model"])
    require("transformers")
    asked = {name: options[name] for name in ("positions", "longest", "tables", "tolerance", "ulp")}
    asked["sides"] = [read_side(a, model), read_side(b, model)]
    with following(options["quiet"]) as listen:
        found = measure(asked, listen)
    differs = [module["name"] for module in found["modules"] if module["first_beyond"] is not None]
    same = not differs and not found["not_compared"]
    if options["style"] == "json":
        said = {"schema": SCHEMA, "a": a, "b": b, "ok": same, **found}
        click.echo(json.dumps(said, indent=2, allow_nan=False))
    else:
        click.echo(_text(a, b, found, len(differs)))
    context.exit(0 if same else 1)


def _text(a: str, b: str, found: dict[str, Any], differ: int) -> str:
    first, second = found["environments"]
    lines = wrapped(f"{a} ({first.get('model', 'unnamed')}) and {b} ({second.get('model', 'unnamed')})")
    for name in sorted((first.keys() | second.keys()) - {"model"}):
        if first.get(name) != second.get(name):
            lines += wrapped(f"{name}: {first.get(name, 'none')} and {second.get(name, 'none')}")
    rows = [
        (
            grouped(module["positions"]),
            number(module["max_ulp"]),
            number(module["max_radians"]),
            grouped(module["at"]),
            grouped(module["first_difference"]),
            grouped(module["first_beyond"]),
            shortened(module["name"], _NAME_WIDTH),
        )
        for module in found["modules"]
    ]
    lines += ["", *aligned(rows, _HEADER), ""]
    lines += [line for said in found["not_compared"] for line in wrapped(f"not compared: {said}")]
    count = len(found["modules"])
    if differ:
        verdict = f"DIFFERENT: {differ} of {count} tables differ beyond the tolerance"
    else:
        verdict = f"SAME: {count} of {count} tables within the tolerance"
    left = len(found["not_compared"])
    return "\n".join([*lines, f"{verdict}; {left} not compared" if left else verdict])
