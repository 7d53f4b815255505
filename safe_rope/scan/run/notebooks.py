"""Notebooks: their code cells as one Python source, and the way back into the file's bytes.

All code cells of a notebook are analyzed together, so that an import in one cell counts in the next. What the
analyzer says about that source is mapped to the `.ipynb` file: a line and column of the file, and edits of
its bytes. A fix changes only the characters that it is about.
"""

from __future__ import annotations

import ast
import bisect
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from safe_rope.scan.engine import Diagnostic, Edit, reader
from safe_rope.scan.run.json_spans import Spans, Text

_PYTHON_MAGICS = frozenset(
    {"time", "timeit", "capture", "prun", "python", "python3", "debug", "memray_flamegraph"}
)
_SHELL = re.compile(r"^([ \t]*)([%!?].*)$")
_ASSIGNED = re.compile(r"^([^=#'\"]*=[ \t]*)([%!].*)$")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HELP = re.compile(r"^([ \t]*)([\w.*]+\?\??[ \t]*)$")


class NotebookError(Exception):
    """The file is no notebook that can be read."""


@dataclass(slots=True)
class Notebook:
    """The code cells of one notebook as Python source."""

    raw: str
    offset: int
    source: str = ""
    # Of each character of the source: its cell, its string (None: a line end added after a cell) and where in
    # the file it starts and ends.
    places: list[tuple[int, Text | None, int, int]] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def position(self, line: int, column: int, *, end: bool = False) -> tuple[int, int]:
        """Return the line and column in the file of a line and column of the source."""
        offset = self.starts[line - 1] + column - 1
        raw = self._end(offset - 1) if end else self._start(offset)
        if raw is None:
            raw = self._end(max(offset - 1, 0)) or 0
        before = self.raw[:raw]
        return before.count("\n") + 1, raw - (before.rfind("\n") + 1) + 1

    def cell(self, line: int) -> tuple[int, int]:
        """Return the number of the code cell, and the line in it, of a line of the source."""
        cell = self.places[self.starts[line - 1]][0]
        first = next(number for number, (other, *_) in enumerate(self.places) if other == cell)
        return cell, line - bisect.bisect_right(self.starts, first) + 1

    def edit(self, edit: Edit) -> Edit | None:
        """Return the edit of the file that an edit of the source means; None if it has no simple one."""
        encoded = self.source.encode()
        start, end = (len(encoded[:place].decode()) for place in (edit.start, edit.end))
        first, after = self._start(start), self._end(end - 1)
        if start == end:
            first = after = after if first is None else first
        elif self.places[start][1] is not self.places[end - 1][1]:
            return None
        if first is None or after is None or "\n" in edit.replacement:
            return None
        before, inside = (len(text.encode()) for text in (self.raw[:first], self.raw[first:after]))
        return Edit(self.offset + before, self.offset + before + inside, json.dumps(edit.replacement)[1:-1])

    def _start(self, offset: int) -> int | None:
        known = 0 <= offset < len(self.places) and self.places[offset][1]
        return self.places[offset][2] if known else None

    def _end(self, offset: int) -> int | None:
        known = 0 <= offset < len(self.places) and self.places[offset][1]
        return self.places[offset][3] if known else None


def load(data: bytes, path: str) -> Notebook:
    """Return a notebook's Python source; no source at all if its language is another.

    Raises:
        NotebookError: the file is not a notebook of nbformat 4.
    """
    bom = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    try:
        raw = data[bom:].decode()
        document = Spans().decode(raw)
    except (ValueError, RecursionError) as error:
        raise NotebookError(f"not a notebook: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise NotebookError("not a notebook of nbformat 4: it has no list of cells")
    notebook = Notebook(raw, bom)
    if _language(document) != "python":
        return notebook
    for number, texts in enumerate(_code_cells(document), start=1):
        code = _SURROGATE.sub("?", "".join(texts))
        python, problem = _as_python(code)
        for text in texts:
            notebook.places += [(number, text, *span) for span in text.spans(raw)]
        if not code.endswith("\n"):
            notebook.places.append((number, None, 0, 0))
            python += "\n"
        notebook.source += python
        if problem and texts:
            line = raw.count("\n", 0, texts[0].start) + 1
            notebook.errors.append(Diagnostic(path, line, 1, f"code cell {number}: {problem}"))
    notebook.starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", notebook.source))]
    return notebook


def _language(document: dict[str, object]) -> str:
    metadata = document.get("metadata")
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        section = metadata.get(key) if isinstance(metadata, dict) else None
        language = section.get(name) if isinstance(section, dict) else None
        if isinstance(language, str):
            return "python" if language.lower().startswith(("python", "ipython")) else language
    return "python"


def _code_cells(document: dict[str, object]) -> Iterator[list[Text]]:
    cells = document["cells"]
    for cell in cells if isinstance(cells, list) else ():
        kind = cell.get("cell_type") if isinstance(cell, dict) else None
        if kind != "code":
            continue
        source = cell.get("source")
        texts = source if isinstance(source, list) else [source]
        yield [text for text in texts if isinstance(text, Text) and text]


def _as_python(code: str) -> tuple[str, str | None]:
    """Return a cell's code with magics masked, character for character, and why it does not parse."""
    problem = _problem(code)
    if problem is None:
        return code, None
    masked = _mask(code)
    problem = _problem(masked)
    return (masked, None) if problem is None else (_blank(code), problem)


def _problem(code: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        return f"syntax error: {error.msg} (line {error.lineno}, {reader()})"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"cannot be parsed: {error or type(error).__name__}"
    return None


def _mask(code: str) -> str:
    magic = re.match(r"\s*%%\s*(\w*)", code)
    if magic and magic[1] not in _PYTHON_MAGICS:
        return _blank(code)
    masked = ""
    continued = False
    for line in code.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        match = _SHELL.match(body) or _ASSIGNED.match(body) or _HELP.match(body)
        if continued:
            masked += _blank(line)
        elif match:
            masked += match[1] + "0" + " " * (len(match[2]) - 1) + line[len(body) :]
        else:
            masked += line
        continued = body.endswith("\\") and (continued or match is not None)
    return masked


def _blank(code: str) -> str:
    return re.sub(r"[^\r\n]", " ", code)
