"""Build the documentation site; a warning is an error. About a minute, and 167 MB in .venv-docs at first.

The packages in requirements/docs.txt are installed into an environment that also sees those of this one.
Later calls need no network.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from _environment import PIP, REQUIREMENTS, ROOT
from _process import ToolError, run, say

LIMIT = 900.0
BUILD_LIMIT = 300.0
ENVIRONMENT = ROOT / ".venv-docs"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="where the pages go (site/)")


def main(options: argparse.Namespace) -> int:
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "installed"
    requirements = REQUIREMENTS / "docs.txt"
    if not done.exists() or done.read_text() != requirements.read_text():
        say("installing what builds the site ...")
        _call(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
        packages = next(ENVIRONMENT.glob("lib/*/site-packages"))
        (packages / "pair.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _call(python, *PIP, "--quiet", "-r", requirements)
        done.write_text(requirements.read_text())
    build = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", options.output.absolute()]
    return run(build, cwd=ROOT, limit=BUILD_LIMIT)


def _call(*command: str | Path) -> None:
    status = run(list(command), limit=LIMIT)
    if status:
        raise ToolError(f"{' '.join(map(str, command))} ended with status {status}")
