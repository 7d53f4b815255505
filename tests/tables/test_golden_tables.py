"""The bits of frequencies and tables, against a committed file and under other instruction sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import golden

GOLDEN: dict[str, dict[str, str]] = json.loads(golden.FILE.read_text())
HERE = torch.backends.cpu.get_cpu_capability()
OTHERS = ["default"] + (["avx2"] if HERE in ("AVX2", "AVX512") else [])


def test_the_file_has_every_spec_and_block() -> None:
    assert list(GOLDEN) == list(golden.SPECS)
    for found in GOLDEN.values():
        assert set(found) >= {f"fp32 {name}" for name in golden.positions()}


@pytest.mark.torch
@pytest.mark.parametrize("name", golden.SPECS)
def test_this_cpu_reproduces_the_golden_bits(name: str) -> None:
    assert golden.digests(name) == GOLDEN[name]


def test_a_digest_tells_of_one_bit() -> None:
    cos, sin = golden.table_of("theta 1e4, 64").lookup(golden.positions()["0+600"])
    assert golden.sha256(cos, sin) == GOLDEN["theta 1e4, 64"]["fp32 0+600"]
    cos.view(torch.int32)[599, 31] ^= 1
    assert golden.sha256(cos, sin) != GOLDEN["theta 1e4, 64"]["fp32 0+600"]


def in_a_process(capability: str, *arguments: str) -> Any:
    root = Path(golden.__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, golden.__file__, *arguments],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1] if arguments else done.stdout)


@pytest.mark.parametrize("capability", OTHERS)
def test_another_instruction_set_reproduces_the_golden_bits(capability: str) -> None:
    assert in_a_process(capability) == GOLDEN


@pytest.mark.slow
@pytest.mark.skipif(HERE == "DEFAULT", reason="this torch has scalar code only: nothing to compare it with")
def test_stock_tables_have_other_bits_with_another_instruction_set() -> None:
    here, scalar = in_a_process(HERE.lower(), "--stock"), in_a_process("default", "--stock")
    assert scalar["capability"] in ("DEFAULT", "NO AVX")  # as this torch calls it
    assert here["stock"] != scalar["stock"], "the difference that the exact tables remove is gone upstream"
