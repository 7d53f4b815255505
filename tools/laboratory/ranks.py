"""Programs that run as the ranks of a process group, on CPU, and leave nothing in shared memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _process import ToolError, free_port

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """Yield a port for a process group on this machine; what DeepSpeed makes for it is removed afterwards.

    DeepSpeed's CPU collectives make a file of 69 MB for each rank, which outlives it. The file's name has the
    user, the address and the port: those that appear meanwhile with this port belong to this group.
    """
    port = free_port()
    pattern = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"
    before = set(SHARED_MEMORY.glob(pattern))
    try:
        yield port
    finally:
        for left in set(SHARED_MEMORY.glob(pattern)) - before:
            left.unlink(missing_ok=True)


def backend() -> str:
    """Return the backend of a process group: gloo, and NCCL beside it where DeepSpeed runs on CUDA."""
    from deepspeed.accelerator import get_accelerator

    return "cpu:gloo,cuda:nccl" if get_accelerator().device_name() == "cuda" else "gloo"


def ds_config(stage: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return a DeepSpeed config that takes any optimizer; its buckets are as small as the models."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
            "sub_group_size": 1_000_000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def run_ranks(
    command: Callable[[int], Sequence[str | Path]],
    *,
    ranks: int = 1,
    limit: float,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run this Python once for each rank of a process group.

    Args:
        command: gives Python's arguments for a rank.
        ranks: how many there are.
        limit: seconds.
        env: environment variables besides those of the caller and of the rank.

    Raises:
        ToolError: a rank failed (the message is the end of what it printed), or they ran past the limit.

    """
    world = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    world |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **(env or {})}
    processes: list[subprocess.Popen[bytes]] = []
    with own_port() as port, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        try:
            for rank, log in enumerate(logs):
                ids = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, *map(str, command(rank))],
                        env={**os.environ, **world, **ids},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                processes.append(process)
            for process in processes:
                process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ToolError(f"no result after {limit:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, log in zip(processes, logs, strict=True):
            if process.returncode != 0:
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                raise ToolError("\n".join(lines[-12:]) or f"status {process.returncode}, and no output")
