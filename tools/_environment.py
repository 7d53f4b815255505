"""Virtual environments with pinned versions, made once and reused. Standard library only.

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
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _process import ToolError, free_port, run, say

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
BUILD_REQUIREMENTS = REQUIREMENTS / "build.txt"
INSTALL_LIMIT = 1800.0
HELPER_LIMIT = 900.0
LOCK_NAME = ".safe-rope-lock"
STEPS_NAME = "safe-rope-steps.json"

# One process is enough for DeepSpeed to build what it needs.
BUILD_HELPER = """
import deepspeed
deepspeed.init_distributed("gloo", verbose=False)
"""


@dataclass(frozen=True)
class Pair:
    """A version of transformers and the DeepSpeed that is tested with it."""

    name: str
    requirements: Path
    oldest_python: tuple[int, int]
    newest_python: tuple[int, int]

    @property
    def runs_here(self) -> bool:
        return self.oldest_python <= sys.version_info[:2] <= self.newest_python

    def pin(self, package: str) -> str:
        """Return the line of the requirement file that pins a package."""
        for line in self.requirements.read_text().splitlines():
            if line.startswith(f"{package}=="):
                return line
        raise ToolError(f"{self.requirements.name} does not pin {package}; add a line '{package}==...'")


def pairs() -> list[Pair]:
    """Return every version pair, newest first."""
    found = []
    for path in REQUIREMENTS.glob("transformers-*.txt"):
        header = re.match(r"# python: (\d+)\.(\d+) - (\d+)\.(\d+)\n", path.read_text())
        if header is None:
            raise ToolError(f"{path.name} must start with a line like '# python: 3.10 - 3.13'")
        numbers = [int(number) for number in header.groups()]
        found.append(Pair(path.stem, path, (numbers[0], numbers[1]), (numbers[2], numbers[3])))
    return sorted(found, key=lambda pair: [int(part) for part in re.findall(r"\d+", pair.name)], reverse=True)


def newest_pair() -> Pair:
    """Return the newest version pair that exists for the running Python."""
    for pair in pairs():
        if pair.runs_here:
            return pair
    version = ".".join(map(str, sys.version_info[:2]))
    raise ToolError(f"no file in requirements/ is for Python {version}; name another one with --python")


def environment_folder(pair: Pair) -> Path:
    """Return where a pair's environment lies: the newest in .venv, the others beside it."""
    main = Path(os.environ.get("SAFE_ROPE_VENV") or ROOT / ".venv").absolute()
    return main if pair == newest_pair() else main.with_name(f"{main.name}-{pair.name}")


class Environment:
    """One version pair's virtual environment. ``with environment.ready():`` makes and holds it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.folder = environment_folder(pair)
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / "install.log"
        self.extensions = self.folder / "torch_extensions"

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a program that runs in here."""
        defaults = {
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            # Ranks on this machine. Without it DeepSpeed 0.14 asks the program numactl, which may be missing.
            "LOCAL_SIZE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        variables = {**defaults, **os.environ}
        # DeepSpeed's own folder is shared by all environments of a user; two versions in it break each other.
        variables["TORCH_EXTENSIONS_DIR"] = str(self.extensions)
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)])
        return variables

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Install what is missing, then keep others from changing the environment while it is in use.

        Raises:
            ToolError: the environment cannot be made; says where the log is.

        """
        self._claim_folder()
        with open(self.folder / LOCK_NAME, "a") as lock:
            self._forget_broken_helper(lock.fileno())
            self._lock(lock.fileno(), fcntl.LOCK_SH)
            while self._missing_steps():
                fcntl.flock(lock, fcntl.LOCK_UN)
                self._lock(lock.fileno(), fcntl.LOCK_EX)
                self._install()
                # Not atomic, hence the loop: somebody else may get in between.
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield

    def _forget_broken_helper(self, descriptor: int) -> None:
        """Have the helper built again if a program was killed in it: torch waits for ever for such a lock."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # somebody uses the environment: the lock may be theirs
        if any(self.extensions.glob("*/lock")):
            say("DeepSpeed's C++ helper is half built; making it again")
            self._record({step: digest for step, digest in self._done().items() if step != "helper"})

    def _lock(self, descriptor: int, kind: int) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that uses {self.folder.name} ...")
            fcntl.flock(descriptor, kind)

    def _claim_folder(self) -> None:
        if not self.pair.runs_here:
            oldest, newest = (
                ".".join(map(str, v)) for v in (self.pair.oldest_python, self.pair.newest_python)
            )
            raise ToolError(f"{self.pair.name} needs Python {oldest} to {newest}; name one with --python")
        # The folder may be emptied later: never take one that something else made.
        foreign = not self.folder.is_dir() or (
            any(self.folder.iterdir()) and not (self.folder / LOCK_NAME).exists()
        )
        if self.folder.exists() and foreign:
            raise ToolError(
                f"this tool did not make {self.folder}; remove it, or set SAFE_ROPE_VENV to a new one"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / LOCK_NAME).touch()

    def _wanted(self) -> dict[str, str]:
        """Return each step with a digest of what it depends on, in the order in which they are taken."""
        interpreter = [sys.version, os.path.realpath(sys.executable), str(self.folder)]
        files = [BUILD_REQUIREMENTS.read_text(), self.pair.requirements.read_text()]
        packages = _digest(*interpreter, *files)
        library = _digest(packages, str(ROOT), (ROOT / "pyproject.toml").read_text())
        return {"packages": packages, "library": library, "helper": packages}

    def _done(self) -> dict[str, str]:
        try:
            done = json.loads((self.folder / STEPS_NAME).read_text())
        except (OSError, ValueError):
            return {}
        return done if isinstance(done, dict) and self.python.exists() else {}

    def _record(self, done: dict[str, str]) -> None:
        unfinished = self.folder / f"{STEPS_NAME}.new"
        unfinished.write_text(json.dumps(done, indent=1))
        unfinished.replace(self.folder / STEPS_NAME)

    def _missing_steps(self) -> list[str]:
        done = self._done()
        return [step for step, digest in self._wanted().items() if done.get(step) != digest]

    def _install(self) -> None:
        steps = {"packages": self._packages, "library": self._library, "helper": self._helper}
        # Which steps are missing is asked again: whoever held the lock before may have done them.
        for step in self._missing_steps():
            started = time.monotonic()
            steps[step]()
            done = {} if step == "packages" else self._done()
            done[step] = self._wanted()[step]
            self._record(done)
            say(f"  done in {time.monotonic() - started:.0f} s")

    def _packages(self) -> None:
        version = ".".join(map(str, sys.version_info[:3]))
        say(f"making {self.folder.name} with Python {version}")
        for entry in self.folder.iterdir():
            if entry.name != LOCK_NAME:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode:
            raise ToolError(
                f"{sys.executable} has no venv module; install it (often the package python3-venv)"
            )
        self._logged(sys.executable, "-m", "venv", self.folder)
        say(f"installing {self.pair.pin('torch')} and what DeepSpeed needs to build")
        self._pip("-r", BUILD_REQUIREMENTS, self.pair.pin("torch"))
        say(f"installing {self.pair.pin('transformers')}, {self.pair.pin('deepspeed')} and the rest")
        # DeepSpeed is built from source and must see the torch that is installed.
        self._pip("--no-build-isolation", "-r", self.pair.requirements)

    def _library(self) -> None:
        say("installing safe_rope, editable")
        extras = f"{ROOT}[train,plot,test,lint]"
        self._pip("--no-build-isolation", "-c", self.pair.requirements, "--editable", extras)

    def _helper(self) -> None:
        say("building DeepSpeed's C++ helper")
        # A build that was killed leaves a lock on which the next one would wait for ever.
        shutil.rmtree(self.extensions, ignore_errors=True)
        self.extensions.mkdir()
        variables = self.variables()
        variables["DS_ACCELERATOR"] = "cpu"
        variables.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        variables["MASTER_PORT"] = str(free_port())
        self._logged(self.python, "-c", BUILD_HELPER, limit=HELPER_LIMIT, env=variables)

    def _pip(self, *arguments: str | Path) -> None:
        options = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        self._logged(self.python, "-m", "pip", "install", *options, *arguments)

    def _logged(
        self, *command: str | Path, limit: float = INSTALL_LIMIT, env: dict[str, str] | None = None
    ) -> None:
        with open(self.log, "a") as log:
            print("$", *command, file=log, flush=True)
            status = run(command, env=env, cwd=self.folder, limit=limit, output=log)
        if status == 0:
            return
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        reason = (errors or lines)[-1].strip()
        raise ToolError(
            f"{Path(command[0]).name} ended with status {status}: {reason[:200]} (log: {self.log})"
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
