"""`safe-rope audit`: which load paths damage position tables, by how much, what the guard does."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from safe_rope._audit.command.job import DTYPES, Job, choose_dtype, load_deepspeed_config, load_model_config
from safe_rope._audit.command.outcome import Outcome
from safe_rope._audit.command.process import measure
from safe_rope._audit.report import Verdict
from safe_rope._base.files import write_atomically
from safe_rope.cli._progress import following
from safe_rope.errors import ConfigError, MissingDependencyError

LONGEST = 2**31 - 1
PLOTS = (".png", ".svg", ".pdf")
UNKNOWN = 3
"""The exit status if nothing is known to be damaged, and some tables cannot be judged."""


def read_positions(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Read the option ``--positions``."""
    if value is None:
        return ()
    try:
        found = sorted({int(item) for item in value.split(",")})
    except ValueError:
        raise click.BadParameter(f"expected integers such as 0,4095,100000, got {value!r}") from None
    if not 0 <= found[0] <= found[-1] <= LONGEST:
        raise click.BadParameter(f"positions go from 0 to {LONGEST}, got {value!r}")
    return tuple(found)


@click.command("audit")
@click.argument("model", metavar="MODEL")
@click.option("--deepspeed", metavar="FILE", help="The DeepSpeed config that the model is trained with.")
@click.option(
    "--dtype",
    type=click.Choice(tuple(DTYPES)),
    help="What the model is loaded in and cast to (default: DeepSpeed's, the config's, or bfloat16).",
)
@click.option("--positions", callback=read_positions, metavar="0,1,…", help="Measure at these positions.")
@click.option("--max", "longest", type=click.IntRange(1, LONGEST), metavar="N", help="Measure below N.")
@click.option("--guard", is_flag=True, help="Judge the guarded model: exit 1 only if that is damaged.")
@click.option("--path", "judged", multiple=True, metavar="PART", help="Judge the load paths named like that.")
@click.option("--strict", is_flag=True, help="Exit 1 also if some tables cannot be judged.")
@click.option("--format", "style", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw the error against the position (.png, .svg or .pdf).")
@click.option("--dump", metavar="FILE", help="Write the tables as safetensors, for safe-rope compare.")
@click.option("--quiet", "-q", is_flag=True, help="The report and errors only.")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Measure the position tables of a model on every load path, stock and inside safe_rope.guard().

    MODEL is a checkpoint folder, a config.json, or a name in the local Hugging
    Face cache; no weights are read. A skeleton of the model, with one
    layer of each kind, is measured against float64 with the installed versions. It goes through the load
    paths that the DeepSpeed config implies, or without one through those of transformers alone.

    Exit status: 0 the tables are correct, 1 some are damaged, 2 an error, 3 some cannot be judged.
    """
    if options["positions"] and options["longest"]:
        raise click.UsageError("give --positions or --max, not both")
    plot, dump = (_target(name, options) for name in ("plot", "dump"))
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "--plot needs matplotlib, which is not installed; "
            'install the extra: pip install "safe-rope[plot]"'
        )
    model = load_model_config(options["model"])
    deepspeed = None if options["deepspeed"] is None else load_deepspeed_config(options["deepspeed"])
    require("transformers", *([] if deepspeed is None else ["deepspeed"]))
    dtype = choose_dtype(options["dtype"], model, deepspeed)
    job = Job(
        name=_name(options["model"], model),
        model=model,
        deepspeed=deepspeed,
        dtype=dtype,
        positions=options["positions"],
        longest=options["longest"],
        dump=dump is not None,
        judged=options["judged"],
    )

    tables = b""

    def keep_tables(folder: Path) -> None:
        nonlocal tables
        tables = (folder / "dump.safetensors").read_bytes() if dump is not None else b""

    with following(options["quiet"]) as listen:
        outcome: Outcome = measure(job, listen, keep_tables)
    _print(outcome, options["style"])  # first: files may fail
    if dump is not None:
        write_atomically(str(dump), tables)
    if plot is not None:
        from safe_rope._audit.command.plot import draw

        draw(outcome, plot)
    context.exit(status_of(outcome.verdict(guarded=options["guard"]), options["strict"]))


def status_of(verdict: Verdict, strict: bool) -> int:
    """The exit status that says what was found."""
    return {"ok": 0, "damaged": 1, "unknown": 1 if strict else UNKNOWN}[verdict]


def _name(path: str, model: dict[str, Any]) -> str:
    given = model.get("_name_or_path")
    return str(given) if isinstance(given, str) and given else path


def _target(name: str, options: dict[str, Any]) -> Path | None:
    """Refuse, before anything is measured, a file that cannot be written or that holds something else."""
    path: str | None = options[name]
    if path is None:
        return None
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--{name} {path}: expected a file in a folder that exists")
    if not os.access(target.absolute().parent, os.W_OK):
        raise ConfigError(f"--{name} {path}: the folder cannot be written to")
    if name == "plot" and target.suffix not in PLOTS:
        raise ConfigError(f"--plot {path}: expected a name that ends in {', '.join(PLOTS)}")
    model = Path(options["model"])
    inputs = [model, model / "config.json", *([Path(options["deepspeed"])] if options["deepspeed"] else [])]
    if any(file.exists() and target.exists() and file.samefile(target) for file in inputs):
        raise ConfigError(f"--{name} {path}: that is a config to read; name another file")
    if name == "dump" and options["plot"] and Path(options["plot"]).absolute() == target.absolute():
        raise ConfigError(f"--dump {path}: the plot goes there; name another file")
    return target


def require(*packages: str) -> None:
    """Refuse, before a process is started, what the installed packages cannot do."""
    missing = [name for name in ("torch", *packages) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"this needs {', '.join(missing)}, not installed here; "
            'install the training extra: pip install "safe-rope[train]"'
        )


def _print(outcome: Outcome, style: str) -> None:
    if style == "json":
        click.echo(json.dumps(outcome.to_dict(), indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(outcome.text())
    text.highlight_regex(r"\bdamaged\b", "bold red")
    text.highlight_regex(r"\bok\b", "green")
    Console(file=sys.stdout, soft_wrap=True).print(text, highlight=False)
