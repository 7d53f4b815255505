"""Plain English: sentences of the pages and of docstrings are short, and say what is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown import PAGES, ROOT

WORDS = 30
REFUSED = {
    r"\(s\)": "write the plural, or safe_rope._base.text.counted",
    r"\bof (its|their) own\b": "say whose it is, or leave it out",
    r"\bso that\b.*\bso that\b": "make two sentences of it",
    r"\b(no longer|used to be|previously|formerly|anymore|in the past|as before)\b": "say what is",
}
COLUMNS = 110
SOURCES = sorted((ROOT / "safe_rope").rglob("*.py"))
SENTENCE = re.compile(r"(?<=[.!?:;])\**\s+(?=[A-Z`*\[\"(])|\n\s*\n")


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a page and where it begins: no code, tables, headings or targets of links."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fenced, begin, held = False, 0, list[str]()
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        prose = not fenced and line.strip() and not re.match(r"\s*([|#<!`:]|:::)", line)
        if held and (not prose or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield begin, " ".join(held)
            held = []
        if prose:
            begin = begin if held else number
            held.append(re.sub(r"\]\([^)]*\)|\[|\]", "", line.strip().lstrip("-* ")))


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a file in paragraphs, without their lists of arguments and examples."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            line = getattr(node, "lineno", 1)
            for part in re.split(r"\n\s*\n", said or ""):
                if not re.match(r"(Args|Attributes|Returns|Raises|Yields|Source):| {4}|>>>", part):
                    yield line, " ".join(part.split())


def faults(text: str) -> Iterator[str]:
    for sentence in SENTENCE.split(text):
        is_list = sentence.count(",") * 3 > len(sentence.split())
        if len(sentence.split()) > WORDS and not is_list:
            yield f"{len(sentence.split())} words: {sentence[:90]} ..."
        for pattern, remedy in REFUSED.items():
            if re.search(pattern, sentence):
                yield f"{remedy}: {sentence[:90]} ..."


def found(files: list[Path]) -> list[str]:
    read = {".md": paragraphs, ".py": docstrings}
    return [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in files
        for line, text in read[file.suffix](file)
        for fault in faults(text)
    ]


@pytest.mark.parametrize("what", ["pages", "docstrings"])
def test_prose_is_plain(what: str) -> None:
    assert not found(PAGES if what == "pages" else SOURCES)


def test_no_message_leaves_the_plural_open() -> None:
    open_plurals = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.search(r"\w\(s\)(?!\?)", str(node.value))
    ]
    assert not open_plurals


def test_lines_of_prose_fit() -> None:
    wide = [f"{page.relative_to(ROOT)}:{number}" for page in PAGES for number in wide_lines(page)]
    assert not wide


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 750


def wide_lines(page: Path) -> Iterator[int]:
    """Yield the lines that are too long, outside of code and tables, or are a heading by accident."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        is_wide = len(line) > COLUMNS and not re.match(r"\s*[|<]", line)
        if not fenced and (is_wide or re.match(r"#\d", line)):  # Markdown takes "#1" for a heading
            yield number


def test_the_check_sees_what_it_refuses() -> None:
    assert list(faults("Two module(s) have a lock of their own.")) == [
        "write the plural, or safe_rope._base.text.counted: Two module(s) have a lock of their own. ...",
        "say whose it is, or leave it out: Two module(s) have a lock of their own. ...",
    ]
    assert [fault[:8] for fault in faults("word " * 30 + "word. Short. So that is it.")] == ["31 words"]
    assert len(list(faults("It is so that it is so that it ends."))) == 1
    assert len(list(faults("It no longer does."))) == 1


def test_the_check_sees_a_wide_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wide = "word " * 23
    page.write_text(f"{wide}\n\n```text\n{wide}\n```\n\n| {wide}|\nshort\n#7 of it\n", encoding="utf-8")
    assert list(wide_lines(page)) == [1, 9]
