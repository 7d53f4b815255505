from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import ROOT
from support.children import surroundings

EXAMPLE = ROOT / "examples" / "safe-rope-myarch"

# What `train.py` is to the pages: a script that casts a model, and fails if nothing guards it.
TRAIN = """
import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim=8, base=1e4):
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, length):
        phases = torch.outer(torch.arange(length).float(), self.inv_freq.float())
        return phases.cos(), phases.sin()


rope = Rotary().to(torch.bfloat16)
exact = 1e4 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
assert (rope.inv_freq.double() - exact).abs().max() < 1e-7, "not guarded"
"""

# What the pages about the scan scan.
SOURCE = """import torch


class Rotary(torch.nn.Module):
    def __init__(self, inv_freq, max_positions):
        super().__init__()
        t = torch.arange(max_positions, dtype=torch.float32)
        self.cos = torch.outer(t, inv_freq).cos()
"""


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package as pip installs it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / EXAMPLE.name
    shutil.copytree(EXAMPLE, source)  # a build leaves files behind
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What "my-model" is to the pages: a tiny Llama's checkpoint."""
    from support import families
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    families.build("llama", layers=1).save_pretrained(folder)
    known = ("<unk>", "<pad>", "<s>", "</s>", "where", "a", "token", "is", "cos", "sin")
    words = {word: index for index, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reader(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, example: Path
) -> tuple[Path, dict[str, str]]:
    """The folder and the environment of somebody who reads the pages and types what they say."""
    tmp_path = tmp_path_factory.mktemp("reader")
    home = tmp_path / "reader"
    for folder in ("src", "path/to/models"):
        (home / folder).mkdir(parents=True)
        (home / folder / "rotary.py").write_text(SOURCE, encoding="utf-8")
    (home / "train.py").write_text(TRAIN, encoding="utf-8")
    for file in ("tests/data/configs/mistral-7b.json", "examples/zero3.json"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, home / file)
    (home / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1}\n', encoding="utf-8")
    shutil.copytree(checkpoint, home / "my-model")
    programs = tmp_path / "bin"
    programs.mkdir()
    main = "from safe_rope.cli.main import main; main()"
    for name, arguments in (("safe-rope", f"-c '{main}'"), ("python", "")):
        (programs / name).write_text(
            f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8"
        )
        (programs / name).chmod(0o755)
    path = [str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = surroundings() | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(example), *filter(None, sys.path)]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return home, environment
