"""Comments that silence findings.

    x = torch.arange(n, dtype=torch.float32)  # noqa: SR001 n is at most 64
    x = torch.arange(n, dtype=torch.float32)  # safe-rope: ignore[SR001] n is at most 64

A comment counts for the whole statement that it stands in. `# noqa` and `# safe-rope: ignore` without rule
names silence every rule. Names of other linters in a `noqa` are none of our business.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Container, Iterator, Sequence

from safe_rope._base.text import nearest
from safe_rope.scan.engine.result import Suppression

_NAMES_OURS = re.compile(rb"noqa[^\r\n]*sr\d|safe-rope:")
_CODE = r"[A-Za-z]+[0-9]+"
_NOQA = re.compile(rf"#\s*noqa\b(?P<colon>\s*:\s*(?P<codes>{_CODE}(?:[\s,]+{_CODE}\b)*)?)?", re.IGNORECASE)
_IGNORE = re.compile(r"#\s*safe-rope:\s*ignore\b(?:\s*\[(?P<codes>[^\]]*)\])?", re.IGNORECASE)
_OURS = re.compile(r"SR[0-9]+")
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
    if not any(rules is None or rules for rules in _parse(decoded)):
        return ()
    try:
        for first, last, comments in _statements(decoded):
            for line, column, comment in comments:
                found += [
                    Suppression(first or line, last, line, column + 1, rules)
                    for rules in _parse(comment)
                    if rules is None or rules
                ]
    except (tokenize.TokenError, SyntaxError):
        pass  # the analyzer says what is wrong with such a file
    return tuple(found)


def _statements(decoded: str) -> Iterator[tuple[int, int, list[tuple[int, int, str]]]]:
    """Yield (first line, last line, comments) of every logical line; first is 0 for comments outside one."""
    first = 0
    comments: list[tuple[int, int, str]] = []
    # newline=None reads "\r" and "\r\n" as the line ends that they are for Python.
    for token in tokenize.generate_tokens(io.StringIO(decoded, newline=None).readline):
        if token.type == tokenize.COMMENT:
            if not first:
                yield 0, token.start[0], [(*token.start, token.string)]
            else:
                comments.append((*token.start, token.string))
        elif token.type == tokenize.NEWLINE:
            if comments:
                yield first, token.start[0], comments
                comments = []
            first = 0
        elif not first and token.type not in _LAYOUT:
            first = token.start[0]


def _parse(comment: str) -> Iterator[tuple[str, ...] | None]:
    """Yield the rules that each suppression in the comment names; None silences all."""
    for match in _NOQA.finditer(comment):
        if match["codes"]:
            codes = [code.upper() for code in re.findall(_CODE, match["codes"])]
            yield tuple(code for code in codes if _OURS.fullmatch(code))
        elif not match["colon"]:
            yield None
    for match in _IGNORE.finditer(comment):
        if match["codes"] is None:
            yield None
        else:
            yield tuple(code.strip().upper() for code in match["codes"].split(",") if code.strip())


def problems(
    suppressions: Sequence[Suppression],
    used: Container[tuple[int, str]],
    enabled: Container[str],
    known: Collection[str],
) -> Iterator[tuple[Suppression, str]]:
    """Yield what is wrong with suppressions: names of no rule, and rules that found nothing there.

    Args:
        suppressions: of one file.
        known: every rule there is.
        used: the pairs of a suppression's index and a rule of which it silenced a finding.
        enabled: the rules that were asked for; nothing can be said about the others.
    """
    for index, suppression in enumerate(suppressions):
        for rule in suppression.rules or ():
            if rule not in known:
                near = nearest(rule, known)
                hint = f"; did you mean {near}?" if near else ""
                yield suppression, f"suppression names no rule of safe-rope: {rule}{hint}"
            elif rule in enabled and (index, rule) not in used:
                yield suppression, f"unused suppression: {rule} finds nothing in this statement"
