"""The process that `safe-rope audit` and `compare` measure in, run with ``-m`` and the folder of a job.

It reads what was asked from ``FOLDER/job``, imports the libraries once and forks. Every load path, stock and
guarded, has a separate process, and none sees what another left behind. Pickled messages on stdout say how
far it is; one with "result" or "error" is the last. It ends when its stdin does.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from safe_rope._audit.command.job import Job
from safe_rope._audit.command.outcome import KINDS, Outcome
from safe_rope._audit.command.process import MeasurementError
from safe_rope._audit.report import AuditReport
from safe_rope.errors import ConfigError, SafeRopeError


def main(folder: Path) -> int:
    """Run the job in ``folder``; return the exit status."""
    gc.disable()  # until everything is imported: a fifth of that time went into looking for garbage
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print goes to the log that stderr is
        try:
            asked = pickle.loads((folder / "job").read_bytes())
            work = _audit if isinstance(asked, Job) else _compare
            _say(out, result=work(asked, folder, out))
        except (_GoneError, BrokenPipeError):
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        except Exception as error:  # the parent turns whatever it is into one line
            _say(out, **_described(error))
            return 2
    return 0


class _GoneError(Exception):
    """The parent has ended."""


def _say(out: IO[bytes], **message: Any) -> None:
    pickle.dump(message, out)
    out.flush()


def _described(error: BaseException) -> dict[str, str]:
    said = str(error) if isinstance(error, SafeRopeError) else f"{type(error).__name__}: {error}"
    return {"error": " ".join(said.split()), "trace": traceback.format_exc()}


def _compare(asked: dict[str, Any], folder: Path, out: IO[bytes]) -> dict[str, Any]:
    _say(out, doing="importing torch and transformers")
    from safe_rope._audit.command.compare import compare_sides

    _collect_from_here_on()
    _say(out, doing="comparing")
    return compare_sides(asked)


def _audit(job: Job, folder: Path, out: IO[bytes]) -> Outcome:
    _say(out, doing="importing torch and transformers")
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    from safe_rope._audit.command.paths import Material, implied, preload

    if job.deepspeed is not None:
        _say(out, doing="importing deepspeed")
        versions["deepspeed"] = preload()

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    _say(out, doing="building the skeleton")
    material = Material.prepare(job, folder / "checkpoint")
    _collect_from_here_on()
    paths = implied(material)
    for part in job.judged:
        if not any(part in path for path in paths):
            raise ConfigError(f"no way to load this model has {part!r} in its name; got {'; '.join(paths)}")
    tasks = [(path, kind) for path in paths for kind in KINDS]
    audits: dict[str, dict[str, AuditReport]] = {}
    failed: dict[str, MeasurementError] = {}
    for done, (path, kind) in enumerate(tasks):
        if path in failed:
            continue
        _say(out, doing=f"{path}, {kind}", done=done, of=len(tasks))
        tables = folder / f"tables-{done}.safetensors" if job.dump else None
        try:
            measured = _in_a_fork(folder / "log", job, material, path, kind, tables)
        except MeasurementError as error:
            if kind != KINDS[0]:
                raise
            failed[path] = error  # the model cannot be loaded like that, with the guard or without
        else:
            audits.setdefault(path, {})[kind] = measured
    if not audits:
        raise next(iter(failed.values()))
    if job.dump:
        from safe_rope._audit.command.dump import merge

        merge(folder.glob("tables-*"), folder / "dump.safetensors", job.name)
    skeleton = material.skeleton
    layers = skeleton.config.num_hidden_layers
    return Outcome(
        job,
        skeleton.model_type,
        skeleton.description,
        skeleton.announced,
        layers,
        versions,
        audits,
        {path: str(error) for path, error in failed.items()},
        skeleton.left_out,
    )


def _collect_from_here_on() -> None:
    # DeepSpeed collects garbage a dozen times for an engine; each would go through all that is imported.
    gc.freeze()
    gc.enable()


def _in_a_fork(log: Path, job: Job, material: Any, path: str, kind: str, tables: Path | None) -> AuditReport:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_measured, args=(sender, job, material, path, kind, tables))
    process.start()
    sender.close()
    try:
        # Nothing is ever written to stdin: it becomes readable when the parent has ended.
        if 0 in wait([receiver, 0]):
            raise _GoneError
        measured: AuditReport | dict[str, str] = receiver.recv()
    except EOFError:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the process that measured it ended without a result: {''.join(last)}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(measured, dict):
        raise MeasurementError(f"{path} ({kind}): {measured['error']}", measured["trace"])
    return measured


def _send_measured(sender: Connection, *arguments: Any) -> None:
    try:
        import torch

        from safe_rope._audit.command.paths import measure_path

        # PyTorch makes its thread pool anew on the first use after a fork; two threads that come to it at
        # once fail with "Invalid thread pool!". transformers 5 loads a checkpoint in several threads.
        torch.set_num_threads(1)
        sender.send(measure_path(*arguments))
    except BaseException as error:
        sender.send(_described(error))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
