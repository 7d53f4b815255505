"""How far a trainer's rotated q and k are from those of an inference engine, for each option of the guard.

A Llama of one layer in BF16 and an engine's rotary module rotate the same q and k. Engines that are not
installed are named; requirements/engines.txt says how to make an environment that has them.
"""

from __future__ import annotations

import argparse

from _process import ToolError

LIMIT = 600.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2048, help="to rotate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and positions (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    from laboratory.engines.engine import installed

    engines, absent = installed()
    for line in absent:
        print(line)
    if engines:
        try:
            from laboratory.engines.compare import table
        except ImportError as error:
            raise ToolError(f"tools/lab engines needs transformers 5 or later ({error})") from error
        print("\n".join(table(engines, options.tokens, options.seed)))
    return 0
