"""What the pages say works: every block of code is run, every link leads somewhere."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import PAGES, ROOT, Block, blocks, links

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHELL = ("sh", "console")
NOT_CODE = ("text", "mermaid", "")  # a block that names no language is not run
LANGUAGES = ("python", *SHELL, "json", "toml", "yaml", *NOT_CODE)

# The programs that a page may call, and whether a test can do so: installing needs a network, and the
# commands in tools/ make an environment of their own (tests/system/tools/test_tools.py).
PROGRAMS = {"safe-rope": True, "python": True, "eval": True, "pip": False, "git": False, "tools/": False}
# A finding is no failure of the page.
MAY_FIND = ("scan", "audit", "compare")
SECONDS = 400
# What the blocks of a page take for granted.
PRELUDES = {
    "audit.md": "import safe_rope\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('my-model')\n"
}

pytestmark = pytest.mark.timeout(SECONDS + 30)

Reader = tuple[Path, dict[str, str]]


def run(command: list[str], reader: Reader) -> subprocess.CompletedProcess[str]:
    home, environment = reader
    return subprocess.run(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def pages_with(*languages: str) -> list[Path]:
    return [
        page for page in PAGES if any(b.language in languages and b.not_run is None for b in blocks(page))
    ]


def runnable(page: Path, *languages: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in languages and block.not_run is None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_known_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r} is none of {LANGUAGES}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{page.name}: {target}, there are {anchors}"


def written(source: str) -> str:
    """The Python of a page as a reader writes it who has an older transformers."""
    older = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (4, 56)
    return source.replace(", dtype=torch.bfloat16)", ", torch_dtype=torch.bfloat16)") if older else source


@pytest.fixture(scope="session")
def read(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The status and the output of the Python of every page, each in a process and a folder of its own."""
    home = reader[0]
    pages = []
    for page in pages_with("python"):
        folder = tmp_path_factory.mktemp("page") / "reader"
        shutil.copytree(home, folder)
        begin = [(PRELUDES[page.name], 1)] if page.name in PRELUDES else []
        parts = begin + [(written(block.text), block.line) for block in runnable(page, "python")]
        pages.append([str(page.relative_to(ROOT)), str(folder), parts])
    asked = home.parent / "pages.json"
    asked.write_text(json.dumps(pages), encoding="utf-8")
    done = run([sys.executable, str(Path(__file__).with_name("page_runner.py")), str(asked)], reader)
    assert done.returncode == 0, done.stderr[-3000:]
    return {page: (status, output) for page, status, output in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, read: dict[str, tuple[int, str]]) -> None:
    """In one process per page, as a reader would paste one block after the other."""
    status, output = read[str(page.relative_to(ROOT))]
    assert status == 0, output[-3000:]
    if importlib.metadata.version("transformers").startswith("5."):  # module paths are those of the newest
        found = blocks(page)
        for before, block in itertools.pairwise(found):
            if before.language == "python" and block.language == "text":
                for line in block.text.splitlines():
                    shown = line.partition("…")[0].rstrip()
                    assert shown in output, f"{block}: {shown!r} is not in\n{output}"


# A command that stands on several pages is run once.
DONE: set[str] = set()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(*SHELL), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, reader: Reader) -> None:
    for block in runnable(page, *SHELL):
        for command in commands(block):
            if command in DONE and "$ " not in block.text:
                continue
            DONE.add(command)
            program = next((name for name in PROGRAMS if command.startswith(name)), None)
            assert program, f"{block}: {command!r} is none of {', '.join(PROGRAMS)}; mark it as not run"
            if program == "tools/":
                assert (ROOT / command.split()[0]).exists(), f"{block}: {command}"
            if not PROGRAMS[program]:
                continue
            done = run(["bash", "-c", command], reader)
            allowed = (0, 1) if command.split()[1] in MAY_FIND else (0,)
            assert done.returncode in allowed, f"{block}: {command}: {done.stderr[-3000:]}"
            if "$ " in block.text:
                compare(block, command, done.stdout + done.stderr)


def commands(block: Block) -> list[str]:
    """The commands of a block: its lines, or with a prompt somewhere those that have one."""
    lines = [line.strip() for line in block.text.splitlines() if line.strip()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if not line.startswith("#")]


def compare(block: Block, command: str, output: str) -> None:
    """The output that the page shows after a command, up to an ellipsis in each line, is what it prints."""
    lines = block.text.splitlines()
    start = lines.index(f"$ {command}") + 1
    for line in lines[start:]:
        if line.startswith("$ "):
            break
        shown = line.partition("…")[0].rstrip()
        assert shown in output, f"{block}: {command!r} does not print {shown!r} but\n{output[-2000:]}"


@pytest.mark.parametrize("page", pages_with("json", "toml", "yaml"), ids=lambda page: page.name)
def test_the_data_of_a_page_parses(page: Path) -> None:
    for block in runnable(page, "json", "toml", "yaml"):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
            assert yaml.safe_load(block.text)


def test_the_example_package_passes_its_own_tests(reader: Reader) -> None:
    tests = ROOT / "examples" / "safe-rope-myarch" / "tests"
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], reader)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_pages_name_the_installed_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {importlib.metadata.version('safe-rope')}" in changelog
