"""Reads files and splits source into the lines that Python counts."""

from __future__ import annotations

import codecs
import io
import os
import platform
import re
import stat
import tokenize
from typing import BinaryIO

# A larger file is data, not code; parsing it would take about 40 times its size of memory.
MAX_BYTES = 20_000_000
# Most of a notebook is the pictures in its outputs.
MAX_NOTEBOOK_BYTES = 200_000_000

_NEWLINE = re.compile(r"\r\n|\r|\n")


class UnreadableError(Exception):
    """A file cannot be read, is no regular file, or is larger than `MAX_BYTES`."""


def is_notebook(path: str) -> bool:
    """Return whether a path names a Jupyter notebook."""
    return path.endswith(".ipynb")


def reader() -> str:
    """Return what a message about a syntax error says of the Python that reads."""
    return f"read by Python {platform.python_version()}; newer syntax needs a newer one"


def read(path: str) -> bytes:
    """Return a file's bytes.

    Raises:
        UnreadableError: with a message that says why.
    """
    try:
        # Opening a pipe without a writer blocks for ever: ask what kind of file it is first.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("not a regular file")
        with open(path, "rb", buffering=0) as file:
            return limited(file, MAX_NOTEBOOK_BYTES if is_notebook(path) else MAX_BYTES, found.st_size)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error


def limited(file: BinaryIO | io.RawIOBase, limit: int = MAX_BYTES, expected: int = 1 << 20) -> bytes:
    """Return all bytes of an open file.

    Args:
        file: open for reading, from its position on.
        limit: bytes.
        expected: the file's size in bytes as far as it is known; a larger buffer costs its page faults.
    Raises:
        UnreadableError: there are more than the limit.
    """
    pieces: list[bytes] = []
    size, ask = 0, max(expected, 1)
    while piece := file.read(min(ask, limit + 1 - size)):
        pieces.append(piece)
        size += len(piece)
        ask = 1 << 16 if size >= expected else expected - size
        if size > limit:
            raise UnreadableError(f"larger than {limit:,} bytes, not scanned")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def encoding(source: bytes) -> str:
    """Return the encoding of Python source by its BOM or PEP 263 declaration.

    Raises:
        SyntaxError: the declared encoding is unknown, or not that of the BOM.
    """
    head = source.split(b"\n", 2)[:2]
    if not source.startswith(codecs.BOM_UTF8) and not any(b"coding" in line for line in head):
        return "utf-8"
    return tokenize.detect_encoding(io.BytesIO(source).readline)[0]


def lines(decoded: str) -> list[str]:
    """Split at the line ends that Python knows: not at form feeds or Unicode separators."""
    return _NEWLINE.split(decoded) if "\r" in decoded else decoded.split("\n")
