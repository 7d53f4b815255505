"""The process that `safe-rope audit` and `compare` measure in, run with ``-m`` and the folder of a job.

It reads a job from ``FOLDER/job.json``, imports the libraries once and forks: every load path, stock and
guarded, has a process of its own, so that none sees what another left behind. One JSON object a line on
stdout says how far it is; a line with "result" or "error" is the last. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from safe_rope._audit.command.job import Job
from safe_rope.errors import SafeRopeError

KINDS = ("stock", "guarded")


def main(folder: Path) -> int:
    """Run the job in ``folder``; return the exit status."""
    gc.disable()  # until everything is imported: a fifth of that time went into looking for garbage
    with _private_stdout(folder / "log") as out:
        try:
            request = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            if "compare" in request:
                _say(out, result=_compare(request["compare"], out))
            else:
                _say(out, result=_audit(Job.from_dict(request), folder, out))
        except (_GoneError, BrokenPipeError):
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        except Exception as error:  # the parent turns whatever it is into one line
            known = isinstance(error, SafeRopeError)
            said = str(error) if known else f"{type(error).__name__}: {error}"
            trace = getattr(error, "trace", None) or traceback.format_exc()
            _say(out, error=" ".join(said.split()), trace=trace)
            return 2
    return 0


class _GoneError(Exception):
    """The parent has ended."""


def _say(out: IO[str], **message: Any) -> None:
    out.write(json.dumps(message, allow_nan=False) + "\n")
    out.flush()


@contextlib.contextmanager
def _private_stdout(log: Path) -> Iterator[IO[str]]:
    """Keep stdout for messages; what libraries print goes to a file."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out, log.open("ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        warnings.simplefilter("ignore")
        yield out


def _compare(request: dict[str, Any], out: IO[str]) -> dict[str, Any]:
    _say(out, doing="importing torch and transformers")
    from safe_rope._audit.command.compare import compare_sides

    gc.freeze()
    gc.enable()
    _say(out, doing="comparing")
    return compare_sides(request)


def _audit(job: Job, folder: Path, out: IO[str]) -> dict[str, Any]:
    _say(out, doing="importing torch and transformers")
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    if job.deepspeed is not None:
        _say(out, doing="importing deepspeed")
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    from safe_rope._audit.command.paths import Material, implied, preload

    if job.deepspeed is not None:
        preload()

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    _say(out, doing="building the skeleton")
    material = Material.prepare(job, folder / "checkpoint")
    paths = implied(material)
    # DeepSpeed collects garbage a dozen times for an engine; each would go through all that is imported.
    gc.freeze()
    gc.enable()
    results = []
    for index, path in enumerate(paths):
        for kind in KINDS:
            done = len(KINDS) * index + KINDS.index(kind)
            _say(out, doing=f"{path.name}, {kind}", done=done, of=len(KINDS) * len(paths))
            results.append(_in_a_fork(job, material, (index, path.name, kind), folder))
    if job.dump:
        from safe_rope._audit.command.dump import merge

        merge([folder / f"{result['file']}" for result in results], folder / "dump.safetensors")
    return {
        "model_type": material.skeleton.model_type,
        "description": material.skeleton.description,
        "max_position_embeddings": material.skeleton.announced,
        "layers": material.skeleton.config.num_hidden_layers,
        "versions": versions,
        "paths": results,
    }


def _in_a_fork(job: Job, material: Any, which: tuple[int, str, str], folder: Path) -> dict[str, Any]:
    index, name, kind = which
    result = folder / f"path-{index}-{kind}.json"
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            from safe_rope._audit.command.measure import measure_path

            # PyTorch makes its thread pool anew on the first use after a fork; two threads that come to it at
            # once fail with "Invalid thread pool!". transformers 5 loads a checkpoint in several threads.
            torch.set_num_threads(1)
            measured = measure_path(job, material, index, kind, folder)
        except BaseException as error:
            said = str(error) if isinstance(error, SafeRopeError) else f"{type(error).__name__}: {error}"
            measured = {"error": said, "trace": traceback.format_exc()}
        result.write_text(json.dumps(measured, allow_nan=False), encoding="utf-8")
        os._exit(0)
    _wait(pid)
    if not result.exists():
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the process that measured it ended without a result: {''.join(last)}")
    measured = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise _PathError(f"{name} ({kind}): {measured['error']}", measured["trace"])
    return dict(measured)


class _PathError(SafeRopeError):
    """A load path failed; ``trace`` is the traceback of its process."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


def _wait(pid: int) -> None:
    try:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            # Nothing is ever written to stdin: it becomes readable when the parent has ended.
            if select.select([0], [], [], 0.02)[0] and not os.read(0, 1):
                raise _GoneError
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
