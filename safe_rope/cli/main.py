"""The command's root: finds the subcommand's file and turns errors into one clear line."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from typing import Any

import click

from safe_rope.errors import SafeRopeError

# name -> (module, what --help of the root says); the modules of `scan`, `rule` and `run` never import torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "scan": ("safe_rope.cli.scan", "Find and fix source whose positions a lower dtype can round."),
    "rule": ("safe_rope.cli.rule", "Explain a rule of scan."),
    "audit": ("safe_rope.cli.audit", "Measure a model's position tables on every load path."),
    "compare": ("safe_rope.cli.compare", "Compare the tables of devices, dtypes, models or environments."),
    "patches": ("safe_rope.cli.patches", "List the architectures that are protected, and how."),
    "run": ("safe_rope.cli.run", "Guard an unmodified training script in every process."),
    "env": ("safe_rope.cli.env", "Print what a bug report needs: versions, devices, settings."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="safe-rope", prog_name="safe-rope")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")
def cli() -> None:
    """Keep position embeddings exact: find the damage in source, measure it in models, prevent it in runs."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; exit 2 with one line on stderr for every error that is not a bug."""
    debug = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    try:
        status = cli.main(args=arguments, prog_name="safe-rope", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("error: interrupted", err=True)
        status = 2
    except click.ClickException as error:
        error.show()
        status = 2
    except (SafeRopeError, OSError) as error:
        if debug:
            traceback.print_exc()
        click.echo(f"error: {error}", err=True)
        status = 2
    sys.exit(status if isinstance(status, int) else 0)
