"""tools/quality: runs _quality.py in the environment of a version pair."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _commands import ENVIRONMENT_HELP, named_pair
from _environment import Environment, pairs
from _process import ToolError, exit_on_sigterm, run, say

SCRIPT = Path(__file__).resolve().parent / "laboratory/quality/__init__.py"
LIMIT = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/quality",
        description="Train a small Llama to recall a token from a distance, then load and train it with the\n"
        "tables that each load path leaves, stock and guarded: accuracy and perplexity. About five minutes.",
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", metavar="NAME", help=f"{', '.join(pair.name for pair in pairs())}")
    parser.add_argument("--seed", default="0", metavar="N", help="of the model and its data")
    parser.add_argument("--stride", default="16", metavar="N", help="positions from token to token: 16 or 1")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="Markdown, or JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw it (.png, .svg)")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep results there, and reuse them")
    options = parser.parse_args()
    command: list[str | Path] = [SCRIPT, "--seed", options.seed, "--stride", options.stride]
    command += ["--format", options.format]
    for name in ("plot", "keep"):
        if getattr(options, name):
            command += [f"--{name}", getattr(options, name).absolute()]
    exit_on_sigterm()
    try:
        environment = Environment(named_pair(options.pair))
        with environment.ready():
            return run([environment.python, *command], env=environment.variables(), limit=LIMIT)
    except ToolError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
