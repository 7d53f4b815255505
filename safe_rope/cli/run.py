"""`safe-rope run`: start a training script as it is, and guard every Python process that it starts.

The command replaces this process (exec): signals, stdin, the terminal and the exit status are the command's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from safe_rope.integrations import run_report
from safe_rope.integrations.options import TABLES, Options, read

_VALUED = ("--tables", "--report")


class _Command(click.Command):
    """Options, then ``--``, then the command as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        ctx.meta["safe_rope.command"] = args[split + 1 :]
        plain = [
            arg
            for before, arg in zip(["", *args], args[:split], strict=False)
            if not arg.startswith("-") and before not in _VALUED
        ]
        if plain:
            raise click.ClickException(f"write -- before the command: safe-rope run -- {' '.join(plain)} ...")
        try:
            return super().parse_args(ctx, args[:split])
        except click.UsageError as error:
            raise click.ClickException(error.format_message()) from error


@click.command("run", cls=_Command, options_metavar="[OPTIONS] -- COMMAND...")
@click.option("--strict/--no-strict", default=None, help="Fail if a position module cannot be protected.")
@click.option("--tables", type=click.Choice(TABLES), help="What cos and sin are.  [default: exact]")
@click.option(
    "--autocast/--no-autocast",
    default=None,
    help="deepspeed.initialize is safe_rope.initialize: torch_autocast corrected.",
)
@click.option("--report", metavar="FILE", help="Rank 0 writes there, as JSON, what was protected.")
@click.option(
    "--print-env",
    type=click.Choice(("sh", "file")),
    is_flag=False,
    flag_value="sh",
    help="Print the environment that does the same, and run nothing: for eval in a shell (the default), "
    "or as lines of a file (--print-env=file).",
)
@click.pass_context
def command(context: click.Context, /, print_env: str | None, **given: Any) -> None:
    """Guard an unmodified training script, in every process that it starts.

    COMMAND is what you would type without safe-rope: torchrun, deepspeed, accelerate launch, python ...
    For a Python script `python -m safe_rope [OPTIONS] train.py ...` is the same.
    An option that is left out is what SAFE_ROPE_TABLES, _STRICT, _AUTOCAST and _REPORT say.
    Exit status: the command's; 2 if it could not be started.
    """
    arguments = context.meta["safe_rope.command"]
    if given["report"]:
        given["report"] = os.path.abspath(given["report"])
    asked = {name: value for name, value in given.items() if value is not None}
    options = replace(read(os.environ), **asked, run=None)
    if print_env:
        if arguments:
            raise click.ClickException("--print-env runs nothing; leave the command out")
        for name, value in options.environment(os.environ).items():
            click.echo(f"export {name}={shlex.quote(value)}" if print_env == "sh" else f"{name}={value}")
        return
    if not arguments:
        raise click.ClickException(
            "give a command after --: safe-rope run -- torchrun --nproc_per_node 2 train.py"
        )
    _replace_process(options, arguments)


def _replace_process(options: Options, arguments: list[str]) -> None:
    program = shutil.which(arguments[0])
    if program is None:
        found = os.path.exists(arguments[0])
        raise click.ClickException(f"{arguments[0]}: {'not executable' if found else 'command not found'}")
    run = uuid.uuid4().hex
    environment = {**os.environ, **replace(options, run=run).environment(os.environ)}
    with _reported(options.report, run, arguments):
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execve(program, arguments, environment)
        except OSError as error:
            raise click.ClickException(f"{arguments[0]}: cannot be run: {error.strerror or error}") from error


@contextlib.contextmanager
def _reported(path: str | None, run: str, arguments: list[str]) -> Iterator[None]:
    """Write the report of a run that begins; if it does not, the file holds again what it held before."""
    if path is None:
        yield
        return
    before: bytes | None = None
    try:
        run_report.check(path)
        with contextlib.suppress(OSError):
            before = Path(path).read_bytes()
        run_report.begin(path, run, arguments)
    except OSError as error:
        said = f"{path}: {error.strerror}" if error.strerror else str(error)  # ours name the path
        raise click.ClickException(f"the report cannot be written: {said}") from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path) if before is None else Path(path).write_bytes(before)
        raise


def python_command(original: list[str], script: list[str]) -> list[str]:
    """Return the ``safe-rope run`` arguments that ``python -m safe_rope ...`` stands for.

    Args:
        original: `sys.orig_argv`: the interpreter, its options, ``-m safe_rope``, and ``script``.
        script: what follows: options of ``run``, then a script or ``-m module``, then its arguments.
    """
    options: list[str] = []
    rest = list(script)
    while rest and rest[0].startswith("--"):
        takes_value = rest[0] in _VALUED
        options += rest[: 1 + takes_value]
        del rest[: 1 + takes_value]
    if not rest:
        return ["run", *options]
    return ["run", *options, "--", sys.executable, *_interpreter_options(original, script), *rest]


def _interpreter_options(original: list[str], script: list[str]) -> list[str]:
    *options, last = original[1 : len(original) - len(script)]
    last = options.pop() if last == "safe_rope" else last.removesuffix("safe_rope")
    kept = last.removesuffix("m")  # python -um safe_rope
    return [*options, kept] if kept != "-" else options


def check_interpreter(flags: Any) -> None:
    """Refuse a Python that will not look at PYTHONPATH.

    Raises:
        click.ClickException: it was started with -E, -I or -S.
    """
    if flags.ignore_environment or flags.no_site:
        raise click.ClickException(
            "Python's options -E, -I and -S keep safe-rope from starting; leave them out"
        )
