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
# What these are given is no code of the notebook.
_IDLE_MAGICS = frozenset({
    "alias", "autoreload", "autosave", "bash", "bookmark", "cat", "cd", "colors", "conda", "config", "cp",
    "env", "file", "hist", "history", "html", "javascript", "js", "latex", "load_ext", "ls", "man",
    "markdown", "matplotlib", "mkdir", "mv", "page", "pdoc", "pip", "precision", "pwd", "pycat", "quickref",
    "reload_ext", "rm", "rmdir", "script", "set_env", "sh", "svg", "system", "sx", "tensorboard",
    "unload_ext", "uv", "who", "who_ls", "whos", "writefile", "xmode",
})  # fmt: skip
_MAGIC = re.compile(r"%%?[ \t]*(\w+)")
_EXPANDED = re.compile(r"\{[^}]*\(")  # an expression in a magic that calls something
_SHELL = re.compile(r"^([ \t]*)([%!?].*)$")
_ASSIGNED = re.compile(r"^((?:[^=#'\"]|'[^']*'|\"[^\"]*\")*=[ \t]*)([%!].*)$")
_LEXEME = re.compile(r"#.*|\"\"\"|'''|\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?|[()\[\]{}]")
_CLOSING = {quote: re.compile(rf"(?:\\.|(?!{quote})[^\\])*{quote}") for quote in ('"""', "'''")}
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
    cells: dict[int, int] = field(default_factory=dict)  # where in the source each begins
    errors: list[Diagnostic] = field(default_factory=list)
    complete: bool = True  # whether no cell or magic may run code that the source does not have
    starts: list[int] = field(default_factory=list)

    def position(self, line: int, column: int, *, end: bool = False) -> tuple[int, int]:
        """Return the line and column in the file of a line and column of the source."""
        offset = self.starts[line - 1] + column - 1
        raw = self._end(offset - 1) if end else self._start(offset)
        if raw is None:
            raw = self._end(max(offset - 1, 0)) or 0
        return self.raw.count("\n", 0, raw) + 1, raw - (self.raw.rfind("\n", 0, raw) + 1) + 1

    def cell(self, line: int) -> tuple[int, int]:
        """Return the number of the code cell, and the line in it, of a line of the source."""
        cell = self.places[self.starts[line - 1]][0]
        return cell, line - bisect.bisect_right(self.starts, self.cells[cell]) + 1

    def edit(self, edit: Edit) -> Edit | None:
        """Return the edit of the file that an edit of the source means; None if it has no simple one."""
        start, end = edit.start, edit.end
        if not self.source.isascii():
            encoded = self.source.encode()
            start, end = (len(encoded[:place].decode()) for place in (start, end))
        first, after = self._start(start), self._end(end - 1)
        if start == end:
            first = after = after if first is None else first
        elif self.places[start][1] is not self.places[end - 1][1]:
            return None
        if first is None or after is None or "\n" in edit.replacement:
            return None
        before = first if self.raw.isascii() else len(self.raw[:first].encode())
        inside = len(self.raw[first:after].encode())
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
        python, complete, problem = _as_python(code)
        notebook.complete &= complete
        notebook.cells[number] = len(notebook.places)
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


def _as_python(code: str) -> tuple[str, bool, str | None]:
    """Return a cell's code with magics masked, character for character, and why it does not parse.

    Between them: whether nothing that is masked may run code of the notebook.
    """
    problem = _problem(code)
    if problem is None:
        return code, True, None
    masked, complete = _mask(code)
    problem = _problem(masked)
    return (masked, complete, None) if problem is None else (_blank(code), False, problem)


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


def _mask(code: str) -> tuple[str, bool]:
    """Return code without its magics, and whether none of them may run code of the notebook."""
    magic = re.match(r"\s*%%[ \t]*(\w*)", code)
    if magic and magic[1] not in _PYTHON_MAGICS:
        return _blank(code), magic[1] in _IDLE_MAGICS
    masked, complete = "", True
    continued = False
    depth, quote = 0, ""  # the brackets and the string that are open
    for line in code.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        match = None
        if depth <= 0 and not quote and not masked.rstrip("\r\n").endswith("\\"):
            match = _SHELL.match(body) or _ASSIGNED.match(body) or _HELP.match(body)
        if continued:
            masked += _blank(line)
        elif match:
            masked += match[1] + "0" + " " * (len(match[2]) - 1) + line[len(body) :]
            complete &= not _runs_code(match[2])
        else:
            masked += line
            depth, quote = _open(body, depth, quote)
        continued = body.endswith("\\") and (continued or match is not None)
    return masked, complete


def _runs_code(magic: str) -> bool:
    """Say whether a line that is masked may run code of the notebook."""
    name = _MAGIC.match(magic)
    if name and name[1] in _PYTHON_MAGICS:
        return "(" in magic
    return bool(name and name[1] not in _IDLE_MAGICS) or _EXPANDED.search(magic) is not None


def _open(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Return how many brackets and which long string are open after a line, given those before it."""
    at = 0
    while match := (_CLOSING[quote].match if quote else _LEXEME.search)(line, at):
        at = match.end()
        if quote:
            quote = ""
        elif match[0] in _CLOSING:
            quote = match[0]
        else:
            depth += (match[0] in "([{") - (match[0] in ")]}")
    return depth, quote


def _blank(code: str) -> str:
    return re.sub(r"[^\r\n]", " ", code)
