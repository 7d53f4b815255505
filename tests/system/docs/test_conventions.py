"""What other tools read beside the code: citation, forms, workflows, the versions that they name."""

from __future__ import annotations

import re
import sys

import pytest
from markdown import ROOT

from safe_rope._base.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")


def test_every_file_names_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_forms_and_workflows_parse_and_name_what_exists() -> None:
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(files) == 2
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["name"]
        assert all((ROOT / name).exists() for name in re.findall(r"\btools/\w+", text))


def test_the_pythons_are_those_of_the_wide_matrix() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)}
    lines = (ROOT / "requirements" / "wide.txt").read_text(encoding="utf-8").splitlines()
    minors = [int(minor) for line in lines for minor in re.findall(r"^3\.(\d+) ", line)]
    assert named == {f"3.{minor}" for minor in range(min(minors), max(minors) + 1)}
    assert project["requires-python"] == f">=3.{min(minors)}"


def test_the_site_has_every_page() -> None:
    shown = set(re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M))
    assert shown == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
