"""`safe-rope audit` in processes of its own: the verdicts on published configs, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import CONFIGS, ROOT, environment, run, start

from safe_rope._audit.command import worker
from safe_rope._audit.report import Verdict
from safe_rope.cli.audit import status_of

RELEASE = ".".join(transformers.__version__.split(".")[:2])
ZERO = {  # as people have it for HF Trainer
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
# load path -> where stock Mistral loses its positions, with the DeepSpeed that each release is tested with
ZERO3 = {
    "5.23": {"zero.Init": {"constructor"}, "ZeRO-3 from_pretrained": set()},
    "4.57": {"zero.Init": {"initialize"}, "ZeRO-3 from_pretrained": {"initialize"}},
    "4.36": {
        "zero.Init": {"constructor", "initialize"},
        "ZeRO-3 from_pretrained": {"constructor", "initialize"},
    },
}
ZERO2 = {"5.23": set(), "4.57": {"initialize"}, "4.36": {"initialize"}}
# Its forward takes inv_freq from an attribute that no cast reaches: cos and sin are those of FP32 to the bit.
REMADE = {("4.57", "phi-3-mini-128k")}
# The table is an attribute that no cast reaches, and is computed in the default dtype, which a load lowers.
BUILT_LOW = {("4.57", "gpt-j-6b"), ("4.36", "gpt-j-6b")}
# Their tables are ready made, and tell no position from which on they are off by 0.1 rad.
READY = {"gpt-j-6b"}
MISSING = {
    "4.36": {
        "command-r": "transformers 4.36.2 knows no model type 'cohere'",
        "command-r7b": "transformers 4.36.2 knows no model type 'cohere2'",
        "deepseek-v2-lite": "transformers 4.36.2 knows no model type 'deepseek_v2'",
        "llama-4-scout": "transformers 4.36.2 knows no model type 'llama4'",
        "modernbert-base": "transformers 4.36.2 knows no model type 'modernbert'",
        "qwen2-vl-7b": "transformers 4.36.2 knows no model type 'qwen2_vl'",
        "qwen2.5-7b-1m": "transformers 4.36.2 knows no model type 'qwen2'",
        "phi-3-mini-128k": "transformers 4.36.2 knows no model type 'phi3'",
        "deepseek-v3": "transformers 4.36.2 knows no model type 'deepseek_v3'",
        "gemma-3-4b": "transformers 4.36.2 knows no model type 'gemma3'",
        "llama-3.1-8b": "transformers 4.36.2 refuses this llama config: `rope_scaling` must be",
        "llama-3.1-70b": "transformers 4.36.2 refuses this llama config: `rope_scaling` must be",
    }
}


def audited(tmp_path: Path, name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run(
        tmp_path / "tmp", "audit", str(CONFIGS / f"{name}.json"), "--format", "json", *arguments
    )
    assert status in (0, 1), err
    assert err == ""
    return status, json.loads(out)


def deepspeed_config(tmp_path: Path, stage: int) -> str:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**ZERO, "zero_optimization": {"stage": stage}} if stage < 3 else ZERO))
    return str(file)


def by_path(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["path"].partition(",")[0]: entry for entry in report["paths"]}


def error_at(entry: dict[str, Any], position: int) -> float:
    return float(next(row["phase_error_rad"] for row in entry["rows"] if row["position"] == position))


def cast_error(theta: float, dim: int, dtype: torch.dtype, position: int) -> float:
    """What a rounded inv_freq costs, from the formula alone."""
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return float((inv_freq.float().to(dtype).double() - inv_freq).abs().max()) * position


@pytest.mark.contract
@pytest.mark.slow
def test_mistral_under_zero3_is_told_where_it_loses_its_positions(tmp_path: Path) -> None:
    config = deepspeed_config(tmp_path, 3)
    status, report = audited(tmp_path, "mistral-7b", "--deepspeed", config, "--dtype", "bf16")
    assert status == 1
    assert not report["ok"]
    assert report["guarded_ok"]
    assert (report["zero_stage"], report["dtype"]) == (3, "bfloat16")
    paths = by_path(report)
    for path, where in ZERO3[RELEASE].items():
        lost = {entry["where"] for entry in paths[path]["stock"]["lost"]}
        assert lost - {"cache rebuild"} == where, path
        assert paths[path]["stock"]["verdict"] == ("damaged" if where else "ok")
    for entry in report["paths"]:
        assert entry["guarded"]["verdict"] == "ok"
        assert all(row["phase_error_rad"] < 2**-23 for row in entry["guarded"]["rows"])


@pytest.mark.slow
def test_neox_under_zero2_in_float16(tmp_path: Path) -> None:
    config = deepspeed_config(tmp_path, 2)
    status, report = audited(tmp_path, "gpt-neox-20b", "--deepspeed", config, "--dtype", "fp16")
    assert status == 1
    assert report["rope"] == "default RoPE, theta 10000, rotary_dim 24 of head_dim 96"
    paths = [entry["path"] for entry in report["paths"]]
    assert paths == ["from_pretrained, initialize", "from_pretrained, .to(float16)"]
    lost = {entry["where"] for entry in report["paths"][0]["stock"]["lost"]}
    assert bool(lost) == bool(ZERO2[RELEASE])
    assert lost - {"cache rebuild", "module cast"} <= ZERO2[RELEASE]


PUBLISHED = sorted(path.stem for path in CONFIGS.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gemma-3-4b", marks=pytest.mark.exhaustive), "mistral-7b"])
def test_a_published_config_gets_a_right_verdict(name: str, tmp_path: Path) -> None:
    if name in MISSING.get(RELEASE, {}):
        status, out, err = run(tmp_path / "tmp", "audit", str(CONFIGS / f"{name}.json"))
        assert (status, out) == (2, "")
        (line,) = err.strip().splitlines()
        assert MISSING[RELEASE][name] in line
        return
    status, report = audited(tmp_path, name)
    assert status == 1, "a cast to a 16-bit dtype damages every stock model"
    assert_verdict_is_right(name, report)


def published(tmp_path: Path, deepspeed: str) -> list[dict[str, Any]]:
    """The reports on every config, made in one process, which imports the libraries once."""
    script = Path(__file__).with_name("published_worker.py")
    files = [str(CONFIGS / f"{name}.json") for name in PUBLISHED]
    seen = environment(tmp_path) | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    seen |= {"WORLD_SIZE": "1", "LOCAL_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    seen["PYTHONPATH"] += os.pathsep + str(ROOT / "tools")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), deepspeed, *files],
        env=seen,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"config": ')]
    assert [report["config"] for report in reports] == PUBLISHED
    return reports


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_published_config_gets_a_right_verdict_under_zero_3(tmp_path: Path) -> None:
    """The survey's own comparison says what is lost on each way to load."""
    for report in published(tmp_path, deepspeed_config(tmp_path, 3)):
        missing = MISSING.get(RELEASE, {}).get(report["config"])
        if missing is not None:
            assert missing in report["error"]
            continue
        for path, lost in report["lost"].items():
            verdicts = {p["stock"]["verdict"] for p in report["paths"] if p["path"] == path}
            assert ("damaged" in verdicts) == bool(lost), (report["config"], path, lost, verdicts)
        assert all(entry["guarded"]["verdict"] == "ok" for entry in report["paths"])


@pytest.mark.contract
@pytest.mark.slow
def test_every_published_config_gets_a_right_verdict(tmp_path: Path) -> None:
    for report in published(tmp_path, "-"):
        missing = MISSING.get(RELEASE, {}).get(report["config"])
        if missing is not None:
            assert missing in report["error"]
        else:
            assert "error" not in report, report
            assert_verdict_is_right(report["config"], report)


def assert_verdict_is_right(name: str, report: dict[str, Any]) -> None:
    # One entry for each module and path: some architectures have several.
    paths = report["paths"]
    loads, casts = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    assert report["guarded_ok"]
    assert all(path["guarded"]["verdict"] == "ok" for path in paths)
    if (RELEASE, name) in REMADE or name == "whisper-small":  # whose positions are parameters
        assert report["ok"]
        assert [path["stock"]["verdict"] for path in paths] == ["ok"] * len(paths)
        return
    if (RELEASE, name) in BUILT_LOW:
        assert [path["stock"]["verdict"] for path in paths] == ["damaged", "ok"]
        return
    for loaded, cast in zip(loads, casts, strict=True):
        assert (loaded["path"], cast["path"][:20]) == ("from_pretrained", "from_pretrained, .to")
        assert {entry["where"] for entry in cast["stock"]["lost"]} <= {"module cast", "cache rebuild"}
        assert cast["stock"]["verdict"] == "damaged"
        assert cast["stock"]["first_bad_position"] is not None or name in READY
        if RELEASE != "4.36":
            assert loaded["stock"]["verdict"] == "ok", loaded["stock"]["lost"]
    assert len(loads) == 1 or name.startswith(("gemma-3", "modernbert", "qwen2-vl"))
    cast = casts[0]
    default = {"mistral-7b": (1e4, 128), "gpt-neox-20b": (1e4, 24), "qwen2.5-7b-1m": (1e7, 128)}
    if name in default and RELEASE != "4.36":
        last = report["max_position_embeddings"] - 1
        dtype = torch.float16 if name == "gpt-neox-20b" else torch.bfloat16
        true = cast_error(*default[name], dtype, last)
        assert error_at(cast["stock"], last) == pytest.approx(true, rel=0.01)
        first = cast["stock"]["first_bad_position"]
        before, after = (cast_error(*default[name], dtype, first + step) for step in (-1, 1))
        assert before < 0.1 < after


@pytest.mark.slow
def test_the_guarded_verdict_the_plot_and_the_dump(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "out.png", tmp_path / "tables.safetensors"]
    arguments = ["--guard", "--max", "4096", "--plot", str(files[0]), "--dump", str(files[1])]
    status, report = audited(tmp_path, "mistral-7b", *arguments)
    assert status == 0, "the guarded model is judged"
    assert not report["ok"]
    assert max(row["position"] for row in report["paths"][0]["stock"]["rows"]) == 4095
    assert files[0].read_bytes().startswith(b"\x89PNG")
    from safe_rope._audit.command.dump import load

    groups, environment = load(files[1])
    assert environment["transformers"] == transformers.__version__
    assert {group.rpartition(" ")[2] for group in groups} == {"(stock)", "(guarded)"}
    for group, tables in groups.items():
        (table,) = tables.values()
        assert torch.equal(table["positions"], torch.arange(4096))
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 128, 2, dtype=torch.int64).float() / 128))
        phases = table["positions"].double()[:, None] * inv_freq.double()
        off = (table["cos"].double() - phases.cos()).abs().max()
        assert (off < 2**-24) == group.endswith("(guarded)"), group
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.png", "tables.safetensors", "tmp"]


def test_a_deepspeed_config_that_deepspeed_refuses(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": "many"}}))
    config = str(CONFIGS / "mistral-7b.json")
    status, out, err = run(tmp_path / "tmp", "audit", config, "--deepspeed", str(file))
    assert (status, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert "refuses this DeepSpeed config" in line
    assert "reduce_bucket_size" in line


@pytest.mark.slow
def test_an_unknown_model_type_has_a_traceback_only_with_debug(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bertha"}))
    status, out, err = run(tmp_path / "tmp", "audit", str(tmp_path))
    assert (status, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert f"transformers {transformers.__version__} knows no model type 'bertha'" in line
    status, _, err = run(tmp_path / "tmp", "audit", str(tmp_path), "--debug")
    assert status == 2
    assert "Traceback" in err
    assert "skeleton.py" in err


@pytest.mark.slow
def test_a_model_whose_config_tells_no_formula_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 1, "n_positions": 256, "rotary_dim": 16, "vocab_size": 64}
    file.write_text(json.dumps({"model_type": "gptj", **sizes}))
    status, out, _ = run(tmp_path / "tmp", "audit", str(file), "--format", "json")
    report = json.loads(out)
    assert (status, report["ok"], report["guarded_ok"]) == (1, False, True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_that_stays_in_fp32_loses_nothing(tmp_path: Path) -> None:
    config = str(CONFIGS / "gpt-j-6b.json")
    status, out, _ = run(tmp_path / "tmp", "audit", config, "--dtype", "fp32", "--format", "json")
    assert (status, json.loads(out)["ok"]) == (0, True)


VERDICTS: tuple[Verdict, ...] = ("ok", "damaged", "unknown")


def test_what_cannot_be_told_is_not_ok() -> None:
    statuses = [status_of(verdict, strict) for verdict in VERDICTS for strict in (False, True)]
    assert statuses == [0, 0, 1, 1, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_an_interrupted_audit_leaves_no_process_and_no_file(number: signal.Signals, tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    process = start(scratch, "audit", str(CONFIGS / "mistral-7b.json"))
    try:
        wait_for(lambda: list(scratch.glob("*/checkpoint/*")))  # it forks from here on
        assert workers(scratch)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not workers(scratch))
    wait_for(lambda: not list(scratch.iterdir()))
    if number != signal.SIGKILL:
        assert (process.returncode, out) == (2, "")
        assert err.strip() == "error: interrupted"


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def workers(scratch: Path) -> list[int]:
    """The processes that were started with a folder below ``scratch``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if worker.__name__.encode() in command and os.fsencode(scratch) in command:
                found.append(int(entry.name))
    return found
