"""Comments that silence findings.

    x = torch.arange(n, dtype=torch.float32)  # noqa: SR001 n is at most 64
    x = torch.arange(n, dtype=torch.float32)  # safe-rope: ignore[SR001] n is at most 64
    # safe-rope: ignore-file[SR001] every count in this file is at most 64

A comment counts for the whole statement that it stands in. `# noqa` and `# safe-rope: ignore` without rule
names silence every rule, `ignore-file` in the whole file. Names of other linters in a `noqa` are none of our
business.
"""

from __future__ import annotations

import contextlib
import io
import re
import tokenize
from collections.abc import Container, Iterator, Sequence

from safe_rope._base.text import nearest
from safe_rope.scan.engine import Suppression
from safe_rope.scan.rules import RULES

_NAMES_OURS = re.compile(rb"noqa[^\r\n]*sr\d|safe-rope:")
_CODE = r"[A-Za-z]+[0-9]+"
_NOQA = re.compile(rf"#\s*noqa\b(?P<colon>\s*:\s*(?P<codes>{_CODE}(?:[\s,]+{_CODE}\b)*)?)?", re.IGNORECASE)
_IGNORE = re.compile(
    r"#\s*safe-rope:\s*ignore(?P<file>-file)?\b(?!-)(?:\s*\[(?P<codes>[^\]]*)\])?", re.IGNORECASE
)
_OURS = re.compile(r"SR[0-9]+")
_EVERY_LINE = 1 << 31
_LAYOUT = frozenset(
    {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
)


def matter(source: bytes, *, has_findings: bool) -> bool:
    """Return whether a file need be tokenized for its suppressions; most need not.

    Without findings only comments that name a rule matter: they are unused.
    """
    lowered = source.lower()
    if b"noqa" not in lowered and b"safe-rope:" not in lowered:
        return False
    return has_findings or _NAMES_OURS.search(lowered) is not None


def find(decoded: str) -> tuple[Suppression, ...]:
    """Return the suppressions of one file that parses."""
    found: list[Suppression] = []
    # A comment for another linter is not worth the tokenizer, which takes longer than the analysis.
    if list(_parse(decoded)):
        # The analyzer says what is wrong with a file that cannot be tokenized.
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            for first, last, comment in _comments(decoded):
                line, column = comment.start[0], comment.start[1] + 1
                for rules, whole in _parse(comment.string):
                    lines = (1, _EVERY_LINE) if whole else (first, last)
                    found.append(Suppression(*lines, line, column, rules))
    return tuple(found)


def _comments(decoded: str) -> Iterator[tuple[int, int, tokenize.TokenInfo]]:
    """Yield each comment with the first and last line of its logical line, or its own outside of one."""
    first = 0
    comments: list[tokenize.TokenInfo] = []
    # newline=None reads "\r" and "\r\n" as the line ends that they are for Python.
    for token in tokenize.generate_tokens(io.StringIO(decoded, newline=None).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if first:
                comments.append(token)
            else:
                yield line, line, token
        elif token.type == tokenize.NEWLINE:
            yield from ((first, line, comment) for comment in comments)
            first, comments = 0, []
        elif not first and token.type not in _LAYOUT:
            first = line


def _parse(comment: str) -> Iterator[tuple[tuple[str, ...] | None, bool]]:
    """Yield the rules that each suppression in the comment names, and whether it is for the whole file."""
    for match in _NOQA.finditer(comment):
        codes = [code.upper() for code in re.findall(_CODE, match["codes"] or "")]
        if ours := tuple(code for code in codes if _OURS.fullmatch(code)):
            yield ours, False
        elif not match["colon"]:
            yield None, False
    for match in _IGNORE.finditer(comment):
        whole = match["file"] is not None
        if match["codes"] is None:
            yield None, whole
        elif codes := [code.strip().upper() for code in match["codes"].split(",") if code.strip()]:
            yield tuple(codes), whole


def problems(
    suppressions: Sequence[Suppression], used: Container[tuple[int, str]], enabled: Container[str]
) -> Iterator[tuple[Suppression, str]]:
    """Yield what is wrong with suppressions: names of no rule, and rules that found nothing there.

    Args:
        suppressions: of one file.
        used: the pairs of a suppression's index and a rule of which it silenced a finding.
        enabled: the rules that were asked for; nothing can be said about the others.
    """
    for index, suppression in enumerate(suppressions):
        for rule in suppression.rules or ():
            if rule not in RULES:
                near = nearest(rule, RULES)
                hint = f"; did you mean {near}?" if near else ""
                yield suppression, f"suppression names no rule of safe-rope: {rule}{hint}"
            elif rule in enabled and (index, rule) not in used:
                yield suppression, f"unused suppression: {rule} finds nothing in this statement"
