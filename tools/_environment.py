"""Virtual environments with pinned versions, made by venv and pip once and reused. Standard library only.

An environment belongs to a version pair, that is to one file ``requirements/transformers-*.txt``. Making
it takes three steps, each skipped while what it depends on is unchanged:

    packages   torch first (DeepSpeed's setup.py imports it), then the file; a change starts from nothing
    library    safe_rope itself, editable; repeated when pyproject.toml changes
    helper     the C++ helper that DeepSpeed compiles when it is first initialised, in a folder of ours

A step is recorded only when it is through, so an interrupted one is done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from _process import ToolError, run, say

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
BUILD_REQUIREMENTS = REQUIREMENTS / "build.txt"
LIMIT = 1800.0
"""Seconds for each call of pip, and for the helper."""

STEPS = {
    "packages": "installing torch, what DeepSpeed needs to build, and the rest",
    "library": "installing safe_rope, editable",
    "helper": "building DeepSpeed's C++ helper",
}
EXTENSIONS = "torch_extensions"
_building = threading.Lock()
# Bytecode is made when a module is imported: that of all that is installed takes two thirds of an install.
PIP = ("-m", "pip", "install", "--no-compile", "--no-input", "--disable-pip-version-check")
EXTRAS = "train,plot,test,lint"
BUILD_HELPER = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.comm.torch import build_shm_op
build_shm_op()
"""
# setuptools' import hook, by which an editable install is found, is nothing that a type checker follows.
NAME_SOURCES = """
import pathlib, sys, sysconfig
file = pathlib.Path(sysconfig.get_path("purelib"), "safe_rope_source.pth")
file.write_text("".join(f"{folder}\\n" for folder in sys.argv[1:]))
"""
DEFAULTS = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    # Ranks on this machine. Without it DeepSpeed 0.14 asks the program numactl, which may be missing.
    "LOCAL_SIZE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Pair:
    """A version of transformers and the DeepSpeed that is tested with it, for a range of Pythons."""

    name: str
    requirements: Path
    oldest_python: tuple[int, ...]
    newest_python: tuple[int, ...]

    @property
    def runs_here(self) -> bool:
        return self.oldest_python <= sys.version_info[:2] <= self.newest_python


def pairs() -> list[Pair]:
    """Return every version pair, newest first."""
    found = []
    for path in REQUIREMENTS.glob("transformers-*.txt"):
        header = re.match(r"# python: (\d+)\.(\d+) - (\d+)\.(\d+)\n", path.read_text())
        if header is None:
            raise ToolError(f"{path.name} must start with a line like '# python: 3.10 - 3.13'")
        numbers = tuple(map(int, header.groups()))
        found.append(Pair(path.stem, path, numbers[:2], numbers[2:]))
    return sorted(found, key=lambda pair: [int(part) for part in re.findall(r"\d+", pair.name)], reverse=True)


def newest_pair() -> Pair:
    """Return the newest version pair that exists for the running Python."""
    for pair in pairs():
        if pair.runs_here:
            return pair
    version = ".".join(map(str, sys.version_info[:2]))
    raise ToolError(f"no file in requirements/ is for Python {version}; name another one with --python")


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables for a program that runs in the virtual environment of a folder."""
    return {
        **DEFAULTS,
        **os.environ,
        # All environments of a user share DeepSpeed's own folder; two versions in it break each other.
        "TORCH_EXTENSIONS_DIR": str(folder / EXTENSIONS),
        "VIRTUAL_ENV": str(folder),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
    }


class Environment:
    """One version pair's virtual environment. ``with environment.ready():`` makes and holds it.

    The newest pair's lies in .venv or where SAFE_ROPE_VENV says, the others beside it.
    """

    def __init__(self, pair: Pair) -> None:
        main = Path(os.environ.get("SAFE_ROPE_VENV") or ROOT / ".venv").absolute()
        self.pair = pair
        self.folder = main if pair == newest_pair() else main.with_name(f"{main.name}-{pair.name}")
        self.python = self.folder / "bin" / "python"
        self._log = self.folder / "install.log"
        self._extensions = self.folder / EXTENSIONS
        self._lock = self.folder / ".safe-rope-lock"
        self._record = self.folder / "safe-rope-steps.json"

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a program that runs in here."""
        return variables(self.folder)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Install what is missing, then keep others from changing the environment while it is in use.

        Raises:
            ToolError: the environment cannot be made; says where the log is.

        """
        self._claim_folder()
        with self._lock.open("a") as lock:
            self._forget_killed_builds(lock)
            self._wait_for(lock, fcntl.LOCK_SH)
            while self._missing_steps():
                self._wait_for(lock, fcntl.LOCK_EX)
                self._install()
                # Not atomic, hence the loop: somebody else may get in between.
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield

    def _claim_folder(self) -> None:
        if not self.pair.runs_here:
            bounds = (self.pair.oldest_python, self.pair.newest_python)
            oldest, newest = (".".join(map(str, version)) for version in bounds)
            raise ToolError(f"{self.pair.name} needs Python {oldest} to {newest}; name one with --python")
        # The folder may be emptied later: never take one that something else made.
        foreign = self.folder.exists() and not self._lock.exists()
        if foreign and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ToolError(
                f"this tool did not make {self.folder}; remove it, or set SAFE_ROPE_VENV to a new one"
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def _forget_killed_builds(self, lock: IO[str]) -> None:
        """Remove what a program that was killed in a build has left: torch waits for ever for its lock."""
        # Where somebody uses the environment, the lock may be theirs.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(self._extensions.glob("*/lock")):
                say("DeepSpeed's C++ helper is half built; making it again")
                shutil.rmtree(self._extensions)

    def _wait_for(self, lock: IO[str], kind: int) -> None:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that uses {self.folder.name} ...")
            fcntl.flock(lock, kind)

    def _done(self) -> dict[str, str]:
        """Return the steps that are through, each with the digest of what it depended on."""
        try:
            done: dict[str, str] = json.loads(self._record.read_text())
        except (OSError, ValueError):
            return {}
        if not self._extensions.exists():
            done.pop("helper", None)
        return done if self.python.exists() else {}

    def _missing_steps(self) -> dict[str, str]:
        """Return the steps to take, in their order, each with a digest of what it depends on."""
        interpreter = [sys.version, os.path.realpath(sys.executable), str(self.folder)]
        files = [BUILD_REQUIREMENTS.read_text(), self.pair.requirements.read_text()]
        packages = _digest(*interpreter, *files)
        library = _digest(packages, str(ROOT), (ROOT / "pyproject.toml").read_text())
        done = self._done()
        wanted = {"packages": packages, "library": library, "helper": packages}
        return {step: digest for step, digest in wanted.items() if done.get(step) != digest}

    def _install(self) -> None:
        pip: list[str | Path] = [self.python, *PIP]
        pinned = self.pair.requirements
        torch = next(pin for pin in pinned.read_text().splitlines() if pin.startswith("torch=="))
        commands: dict[str, list[list[str | Path]]] = {
            "packages": [
                [sys.executable, "-m", "venv", self.folder],
                [*pip, "-r", BUILD_REQUIREMENTS, torch],
                # DeepSpeed is built from source and must see the torch that is installed.
                [*pip, "--no-build-isolation", "-r", pinned],
            ],
            "library": [
                [*pip, "--no-build-isolation", "-c", pinned, "-e", f"{ROOT}[{EXTRAS}]"],
                [self.python, "-c", NAME_SOURCES, ROOT, ROOT / "patches"],
            ],
            "helper": [[self.python, "-c", BUILD_HELPER]],
        }
        # Which steps are missing is asked again: whoever held the lock before may have done them.
        for step, digest in self._missing_steps().items():
            say(f"{self.folder.name}, with {self.pair.name}: {STEPS[step]}")
            started = time.monotonic()
            done = self._done()
            if step == "packages":
                self._clear()
                done = {}
            self._extensions.mkdir(exist_ok=True)
            # Building the library writes into its source folder, which all environments share.
            with _building if step == "library" else contextlib.nullcontext():
                for command in commands[step]:
                    self._logged(command)
            self._record.write_text(json.dumps(done | {step: digest}, indent=1))
            say(f"  done in {time.monotonic() - started:.0f} s")

    def _clear(self) -> None:
        if not all(map(importlib.util.find_spec, ("ensurepip", "venv"))):
            raise ToolError(
                f"{sys.executable} has no venv module; install it (often the package python3-venv)"
            )
        for entry in self.folder.iterdir():
            if entry != self._lock:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _logged(self, command: list[str | Path]) -> None:
        with self._log.open("a") as log:
            print("$", *command, file=log, flush=True)
            status = run(command, env=self.variables(), cwd=self.folder, limit=LIMIT, output=log)
        if status != 0:
            lines = list(filter(str.strip, self._log.read_text(errors="replace").splitlines()))
            reason = [line for line in lines if "error" in line.lower()] or lines
            program = Path(command[0]).name
            raise ToolError(
                f"{program} ended with status {status}: {reason[-1].strip()[:200]} (log: {self._log})"
            )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
