"""`safe-rope run` around an unmodified Trainer script: real launchers, two ranks, ZeRO-3, bf16, gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import DS_CONFIG, HERE, SAFE_ROPE
from support.children import launch

from safe_rope.autocast import _deepspeed

SECONDS = 405
TRAIN = str(HERE / "train.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


def measured(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("out/measured-*.json"))
    ]


def launchers(port: int, ds_config: Path) -> dict[str, list[str]]:
    return {
        "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", str(port)],
        "deepspeed": ["deepspeed", "--no_local_rank", "--num_gpus", "2", "--master_port", str(port)],
        "accelerate": [
            *("accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", str(ds_config)),
            *("--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"),
            *("--main_process_port", str(port)),
        ],
    }


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=pytest.mark.exhaustive),  # the pages' commands run it
        pytest.param("deepspeed", marks=pytest.mark.contract),
        pytest.param("accelerate", marks=pytest.mark.exhaustive),
    ],
)
def test_an_unmodified_script_trains_with_exact_tables_in_every_rank(
    launcher: str, tmp_path: Path, environment: dict[str, str], port: int, checkpoint: Path, ds_config: Path
) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    report = tmp_path / "report.json"
    script = [TRAIN, str(checkpoint), str(ds_config), str(tmp_path / "out"), "measured"]
    command = [*launchers(port, ds_config)[launcher], *script]
    autocast = launcher == "deepspeed" and _deepspeed.has_autocast()
    if autocast:
        section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        ds_config.write_text(json.dumps(DS_CONFIG | section), encoding="utf-8")
    options = ["--strict", *["--autocast"] * autocast, "--report", str(report)]
    guarded = [*SAFE_ROPE, "run", *options, "--", *command]
    status, output = launch(guarded, environment, tmp_path / "log", SECONDS)
    assert status == 0, output[-3000:]
    seen = measured(tmp_path)
    assert len(seen) == 2
    for rank in seen:
        assert rank["ulps"] <= 1.0
        assert rank["audit"]["ok"], rank["audit"]
        assert rank["audit"]["modules"]
        assert rank["engine is corrected"] is autocast
    assert output.count("safe-rope: ") == 1
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["command"] == command
    (process,) = told["processes"]
    assert process["rank"] == 0
    assert process["ended"]
    assert process["error"] is None
    assert process["tables"] == "exact"
    assert process["autocast"] is autocast
    assert len(process["protected"]) == len(seen[0]["audit"]["modules"])
    assert not process["unprotected"]


def test_without_it_the_same_script_has_other_tables(
    tmp_path: Path, environment: dict[str, str], port: int, checkpoint: Path, ds_config: Path
) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        TRAIN,
        str(checkpoint),
        str(ds_config),
        str(tmp_path / "out"),
        "measured",
    ]
    status, output = launch(command, environment | ranks, tmp_path / "log", SECONDS)
    assert status == 0, output[-3000:]
    (seen,) = measured(tmp_path)
    assert seen["ulps"] > 100
    assert "safe-rope" not in output


def test_environment_alone_guards_and_the_report_tells_of_a_failure(
    tmp_path: Path, environment: dict[str, str], port: int, checkpoint: Path
) -> None:
    report = tmp_path / "report.json"
    printed = subprocess.run(
        [*SAFE_ROPE, "run", "--print-env=file", "--tables", "fp32", "--report", str(report)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    asked = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    command = [sys.executable, TRAIN, str(checkpoint), "none", str(tmp_path / "out"), "measured"]
    status, output = launch(
        command, environment | asked | {"FAIL_AT_THE_END": "1"}, tmp_path / "log", SECONDS
    )
    assert status == 1, output[-3000:]
    assert "RuntimeError: as asked" in output
    (process,) = json.loads(report.read_text(encoding="utf-8"))["processes"]
    assert process["error"] == "RuntimeError: as asked"
    assert process["tables"] == "fp32"
    assert process["protected"]
