"""The Triton kernels have the eager bits, as far as shows without a GPU; tests/system/gpu does the rest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.children import with_our_modules

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: only the environment of transformers 5.23.0 has it, on Linux",
)
WORKER = Path(__file__).with_name("triton_worker.py")
INDUCTOR = Path(__file__).with_name("inductor_worker.py")


def _run(what: str, worker: Path = WORKER, **variables: str) -> str:
    # A process of its own: Triton decides once whether it interprets.
    environment = with_our_modules() | variables
    done = subprocess.run(
        [sys.executable, worker, what], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_interpreted_kernel_has_the_eager_bits() -> None:
    assert _run("interpret", TRITON_INTERPRET="1").startswith("112 agree")


@pytest.mark.slow
def test_the_generated_code_has_no_fused_multiply_add(tmp_path: Path) -> None:
    output = _run("ptx", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert output.startswith("7 agree")


@pytest.mark.slow
def test_the_interpreted_lookup_has_the_bits_of_plain_torch() -> None:
    assert _run("look_up", TRITON_INTERPRET="1").startswith("6 agree")


@pytest.mark.slow
def test_inductors_loops_for_cuda_have_the_eager_bits(tmp_path: Path) -> None:
    output = _run("run", INDUCTOR, TRITON_INTERPRET="1", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert output.startswith("32 agree")


@pytest.mark.slow
def test_inductors_loops_for_cuda_round_each_product(tmp_path: Path) -> None:
    caches = dict.fromkeys(("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(tmp_path))
    assert _run("ptx", INDUCTOR, TRITON_INTERPRET="0", **caches).startswith("68 agree")
