"""The other ways that a model comes into being: each gives the position tables of a clean FP32 model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import safe_rope

CONFIGS: dict[str, Callable[[], Any]] = {
    "phi": lambda: transformers.PhiConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=97, n_embd=64, n_layer=2, n_head=2, rotary_dim=16, n_positions=512, n_inner=32
    ),
    "m2m_100": lambda: transformers.M2M100Config(
        vocab_size=97,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    ),
}


def auto(architecture: str) -> Any:
    return (
        transformers.AutoModelForSeq2SeqLM if architecture == "m2m_100" else transformers.AutoModelForCausalLM
    )


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every floating buffer and plain attribute of ``model``."""
    found = {}
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                found[f"{path}.{name}"] = value
    return found


def _from_config(architecture: str, folder: Path) -> Any:
    return auto(architecture).from_config(CONFIGS[architecture](), torch_dtype=torch.bfloat16)


def _default_dtype(architecture: str, folder: Path) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return auto(architecture).from_config(CONFIGS[architecture]())
    finally:
        torch.set_default_dtype(torch.float32)


def _device_map(architecture: str, folder: Path) -> Any:
    return auto(architecture).from_pretrained(folder, torch_dtype=torch.bfloat16, device_map="auto")


def _dispatch(include_buffers: bool) -> Callable[[str, Path], Any]:
    def path(architecture: str, folder: Path) -> Any:
        import accelerate

        with accelerate.init_empty_weights(include_buffers=include_buffers):
            model = auto(architecture).from_config(CONFIGS[architecture]())
        model.tie_weights()
        return accelerate.load_checkpoint_and_dispatch(
            model, str(folder), device_map={"": "cpu"}, dtype=torch.bfloat16
        )

    return path


PATHS = {
    "from_config": _from_config,
    "default dtype": _default_dtype,
    "device_map auto": _device_map,
    "init_empty_weights": _dispatch(False),
    "init_empty_weights, buffers too": _dispatch(True),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tables_are_those_of_a_clean_model(architecture: str, path: str, tmp_path: Path) -> None:
    clean = auto(architecture).from_config(CONFIGS[architecture]())
    truth = {name: table.clone() for name, table in stored(clean).items()}
    assert truth
    clean.save_pretrained(tmp_path)
    with safe_rope.guard() as session:
        model = PATHS[path](architecture, tmp_path)
    assert session.report.protected
    assert not session.report.unprotected
    for _ in range(2):
        tables = stored(model)
        assert {
            name for name, table in tables.items() if not torch.equal(table.float(), truth[name])
        } == set()
        assert all(tables[name].dtype == truth[name].dtype for name in truth)
        model.to(torch.bfloat16)


FSDP = """
import os, sys, torch, transformers
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
sys.path[:0] = sys.argv[1].split(os.pathsep)
import safe_rope
from test_more_load_paths import CONFIGS, auto, stored

dist.init_process_group("gloo")
for architecture in ("phi", "gptj"):
    truth = {n: t.clone() for n, t in stored(auto(architecture).from_config(CONFIGS[architecture]())).items()}
    with safe_rope.guard():
        with torch.device("meta"):
            model = auto(architecture).from_config(CONFIGS[architecture]())
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
    tables = stored(model)
    assert truth.keys() <= tables.keys(), (truth.keys(), tables.keys())
    for name, table in truth.items():
        assert torch.equal(tables[name], table), (architecture, name, tables[name].dtype)
    ids = torch.arange(8)[None] + dist.get_rank()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss), loss
dist.destroy_process_group()
print("done")
"""


def test_fsdp2_with_meta_initialisation_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 is newer than this torch")
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(FSDP))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(script),
            os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        ]
        ranks.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        statuses = [rank.wait(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0], [(tmp_path / f"rank{rank}.txt").read_text()[-3000:] for rank in range(2)]
