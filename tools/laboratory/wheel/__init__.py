"""Build the wheel, and check it in a clean environment and with torch.

What is checked is the wheel and not the editable install. The exit status is 1 at the first thing that is
wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from _process import ToolError, run, say

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 900.0
STEP_LIMIT = 300.0

# Runs where only the base requirements are installed.
BARE = """
import importlib.metadata, importlib.util, sys
from pathlib import Path
import safe_rope

assert Path(safe_rope.__file__).is_relative_to(sys.prefix), safe_rope.__file__
assert importlib.util.find_spec("torch") is None, "the base requirements must not bring torch"
assert "torch" not in sys.modules
try:
    safe_rope.guard
except safe_rope.MissingDependencyError as error:
    assert "safe-rope[train]" in str(error), f"the message does not name the extra: {error}"
else:
    raise AssertionError("safe_rope.guard without torch must raise MissingDependencyError")
"""

# Runs with the training packages, and the wheel's folder before the editable install on the path.
TRAIN = """
import importlib.metadata, sys
from pathlib import Path
import safe_rope, safe_rope_patches

wheel = Path(sys.argv[1]).resolve()
for package in (safe_rope, safe_rope_patches):
    assert Path(package.__file__).resolve().is_relative_to(wheel), f"{package.__file__} is not from the wheel"
loaded = sorted(set(sys.modules) & {"torch", "transformers", "deepspeed"})
assert not loaded, f"import safe_rope loaded {loaded}"

points = importlib.metadata.entry_points(group="safe_rope.patches")
assert points, "the wheel has no entry point in the group safe_rope.patches"
for point in points:
    point.load()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

def logits(model):
    with torch.no_grad():
        return model(torch.arange(8).unsqueeze(0)).logits

config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
with safe_rope.guard():
    model = LlamaForCausalLM(config)
model = model.to(torch.bfloat16)
rotary = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
assert rotary, "found no rotary module in a Llama"
for module in rotary:
    assert module.inv_freq.dtype == torch.float32, f"inv_freq became {module.inv_freq.dtype}"
assert logits(model).isfinite().all()
print(f"guarded a Llama from the wheel; patches: {', '.join(sorted(point.name for point in points))}")
"""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ToolError(message)


def call(*command: str | Path, cwd: Path, path: Path | None = None) -> None:
    """Run a command that sees no package outside of its own environment but those in ``path``."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    status = run(command, cwd=cwd, env=env, limit=STEP_LIMIT)
    program = f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))[:60]}"
    check(status == 0, f"status {status} from {program}")


def copy_sources(target: Path) -> None:
    """Copy what git has or would add: an old build folder would put old files in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def build(folder: Path) -> Path:
    say("building the wheel")
    source = folder / "source"
    source.mkdir()
    copy_sources(source)
    options = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-build-isolation")
    call(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """Check that the wheel holds the files of both packages and no others."""
    packages = {"safe_rope": ROOT / "safe_rope", "safe_rope_patches": ROOT / "patches" / "safe_rope_patches"}
    expected = {"safe_rope/py.typed"}
    for package, folder in packages.items():
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, extra = sorted(expected - found), sorted(found - expected)
    check(not missing, f"the wheel lacks {missing}; see [tool.setuptools] in pyproject.toml")
    check(not extra, f"the wheel has what the packages do not: {extra}")


def check_bare(wheel: Path, folder: Path) -> None:
    say("installing it without extras in a clean environment")
    call(sys.executable, "-m", "venv", folder / "bare", cwd=folder)
    python = folder / "bare" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=folder)
    call(python, "-c", BARE, cwd=folder)


def check_train(wheel: Path, folder: Path) -> None:
    say("using it with the training packages")
    site = folder / "site"
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", site)
    call(sys.executable, "-m", "pip", "install", *options, wheel, cwd=folder)
    call(sys.executable, "-c", TRAIN, site, cwd=folder, path=site)


def arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(options: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            wheel = build(folder)
            check_content(wheel)
            check_bare(wheel, folder)
            check_train(wheel, folder)
    except ToolError as error:
        say(f"error: {error}")
        return 1
    say(f"{wheel.name} is right")
    return 0
