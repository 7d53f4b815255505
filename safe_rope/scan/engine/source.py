"""One file's source: its encoding, its offsets, and the tree of the part that can hold a finding."""

from __future__ import annotations

import ast
import codecs
import contextlib
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate

from safe_rope.scan.engine import prefilter, reading


class Source:
    """Source text as UTF-8, with offsets that lead back to the bytes as read.

    Raises:
        SyntaxError, UnicodeDecodeError, LookupError: the declared encoding is unknown or wrong.
    """

    def __init__(self, data: bytes) -> None:
        self.encoding = reading.encoding(data).removesuffix("-sig")
        self.skipped = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        self.text = data[self.skipped :]
        self.editable = True  # whether offsets lead back to the bytes as read
        if self.encoding != "utf-8":
            decoded = self.text.decode(self.encoding)
            try:
                self.editable = decoded.encode(self.encoding) == self.text
            except UnicodeError:
                self.editable = False
            self.text = decoded.encode()
        self.reduced = False  # whether the tree is of a part of the text

    @cached_property
    def line_starts(self) -> list[int]:
        """The offset of each line in ``text``."""
        return [0, *accumulate(map(len, self.text.splitlines(True)))]

    @cached_property
    def lines(self) -> list[bytes]:
        """The lines of ``text``, less what is blank around each."""
        return [*map(bytes.strip, self.text.splitlines())]

    def offset(self, line: int, column: int) -> int:
        """Return the offset in ``text`` of ast's line (from 1) and column (bytes, from 0)."""
        starts = self.line_starts
        return starts[line - 1] + column if line <= len(starts) else len(self.text)

    def position(self, offset: int) -> tuple[int, int]:
        """Return line and column, both from 1, the column in characters."""
        line = bisect_right(self.line_starts, offset)
        start = self.line_starts[line - 1]
        if self._is_ascii:
            return line, offset - start + 1
        return line, len(self.text[start:offset].decode(errors="replace")) + 1

    @cached_property
    def _is_ascii(self) -> bool:
        return self.text.isascii()

    def as_read(self, offset: int) -> int:
        """Return the offset in the bytes as read that ``offset`` in ``text`` stands for, where editable."""
        if self.encoding == "utf-8" or not self.editable:
            return self.skipped + offset
        return self.skipped + len(self.text[:offset].decode().encode(self.encoding))

    def start(self, node: ast.expr) -> int:
        """Return the offset of a node's first byte in ``text``."""
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr) -> int:
        """Return the offset after a node's last byte in ``text``."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr) -> str:
        """Return the source of a node."""
        return self.text[self.start(node) : self.end(node)].decode()

    def parse(self, hits: list[int] | None = None) -> ast.Module:
        """Return the tree of the part that can matter, or of all; lines and columns are those of the whole.

        Args:
            hits: what a finding can hang on, by offset; without them all is parsed.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse``.
        """
        self.reduced = False
        if hits is not None and (part := prefilter.reduce(self.text, hits)) is not None:
            # A cut that falls into a string or a bracket, and a broken file: parse the whole.
            with contextlib.suppress(SyntaxError, ValueError):
                tree = ast.parse(part)
                self.reduced = True
                return tree
        return ast.parse(self.text.decode())
