"""What tools/demo, tools/test and tools/lab do, once a Python is found. Standard library only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import _wide
from _environment import DEFAULTS, ROOT, Environment, Pair, newest_pair, pairs
from _process import ToolError, exit_on_sigterm, run, say
from _suite import WORKERS, checks, run_jobs, summary, tests

TOOLS = Path(__file__).resolve().parent

ENVIRONMENT_HELP = """\
The environment is made on the first call, in .venv of this repository or in the folder that
SAFE_ROPE_VENV names, from the pinned versions in requirements/. Later calls install nothing and need
no network, until a requirement file, pyproject.toml or the Python changes.
"""
PLACE_HELP = """\
where it runs, with every command:
  --pair NAME  in the environment of this version pair (default: the newest)
  --python X   with this Python, 3.10 or newer (default: python3)
  --here       on that Python as it is, whatever it has installed; no environment is made

"""


def new_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/test" if command == "test" else f"tools/lab {command}",
        description=description,
        epilog=ENVIRONMENT_HELP + epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # tools/_launch.sh has acted on it already: this program runs on that Python.
    parser.add_argument("--python", metavar="X", help="the Python to use, 3.10 or newer (default: python3)")
    return parser


def demo(arguments: Sequence[str]) -> int:
    return lab(["demo", *arguments])


def lab(arguments: Sequence[str]) -> int:
    """Run a command of the laboratory, in the environment of a version pair or on this Python as it is."""
    from laboratory.__main__ import parser

    if arguments[:1] == ["matrix"]:
        return matrix(arguments[1:])
    place = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    place.add_argument("--pair")
    place.add_argument("--python")
    place.add_argument("--here", action="store_true")
    chosen, rest = place.parse_known_args(arguments)
    own = {"matrix": "run the tests in the environment of each version pair"}
    # A wrong argument and --help end here, before anything is installed.
    limit = parser(own, PLACE_HELP + ENVIRONMENT_HELP).parse_args(rest).limit
    if chosen.here:
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), *map(str, (TOOLS, ROOT, ROOT / "patches"))]
        variables = {**DEFAULTS, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return run([sys.executable, "-m", "laboratory", *rest], env=variables, limit=limit)
    environment = Environment(named_pair(chosen.pair))
    with environment.ready():
        variables = environment.variables() | {"PYTHONPATH": str(TOOLS)}
        return run([environment.python, "-m", "laboratory", *rest], env=variables, limit=limit)


def test(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "test",
        "Run ruff, mypy and the tests. Arguments that are not listed here go to pytest, and then the tests\n"
        "alone are run, in one process: tools/test -k guard",
    )
    parser.add_argument("--pair", metavar="NAME", help=f"{', '.join(pair.name for pair in pairs())}")
    parser.add_argument("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.add_argument(
        "--all", action="store_true", help="run the tests that are marked slow or exhaustive, too"
    )
    add_limits(parser)
    options, pytest_arguments = parser.parse_known_args(arguments)
    pair = named_pair(options.pair)
    checked = [] if pytest_arguments else list(checks(pair))
    slow = options.slow or options.all
    tested = tests(pair, pytest_arguments, options.time_limit, options.jobs, options.all, slow)
    ended = run_jobs(checked, [tested])
    return summary(ended) if len(ended) > 1 else ended[0].status


def matrix(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "matrix",
        "Run every test in the environment of each version pair, and ruff and mypy in the newest.",
        "\nArguments after -- go to pytest: tools/lab matrix transformers-4.36.2 -- -k guard\n",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="only what a release can change and is not slow, on every pair but the newest, "
        "which tools/test uses",
    )
    parser.add_argument("--slow", action="store_true", help="with --older: also what is slow")
    parser.add_argument(
        "--wide",
        action="store_true",
        help="instead: make, test and remove each environment of requirements/wide.txt that is not yet in "
        "docs/data/releases.jsonl; names are words of its lines then, as torch==2.4.1",
    )
    parser.add_argument("--again", action="store_true", help="with --wide: also those that work")
    parser.add_argument("--newest", action="store_true", help="instead: whatever is newest on the index")
    add_limits(parser)
    parser.add_argument("pair", nargs="*", help=f"default: all of {', '.join(pair.name for pair in pairs())}")
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])

    if options.wide or options.newest:
        jobs = options.jobs
        return _wide.wide(options.pair, options.again, jobs) if options.wide else _wide.newest(jobs)
    newest = newest_pair()
    chosen = [named_pair(name) for name in options.pair] or pairs()
    if options.older:
        chosen = [pair for pair in chosen if pair != newest]
    pytest_arguments = arguments[split + 1 :]
    checked = list(checks(newest)) if newest in chosen and not pytest_arguments else []
    everything = not options.older
    slow = everything or options.slow
    tested = [
        tests(pair, pytest_arguments, options.time_limit, options.jobs, everything, slow) for pair in chosen
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
    try:
        return {"demo": demo, "lab": lab, "test": test}[sys.argv[1]](sys.argv[2:])
    except ToolError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
