"""Turns one file's bytes into its `FileResult`; whatever a file does to the analyzer ends in a diagnostic."""

from __future__ import annotations

import warnings
from dataclasses import replace

from safe_rope.scan.engine import Diagnostic, FileResult, Finding, Hit, Suppression, reading
from safe_rope.scan.engine.finding import MAX_LINES
from safe_rope.scan.run import notebooks, suppressions
from safe_rope.scan.run.analyze import SourceError, analyze, generated_from


def scan_source(data: bytes, path: str) -> FileResult:
    """Return what the file's content says; never raises for what the content is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scanned file's invalid escapes are not our output
            return _scan_notebook(data, path) if reading.is_notebook(path) else _scan_file(data, path)
    except SourceError as error:
        problem = error.diagnostic
    except notebooks.NotebookError as error:
        problem = Diagnostic(path, 0, 0, str(error))
    except Exception as error:  # one file must never stop the scan of the others
        kind = type(error).__name__
        problem = Diagnostic(path, 0, 0, f"internal error, please report it: {kind}: {error}")
    return FileResult(path, errors=(problem,))


def _scan_file(data: bytes, path: str) -> FileResult:
    findings = analyze(data, path)
    commented = suppressions.matter(data, has_findings=bool(findings))
    if not findings and not commented:
        return FileResult(path)
    encoding = reading.encoding(data)
    decoded = data.decode(encoding, "replace" if encoding.startswith("utf-8") else "strict")
    comments = suppressions.find(decoded) if commented else ()
    lines = reading.lines(decoded)
    hits = tuple(_hit(finding, finding, lines, comments) for finding in findings)
    return FileResult(path, hits, comments, generated_from(data) if hits else None)


def _hit(finding: Finding, shown: Finding, lines: list[str], comments: tuple[Suppression, ...]) -> Hit:
    silenced = tuple(index for index, comment in enumerate(comments) if comment.covers(finding))
    last = min(shown.end_line, shown.line + MAX_LINES - 1)
    return Hit(shown, tuple(lines[shown.line - 1 : last]), silenced)


def _scan_notebook(data: bytes, path: str) -> FileResult:
    notebook = notebooks.load(data, path)
    code = notebook.source.encode()
    errors = tuple(notebook.errors)
    try:
        findings = analyze(code, path)
    except SourceError as error:
        return FileResult(path, errors=(*errors, error.diagnostic))
    if not notebook.complete:  # what is not read may call anything
        findings = [
            replace(one, fix=replace(one.fix, safe=False)) if one.fix is not None else one for one in findings
        ]
    comments: tuple[Suppression, ...] = ()
    if suppressions.matter(code, has_findings=bool(findings)):
        comments = suppressions.find(notebook.source)
    lines = notebook.raw.split("\n")
    hits = tuple(_hit(finding, _in_file(finding, notebook), lines, comments) for finding in findings)
    places = [notebook.position(comment.line, comment.column) for comment in comments]
    moved = (
        replace(comment, line=line, column=column)
        for comment, (line, column) in zip(comments, places, strict=True)
    )
    return FileResult(path, hits, tuple(moved), errors=errors)


def _in_file(finding: Finding, notebook: notebooks.Notebook) -> Finding:
    """Return a finding about a notebook's code as one about the notebook's file."""
    line, column = notebook.position(finding.line, finding.column)
    end_line, end_column = notebook.position(finding.end_line, finding.end_column, end=True)
    cell, line_in_cell = notebook.cell(finding.line)
    fix = finding.fix
    if fix is not None:
        edits = [edit for edit in map(notebook.edit, fix.edits) if edit is not None]
        fix = replace(fix, edits=tuple(edits)) if len(edits) == len(fix.edits) else None
    message = f"{finding.message} (code cell {cell}, line {line_in_cell})"
    return replace(
        finding, line=line, column=column, end_line=end_line, end_column=end_column, message=message, fix=fix
    )
