"""What the commands in this folder do, once a Python is found. Standard library only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _environment import Environment, Pair, newest_pair, pairs
from _process import ToolError, exit_on_sigterm, run, say
from _suite import WORKERS, checks, run_jobs, summary, tests

TOOLS = Path(__file__).resolve().parent
DEMO_LIMIT = 300.0
BENCH_LIMIT = 1200.0
GRID_LIMIT = 3600.0
WHEEL_LIMIT = 900.0

ENVIRONMENT_HELP = """\
The environment is made on the first call, in .venv of this repository or in the folder that
SAFE_ROPE_VENV names, from the pinned versions in requirements/. Later calls install nothing and need
no network, until a requirement file, pyproject.toml or the Python changes.
"""


def new_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tools/{command}",
        description=description,
        epilog=ENVIRONMENT_HELP + epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # tools/_launch.sh has acted on it already: this program runs on that Python.
    parser.add_argument("--python", metavar="X", help="the Python to use, 3.10 or newer (default: python3)")
    return parser


def demo(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "demo", "Show what DeepSpeed and dtype casts do to a Llama's position tables, and the guard."
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="a table, or one JSON object"
    )
    parser.add_argument("--pair", metavar="NAME", help=f"{', '.join(pair.name for pair in pairs())}")
    options = parser.parse_args(arguments)
    environment = Environment(named_pair(options.pair))
    with environment.ready():
        command: list[str | Path] = [environment.python, TOOLS / "_demo.py", "--format", options.format]
        return run(command, env=environment.variables(), limit=DEMO_LIMIT)


def bench_autocast(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "bench_autocast",
        "Train with torch.autocast on two ranks: how far from DDP, what travels and waits in which dtype.",
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="tables, or one JSON object"
    )
    parser.add_argument("--pair", metavar="NAME", help=f"{', '.join(pair.name for pair in pairs())}")
    parser.add_argument(
        "--parity",
        choices=["none", "covering", "grid"],
        default="covering",
        help="which combinations to compare with DDP; the grid takes half an hour (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    environment = Environment(named_pair(options.pair))
    with environment.ready():
        script = TOOLS / "_bench_autocast.py"
        chosen = ["--format", options.format, "--parity", options.parity]
        command: list[str | Path] = [environment.python, script, *chosen]
        limit = GRID_LIMIT if options.parity == "grid" else BENCH_LIMIT
        return run(command, env=environment.variables(), limit=limit)


def test(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "test",
        "Run ruff, mypy and the tests. Arguments that are not listed here go to pytest, and then the tests\n"
        "alone are run, in one process: tools/test -k guard",
    )
    parser.add_argument("--pair", metavar="NAME", help=f"{', '.join(pair.name for pair in pairs())}")
    parser.add_argument("--all", action="store_true", help="run the tests that are marked exhaustive, too: some minutes more")
    add_limits(parser)
    options, pytest_arguments = parser.parse_known_args(arguments)
    pair = named_pair(options.pair)
    checked = [] if pytest_arguments else list(checks(pair))
    tested = tests(pair, pytest_arguments, options.time_limit, options.jobs, everything=options.all)
    ended = run_jobs(checked, [tested])
    return summary(ended) if len(ended) > 1 else ended[0].status


def matrix(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "matrix",
        "Run every test in the environment of each version pair, and ruff and mypy in the newest.",
        "\nArguments after -- go to pytest: tools/matrix transformers-4.36.2 -- -k guard\n",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="only what a release can change, on every pair but the newest, which tools/test uses",
    )
    add_limits(parser)
    parser.add_argument("pair", nargs="*", help=f"default: all of {', '.join(pair.name for pair in pairs())}")
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])

    newest = newest_pair()
    chosen = [named_pair(name) for name in options.pair] or pairs()
    if options.older:
        chosen = [pair for pair in chosen if pair != newest]
    pytest_arguments = arguments[split + 1 :]
    checked = list(checks(newest)) if newest in chosen and not pytest_arguments else []
    tested = [
        tests(pair, pytest_arguments, options.time_limit, options.jobs, everything=not options.older)
        for pair in chosen
    ]
    return summary(run_jobs(checked, tested))


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time-limit",
        type=float,
        default=5400,
        metavar="S",
        help="seconds for the tests of a pair (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=WORKERS,
        metavar="N",
        help="processes that share the tests (default: %(default)s)",
    )


def wheel(arguments: Sequence[str]) -> int:
    parser = new_parser("wheel", "Build the wheel; check it in a clean environment and with torch.")
    parser.parse_args(arguments)
    environment = Environment(newest_pair())
    with environment.ready():
        command = [environment.python, TOOLS / "_wheel_check.py"]
        return run(command, env=environment.variables(), limit=WHEEL_LIMIT)


def named_pair(name: str | None) -> Pair:
    """Return the pair of that name; the newest that the running Python can have where none is given."""
    if name is None:
        return newest_pair()
    for pair in pairs():
        if name in (pair.name, pair.name.removeprefix("transformers-")):
            return pair
    raise ToolError(f"no version pair {name!r}; there are {', '.join(pair.name for pair in pairs())}")


def main() -> int:
    exit_on_sigterm()
    commands = {
        "demo": demo,
        "test": test,
        "matrix": matrix,
        "wheel": wheel,
        "bench_autocast": bench_autocast,
    }
    try:
        return commands[sys.argv[1]](sys.argv[2:])
    except ToolError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
