"""`safe-rope patches`: the table is the registry's, the page's is the command's, and the record is true."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from command_line import ROOT, run

from safe_rope import registry
from safe_rope.cli import _patch_releases
from safe_rope.cli.main import main

pytestmark = pytest.mark.contract


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["patches", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_patch_is_listed_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    families = [patch.family for patch in registry.supported()]
    listed = json.loads(output(capsys, "--format", "json"))
    assert [entry["family"] for entry in listed["patches"]] == families
    for style in ("text", "markdown"):
        text = output(capsys, "--format", style)
        assert all(family in text for family in families)


def test_the_readme_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    table = output(capsys, "--format", "markdown")
    assert f"begin -->\n{table}<!--" in page, "run: safe-rope patches --update docs/architectures.md"


def test_the_record_is_what_the_installed_release_has() -> None:
    record, pair = _patch_releases.read(), _patch_releases.installed()
    ours = [p for p in registry.supported() if p.modules[0].startswith("transformers.")]
    recorded = record["families"].get(pair["transformers"])
    if recorded is None:
        pytest.skip(f"transformers {pair['transformers']} is not one of the tested releases")
    assert recorded == _patch_releases.covered(ours), "run: safe-rope patches --record, for each version pair"
    releases = [(known["transformers"], known["deepspeed"]) for known in record["pairs"]]
    assert (pair["transformers"], pair["deepspeed"]) in releases  # of torch, others are tested outside CI


def test_what_the_record_says_can_be_imported() -> None:
    record, pair = _patch_releases.read(), _patch_releases.installed()
    families = record["families"].get(pair["transformers"], [])
    for patch in registry.supported():
        if patch.family not in families:
            continue
        found = []
        for name in patch.modules:
            try:
                spec = importlib.util.find_spec(name)
            except ModuleNotFoundError:
                spec = None
            found.append(spec is not None)
        assert any(found), patch.family


def test_an_update_replaces_what_is_between_the_marks_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    marks = "<!-- safe-rope patches: begin -->", "<!-- safe-rope patches: end -->"
    file.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n", encoding="utf-8")
    output(capsys, "--update", str(file))
    table = output(capsys, "--format", "markdown")
    assert file.read_text(encoding="utf-8") == f"before\n{marks[0]}\n{table}{marks[1]}\nafter\n"
    file.write_text("no marks\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["patches", "--update", str(file)])
    assert ended.value.code == 2
    assert file.read_text(encoding="utf-8") == "no marks\n"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["patches", "--update", str(tmp_path / "missing.md")])
    assert "missing.md' does not exist" in capsys.readouterr().err


def test_the_list_needs_no_torch(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    for name in ("torch", "transformers", "deepspeed"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    status, out, err = run(tmp_path / "tmp", "patches", path=str(hidden))
    assert (status, err) == (0, "")
    assert "llama" in out
