"""The scripts that the guides show: the same text as in examples/guides, and they run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from _process import free_port
from markdown import PAGES, ROOT, blocks
from support.children import launch

SCRIPTS = sorted((ROOT / "examples" / "guides").glob("*.py"))
SECONDS = 300
NEEDS = {"lightning_module": "lightning", "trl_sft": "trl"}
RANKED = ("deepspeed_zero3", "fsdp")


def test_the_guides_show_the_scripts() -> None:
    shown = [block.text for page in PAGES if page.parent.name == "guides" for block in blocks(page)]
    for script in SCRIPTS:
        assert script.read_text(encoding="utf-8") in shown, script.name


# What needs neither ranks nor another package is run by test_docs, from the page.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("name", [*NEEDS, *RANKED])
def test_a_script_runs(name: str, reader: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    home, environment = reader
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    begin = [sys.executable]
    if name in RANKED:
        begin += ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    script = str(ROOT / "examples" / "guides" / f"{name}.py")
    command = ["env", "-C", str(home), *begin, script]
    status, output = launch(command, environment | {"LOCAL_SIZE": "2"}, tmp_path / "log", SECONDS)
    assert status == 0, output[-3000:]
