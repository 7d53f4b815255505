"""`safe-rope run` around what ends in every way, and commands whose outputs cannot be written.

What is guarded ends as it does without: same exit status or signal, same stdout. Its report is whole: a JSON
object that says nothing of a process, or all of it. A command that cannot write says so in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _process import free_port

from laboratory.soak.trial import Trial

ROUNDS, LAUNCHES = 3, 3
SECONDS = 120.0
SAFE_ROPE = (sys.executable, "-c", "from safe_rope.cli.main import main; main()")
RUN = (*SAFE_ROPE, "run")
MODEL = """
import os, signal, sys, time
import torch
class PlainRotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float32) / 16)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
    def forward(self, x):
        return torch.outer(torch.arange(9.0), self.inv_freq).cos()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = PlainRotary()
    def forward(self, x):
        return self.rotary(x)
def build():
    Model()(torch.zeros(1))
    print("called", flush=True)
"""
ENDINGS = {
    "returns": "build()",
    "raises": "build(); raise ValueError('theirs')",
    "sys.exit(3)": "build(); sys.exit(3)",
    "sys.exit('text')": "build(); sys.exit('text')",
    "os._exit(4)": "build(); os._exit(4)",
    "os.abort()": "build(); os.abort()",
    "KeyboardInterrupt": "build(); raise KeyboardInterrupt",
    **{
        f"{name}": f"build(); os.kill(os.getpid(), signal.{name}); time.sleep(30)"
        for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGSEGV")
    },
    "forks, the child exits 5": "build(); child = os.fork()\nif child == 0: sys.exit(5)\n"
    "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    "a child in a pool builds": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    build()\n    p = m.get_context('fork').Process(target=build); p.start(); p.join(); sys.exit(6)",
    "closes stderr": "os.close(2); build(); sys.exit(7)",
}
DAEMON = """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
silence = os.open(os.devnull, os.O_RDWR)
os.dup2(silence, 1), os.dup2(silence, 2)
build()
"""


def environment(**more: str) -> dict[str, str]:
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith("SAFE_ROPE")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **more}


def call(*command: str | Path, before: Callable[[], None] | None = None, **more: Any) -> Any:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=before,
        **{"env": environment(), "stdin": subprocess.DEVNULL, **more},
    )


def report_of(file: Path) -> list[dict[str, Any]]:
    """Return the processes of a report that is whole, and alone in its folder but for what was there."""
    told = json.loads(file.read_text(encoding="utf-8"))
    processes: list[dict[str, Any]] = told["processes"]
    for process in processes:
        assert {"host", "pid", "protected", "ended"} <= process.keys()
    left = [path.name for path in file.parent.iterdir() if path.name.startswith(".safe-rope")]
    assert not left, left
    return processes


def run(trial: Trial) -> None:
    with tempfile.TemporaryDirectory(prefix="a b:c ") as name:
        folder = Path(name)
        for number in range(trial.count(ROUNDS)):
            here = folder / str(number)
            here.mkdir()
            endings(trial, here)
            interpreters(trial, here)
            outputs(trial, here)
        for number in range(trial.count(LAUNCHES)):
            here = folder / f"launch {number}"
            here.mkdir()
            launchers(trial, here)


def endings(trial: Trial, folder: Path) -> None:
    for name, source in ENDINGS.items():
        file, report = folder / "script.py", folder / "report.json"
        file.write_text(MODEL + source, encoding="utf-8")
        # Without a guard and without torch, which takes seconds to import.
        bare = "import os, signal, sys, time\ndef build(): print('called', flush=True)\n"
        plain = call(sys.executable, "-c", bare + source)
        with trial.of("a script that ends by itself", name):
            done = call(*RUN, "--report", report, "--", sys.executable, file)
            assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout), done.stderr[-300:]
            processes = report_of(report)
            assert processes, "the report tells of no process"
            assert processes[0]["protected"], "nothing is protected"
    with trial.of("a script that becomes a daemon", "double fork"):
        file.write_text(MODEL + DAEMON, encoding="utf-8")
        done = call(*RUN, "--report", report, "--", sys.executable, file)
        assert done.returncode == 0
        deadline = time.monotonic() + SECONDS
        while not any(process["ended"] for process in report_of(report)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert report_of(report)[0]["protected"]
    with trial.of("run inside run", "sys.exit(3)"):
        file.write_text(MODEL + "build(); sys.exit(3)", encoding="utf-8")
        done = call(*RUN, "--report", report, "--", *RUN, "--", sys.executable, file)
        assert (done.returncode, done.stdout) == (3, "called\n")
        assert len(report_of(report)) == 1


def interpreters(trial: Trial, folder: Path) -> None:
    file, report = folder / "exits.py", folder / "report.json"
    file.write_text("import sys; print('ran'); sys.exit(9)", encoding="utf-8")
    for option in ("-S", "-I", "-E", "-B", "-O", "-u"):
        with trial.of("a Python with options", option):
            done = call(*RUN, "--report", report, "--", sys.executable, option, file)
            assert (done.returncode, done.stdout) == (9, "ran\n")
            assert report_of(report) == []
    # Python refuses a path with a colon for an environment.
    with trial.of("another environment's Python", "venv"), tempfile.TemporaryDirectory() as other:
        venv.create(other, with_pip=False, symlinks=True)
        done = call(*RUN, "--report", report, "--", Path(other, "bin", "python"), file)
        assert (done.returncode, done.stdout) == (9, "ran\n")
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("import sys; sys.theirs = 'seen'", encoding="utf-8")
    source = MODEL + "build(); print(sys.theirs)"
    with trial.of("a sitecustomize of their own", "found beside ours"):
        # A path with a colon cannot stand in PYTHONPATH.
        with tempfile.TemporaryDirectory() as plain:
            shutil.copytree(folder / "own", Path(plain, "own"))
            paths = os.pathsep.join([str(Path(plain, "own")), *filter(None, sys.path)])
            env = environment() | {"PYTHONPATH": paths}
            done = call(*RUN, "--report", report, "--", sys.executable, "-c", source, env=env)
        assert done.stdout == "called\nseen\n", done.stderr[-300:]
        assert report_of(report)[0]["protected"]


# ---- outputs that cannot be written --------------------------------------------------------------------


def without_space() -> None:
    """Let this process write no byte to any file: an error, as a full disk is."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def without_override() -> None:
    """Let permissions bind root, too."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def outputs(trial: Trial, folder: Path) -> None:
    source = folder / "model.py"
    source.write_text(LOW, encoding="utf-8")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    marks = "<!-- safe-rope patches: begin -->\n<!-- safe-rope patches: end -->\n"
    commands: dict[str, Callable[[Path], Sequence[str | Path]]] = {
        "run --report": lambda to: ("run", "--report", to, "--", "true"),
        "scan --output": lambda to: ("scan", "--no-cache", "--output-file", to, "--format", "json", source),
        "scan --write-baseline": lambda to: (
            "scan",
            "--no-cache",
            "--baseline",
            to,
            "--write-baseline",
            source,
        ),
        "scan --fix": lambda to: ("scan", "--no-cache", "--fix", "--unsafe-fixes", to),
        "patches --update": lambda to: ("patches", "--update", to),
    }
    if trial.scale >= 1:
        commands["audit --dump"] = lambda to: ("audit", "--path", "from_pretrained", "--dump", to, config)
    held = {"scan --fix": source.read_text(encoding="utf-8"), "patches --update": marks, "run --report": "{}"}
    ways = {"a full disk": without_space, "a read-only folder": without_override}
    for way, before in ways.items():
        for name, command in commands.items():
            with trial.of(f"an output on {way}", name), _closed(folder / "out", held.get(name)) as file:
                was = file.read_bytes() if file.exists() else None
                file.parent.chmod(0o555 if before is without_override else 0o755)
                env = environment(TMPDIR=str(folder)) if name == "audit --dump" else environment()
                done = call(*SAFE_ROPE, *command(file), before=before, env=env)
                assert done.returncode == 2, (done.returncode, done.stdout[-200:], done.stderr[-300:])
                said = [line for line in done.stderr.splitlines() if line.strip()]
                wordy = name in ("audit --dump", "scan --fix")  # progress; a summary of the other files
                assert len(said) == 1 or wordy, done.stderr[-600:]
                assert any(line.lower().startswith("error") for line in said), done.stderr[-600:]
                assert "Traceback" not in done.stderr
                assert (file.read_bytes() if file.exists() else None) == was
                assert [path for path in file.parent.iterdir() if path != file] == []
    for device in ("/dev/null", "/dev/full"):
        with trial.of("an output that is a device", device):
            done = call(*RUN, "--report", device, "--", "true")
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert Path(device).is_char_device()
            done = call(*SAFE_ROPE, *commands["scan --output"](Path(device)))
            assert done.returncode == (1 if device == "/dev/null" else 2), done.stderr
            assert Path(device).is_char_device()
    with trial.of("a report that cannot be written while the model trains", "a full disk"):
        file, report = folder / "script.py", folder / "full.json"
        # Not sooner: torch itself does not begin without a place for temporary files.
        full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); build(); sys.exit(3)"
        file.write_text("import safe_rope\n" + MODEL + full, encoding="utf-8")
        env = environment(SAFE_ROPE="1", SAFE_ROPE_REPORT=str(report))
        done = call(sys.executable, file, env=env)
        assert (done.returncode, done.stdout) == (3, "called\n"), done.stderr[-300:]
        assert "the report cannot be written" in done.stderr
        assert not report.exists()


LOW = """\
import torch
def table(rotary, seq_len):
    t = torch.arange(seq_len, device=rotary.inv_freq.device, dtype=rotary.inv_freq.dtype)
    return torch.outer(t, rotary.inv_freq).cos()
"""
"""Source that the scan has a fix for."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 31,
    "max_position_embeddings": 64,
}


@contextlib.contextmanager
def _closed(folder: Path, content: str | None) -> Iterator[Path]:
    """A file in a folder of its own, with some content; both go again."""
    folder.mkdir()
    file = folder / "file.py"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    try:
        yield file
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


# ---- launchers -----------------------------------------------------------------------------------------

RANK = """
build()
open(os.path.join({folder!r}, "pid" + os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(60)
"""


def launchers(trial: Trial, folder: Path) -> None:
    killed = {
        "a rank by SIGKILL": (signal.SIGKILL, False),
        "the launcher by SIGTERM": (signal.SIGTERM, True),
        "the launcher by SIGHUP": (signal.SIGHUP, True),
    }
    for name, (number, launcher) in killed.items():
        plain = launched(folder, (), number, launcher)
        report = folder / "report.json"
        with trial.of("torchrun with two ranks, killed", name):
            status, pids = launched(folder, (*RUN, "--report", str(report), "--"), number, launcher)
            assert status == plain[0], f"{status} instead of {plain[0]}"
            processes = report_of(report)
            assert [process["rank"] for process in processes] == [0]
            left = [pid for pid in pids if alive(pid)]
            assert not left, f"still there: {left}"


def launched(folder: Path, around: Sequence[str], number: int, launcher: bool) -> tuple[int, list[int]]:
    """Kill torchrun or a rank of it as soon as both have called their model; return status, pids."""
    script = folder / "rank.py"
    script.write_text(MODEL + RANK.format(folder=str(folder)), encoding="utf-8")
    files = [folder / f"pid{rank}" for rank in range(2)]
    for file in files:
        file.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(free_port()), str(script)]
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(
            [*around, *torchrun], env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + SECONDS
        while not all(file.exists() and file.read_text() for file in files):
            assert child.poll() is None, (folder / "log").read_text()[-500:]
            assert time.monotonic() < deadline, "the ranks do not begin"
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in files]
        os.kill(child.pid if launcher else pids[1], number)
        status = child.wait(SECONDS)
        time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return status, pids


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
