"""Byte search: which files, and which functions in them, can hold a finding. Parsing costs most of a scan."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache

# A file, function or method that cannot matter holds none of these.
_CALLS = (b"arange", b"cumsum", b".range(")
_SPACES = (b"lin", b"log")  # before "space": one search for both
# Functions of the same name in numpy and others, and sums of values made integer just before.
_FOREIGN = re.compile(rb"(?:\b(?:np|jnp|tf|numpy|mx|cp)|\.(?:long|int)\(\))\.$")
# A part or another shape of a tensor, or the tensor elsewhere.
_RESHAPED = rb"(?:\[[^\]\n]*\]|\.(?:unsqueeze|view|reshape|expand|flatten|to|float|c\w+)\([^()\n]*\))*"
_CAST = rb"\.(?:to|type|type_as|half|bfloat16)\((?![\w.]*device\))"
_IN_COMPANY = (
    (b"inv_freq", re.compile(rb"register|Buffer|Parameter|@|matmul|bmm|mm\(")),
    (b"inv_freq", re.compile(rb"inv_freq\w*" + _RESHAPED + _CAST)),
    (b"slopes", re.compile(rb"\.(?:to|type\w*|half|bfloat16)\(")),
    (b"alibi", re.compile(rb"\.(?:to|type\w*|half|bfloat16)\(")),
    (b"position_ids", re.compile(rb"position_ids" + _RESHAPED + _CAST)),
    (b"positions", re.compile(rb"positions" + _RESHAPED + _CAST)),
    (b"] = math.", re.compile(rb"math\.(?:sin|cos)\(")),
    (b"] = torch.", re.compile(rb"torch\.(?:sin|cos)\(")),
    (b"Buffer(", re.compile(rb"cos|sin|freq")),
    (b"register_buffer(", re.compile(rb"register_buffer\(\s*[rf]{0,2}[\"'][^\"'\n]*(?:cos|sin|freq)")),
)
_LISTED = rb"(?:(?:list|tuple)\(\s*|\[\s*(?:float\()?\w+\)? for \w+ in )?"
_TENSOR_OF = rb"tensor\(\s*(?:data=)?" + _LISTED
# A tensor of the numbers of a range.
_RANGE = re.compile(_TENSOR_OF + rb"range\(")
# A tensor of what is computed of each, within this many characters.
_COMPUTED_RANGE = re.compile(
    rb"tensor\(\s*(?:data=)?(?:\[|(?:list|tuple|sorted)\().{1,240}?(?: in |, |\()range\(", re.DOTALL
)
# How a variable begins to list what is computed, and a power on the line.
_LISTS = (b".append(", b".extend(", b" += [", b" = [", b" = list(", b" = tuple(")
_POWER = re.compile(rb"\s*[^\n]{0,160}?(?:\*\*|pow\(|exp\()")
# A variable that lists a range, and a tensor of what a variable lists.
_KEPT_RANGE = re.compile(rb"= " + _LISTED + rb"range\(")
_KEEPS = re.compile(rb"(\w+)(?:: [\w.\[\]]+)? $")
_OF_VARIABLE = re.compile(_TENSOR_OF + rb"([A-Za-z_]\w*)\s*[,)\]+[]")
_FACTOR = re.compile(rb"factors?\w*(?:: [\w.]+)? *=\s*\(?\s*\w+\.(?:tensor|full)\(")
# The function gets another name: calls through that hold no token, so nothing can be passed over.
_MENTIONED = re.compile(rb" as\b|[,)\n;\]\"']")
_QUALIFIED = re.compile(rb"(?:\.|import |getattr\(\w+, ?[\"'])(?:arange|linspace|logspace)$")
# A count of whole numbers that nothing on its line divides, multiplies or casts.
_COUNT = re.compile(
    rb"arange\(([\w., \[\]:+\-]*)(?:\([\w., \-]*\)[\w., \[\]:+\-]*)*"
    rb"(?:, (?:device|dtype)=[\w.]+)*\)[^\n/*]*(?=\n)"
)
# In the names of functions and methods that make a count floating.
_ARITHMETIC = rb"(?:pow|exp|log|sin|cos|sqrt|reciprocal|div|mul|outer)"
_FLOATING = re.compile(
    rb"\d\.|\.\d|\b\d+e[-+]?\d|float|half|double|\.to\(\w*(?:dtype|[^d]\))|type|" + _ARITHMETIC
)
_INTEGER_DTYPE = re.compile(rb"dtype=torch\.(?:long|int)\w*\b")
_WORD = re.compile(rb"\w")
_NAME = re.compile(rb"(?<![\w.])[A-Za-z_]\w*(?![\w.(\[=])")
_FRACTION = re.compile(rb" = [^\n]*?(?:[^/\n]/[^/\n]|\d\.\d|\b\d+e[-+]?\d)| = float\(")
_USED = re.compile(
    rb"(?:\[[^\]]*\]|\s*\.\w+\([^()]*\))*"
    rb"\s*(?:[/*]|\.(?:to|type\w*|half|bfloat16|\w*" + _ARITHMETIC + rb"\w*)\()"
    rb"|[^\n]*(?:\d\.|\)\s*[/*])"
)
_USING = re.compile(rb"[/*]\s*\(?\s*$|" + _ARITHMETIC + rb"\w*\([^\n]*\n?\s*$")
_ASSIGNED = re.compile(rb"\n *(\w+) = \(*$")
# Statements in which a count ends; a line of a longer expression does not look like them.
_SINK = re.compile(rb" *(?:return |[\w.\[\]]+\.(?:append|extend|copy_|register_buffer)\()")
_CALL = re.compile(rb"\w+\(")
_LONG = 1000  # characters of a line before and after a count; it is read as often as it has counts
_MANY = 30  # searches of the text for a name each, which take as long as one for any
# What a buffer or an attribute of self is called that holds more than a parameter or a module.
_ATTRIBUTE = re.compile(
    rb"""(?:register_buffer\(\s*["']|\bself\.)(\w+)"""
    rb"""(?=["'],|(?:: [\w.]+)? = (?!nn\.|config\.|[A-Z]|\w+\n))"""
)
# What makes a count floating by itself, and not by the dtype of an activation.
_FLOATS = re.compile(
    rb"dtype=torch\.(?:float|double)|arange\([^\n]*\d(?:\.|e\d)|space\(|\)\s*[/*]|[/*]\s*\(?torch\.a|exp\(|pow\("
)
# A parameter that says nothing about itself, or only that it is a dtype.
_UNTYPED = re.compile(rb"[(,]\s*(?!self\b|cls\b)\w+ *(?:[,)]|=)|torch\.dtype")
# What gives a variable of the module another value when a function runs.
_REBINDS = re.compile(rb"\n +global \w")
_TOP_LEVEL = re.compile(rb"\n(?=[A-Za-z_@])")
_MEMBER = re.compile(rb"\n(?=    [A-Za-z_@])")
_COMPOUND = re.compile(rb"from |import |if |elif |else\b|try\b|except\b|finally\b|with |for |while ")
_DEFINITION = re.compile(
    rb"(?:    )?(?:@[^\n]*\n(?:[ )\]}][^\n]*\n)*?(?:    )?)*(?:async )?(def|class) (\w+)"
)


def occurrences(text: bytes) -> list[int]:
    """Return the offsets, ascending, of what a finding can hang on; none spares the parse."""
    if b"torch" not in text and b"arange" not in text:
        return []
    found = [
        offset
        for token in _CALLS
        for offset in _all(text, token)
        if not _FOREIGN.search(text, *_before(offset))
    ]
    found += [offset for offset in _spaces(text) if not _FOREIGN.search(text, *_before(offset))]
    if found and not aliased(text):
        found = [offset for offset in found if not _is_count(text, offset)]
    for token, company in _IN_COMPANY:
        found += [
            offset for offset in _all(text, token) if company.search(text, max(offset - 60, 0), offset + 120)
        ]
    if b"range(" in text:
        found += [match.start() for match in _RANGE.finditer(text)]
        found += [match.start() for match in _COMPUTED_RANGE.finditer(text)]
        found += _of_variables(text)
        found += _of_powers(text)
    if b".tensor(" in text or b".full(" in text:
        found += [match.start() for match in _FACTOR.finditer(text)]
    return sorted(found)


def _of_variables(text: bytes) -> Iterator[int]:
    """Yield where a tensor is made of a variable that lists a range."""
    starts = [match.start() for match in _KEPT_RANGE.finditer(text)]
    names = {name[1] for at in starts if (name := _KEEPS.search(text, max(at - 60, 0), at)) is not None}
    return (
        (match.start() for match in _OF_VARIABLE.finditer(text) if match[1] in names) if names else iter(())
    )


def _of_powers(text: bytes) -> Iterator[int]:
    """Yield where a tensor is made of a variable that lists powers."""
    known: dict[bytes, bool] = {}
    for match in _OF_VARIABLE.finditer(text):
        name = match[1]
        if name not in known:
            starts = ((name + begins, at) for begins in _LISTS for at in _all(text, name + begins))
            known[name] = any(_POWER.match(text, at + len(begins)) is not None for begins, at in starts)
        if known[name]:
            yield match.start()


def _spaces(text: bytes) -> Iterator[int]:
    """Yield where ``linspace`` and ``logspace`` begin."""
    return (offset - 3 for offset in _all(text, b"space") if text[max(offset - 3, 0) : offset] in _SPACES)


def _before(offset: int) -> tuple[int, int]:
    return max(offset - 12, 0), offset


@lru_cache(maxsize=2)
def aliased(text: bytes) -> bool:
    """Say whether a constructor is reachable under a name that the search does not know."""
    ends = [offset + 6 for offset in _all(text, b"arange")]
    ends += [offset + 8 for offset in _spaces(text)]
    return any(
        _MENTIONED.match(text, end) is not None and _QUALIFIED.search(text, max(end - 26, 0), end) is not None
        for end in ends
    )


def _all(text: bytes, token: bytes, start: int = 0, end: int | None = None) -> Iterator[int]:
    position = text.find(token, start, end)
    while position >= 0:
        yield position
        position = text.find(token, position + 1, end)


def _is_count(text: bytes, offset: int) -> bool:
    """Say whether an ``arange`` is integer and stays so, as far as one line and its variable's uses show."""
    begin, end = text.rfind(b"\n", 0, offset) + 1, text.find(b"\n", offset, offset + _LONG)
    match = _COUNT.match(text, offset) if end >= 0 and offset - begin < _LONG else None
    if match is None:
        return False
    line = text[begin : match.end()]
    if b"dtype" in line:
        line = _INTEGER_DTYPE.sub(b"", line)
    if b"/" in line or b"*" in line or b":=" in line or b"dtype" in line or _FLOATING.search(line):
        return False
    if _takes_float(text, offset, match[1] or b""):
        return False
    name, equals, _ = line.partition(b" = ")
    if line.count(b"(") != line.count(b")") or line.count(b"[") != line.count(b"]"):
        return False  # goes on in another line
    if not equals or b"(" in name:
        return _SINK.match(line) is not None
    name = name.strip()
    if name.startswith(b"self.") and name[5:].replace(b"_", b"a").isalnum():
        return True  # rules do not follow attributes
    if not name.replace(b"_", b"a").isalnum():
        return False
    end = text.find(b"\n    def ", offset)
    return _last_float(text, name, end if end >= 0 else len(text)) < offset


def _takes_float(text: bytes, offset: int, arguments: bytes) -> bool:
    """Say whether a bound is a variable that a division or a decimal fraction was assigned to."""
    start = max(text.rfind(b"def ", 0, offset), 0)
    for name in _NAME.findall(arguments):
        fractions = _fractions(text, name)
        at = bisect_left(fractions, start)
        if at < len(fractions) and fractions[at] < offset:
            return True
    return False


@lru_cache(maxsize=64)
def _fractions(text: bytes, name: bytes) -> list[int]:
    """Return where a division or a decimal fraction is assigned to a variable."""
    return [at for at in _all(text, b" " + name) if _FRACTION.match(text, at + 1 + len(name))]


def may_become_float(text: bytes, name: bytes) -> bool:
    """Say whether a line of the text divides, scales or casts a variable, or one that it is assigned to."""
    return _last_float(text, name, len(text)) >= 0


@lru_cache(maxsize=64)
def _last_float(text: bytes, name: bytes, end: int, depth: int = 2) -> int:
    """Return the last offset from which on a variable becomes floating before ``end``; else -1."""
    last = -1
    others: dict[bytes, int] = {}
    for offset in _all(text, name, 0, end):
        after = offset + len(name)
        if _WORD.match(text, after, end) or (offset and _WORD.match(text, offset - 1)):
            continue
        if _USED.match(text, after, end) or _USING.search(text, max(offset - 40, 0), offset):
            last = offset
        elif depth and (assigned := _ASSIGNED.search(text, max(offset - 80, 0), offset)) is not None:
            others[assigned[1]] = offset
    for other, offset in others.items():
        if other != name and offset > last:
            last = max(last, min(offset, _last_float(text, other, end, depth - 1)))
    return last


def reduce(text: bytes, hits: list[int]) -> bytes | None:
    """Blank the functions and methods that cannot matter; None where that is not known to be sound.

    Kept: module-level statements, whatever holds a hit, the constructors and statements of the classes
    of such methods, the methods that read what these assign, and whatever calls a kept function. Lines stay
    where they stood.
    """
    if len(text) < 4096 or b"\r" in text or b"\t" in text or aliased(text):
        return None
    pieces = _pieces(text, hits)
    starts = [piece.start for piece in pieces]

    def keep_at(offsets: Iterable[int]) -> None:
        for offset in offsets:
            pieces[bisect_right(starts, offset) - 1].kept = True

    keep_at(hits)
    if b" global " in text:
        keep_at(match.start() for match in _REBINDS.finditer(text))
    for hit in hits:
        piece = pieces[bisect_right(starts, hit) - 1]
        piece.floats = piece.floats or _FLOATS.search(text, max(hit - 60, 0), hit + 160) is not None
    for typed in (True, False):  # what calls a kept function, and what calls that
        names = set(_called_names(pieces, typed=typed))
        if len(names) > _MANY:
            keep_at(call.start() for call in _CALL.finditer(text) if call[0] in names)
        else:
            keep_at(offset for name in names for offset in _all(text, name))
    for piece in pieces:
        piece.header.kept |= piece.kept
        first = bisect_left(hits, piece.start)
        near = hits[first : bisect_left(hits, piece.start + len(piece.text), first)] if piece.kept else ()
        # The constructor of its class tells what self.x is.
        piece.header.built |= any(b"self." in text[max(hit - 300, 0) : hit + 300] for hit in near)
        if near and piece.header is not piece:
            piece.header.attributes.update(_ATTRIBUTE.findall(text, near[0] - 200, near[-1] + 1500))
    result = []
    for piece in pieces:
        member = piece.definition is None or (piece.header.built and b" __init__(" in piece.text)
        if piece.kept or (piece.header.kept and (member or piece.reads())):
            result.append(piece.text)
        elif _is_cut_string(piece.text):
            return None
        else:
            result.append(b"\n" * piece.text.count(b"\n"))
    return b"".join(result)


class _Piece:
    """A top-level statement, or a member of a class; ``header``: the statement that it is or is in."""

    def __init__(self, start: int, text: bytes, above: _Piece | None) -> None:
        self.start = start
        self.text = text
        self.definition = _DEFINITION.match(text)
        self.kept = self.definition is None and not text.startswith(b" ") and _may_bind(text)
        self.built = False
        self.floats = False  # whether where it runs decides what becomes of a hit
        self.attributes: set[bytes] = set()  # of a class: what is assigned near a hit
        self._outer = above.header if above is not None and text.startswith(b" ") else None

    @property
    def header(self) -> _Piece:
        return self._outer or self

    def reads(self) -> bool:
        """Say whether a method reads what another one makes of a hit."""
        return any(b"self." + name in self.text for name in self.header.attributes)


def _may_bind(piece: bytes) -> bool:
    """Say whether a module-level statement can matter, or begins or ends within a string."""
    return len(piece) < 400 or _COMPOUND.match(piece) is not None or _is_cut_string(piece)


def _is_cut_string(piece: bytes) -> bool:
    return piece.count(b'"""') % 2 == 1 or piece.count(b"'''") % 2 == 1


def _pieces(text: bytes, hits: list[int]) -> list[_Piece]:
    """Cut at top level, and between the members of the classes that hold a hit."""
    starts: list[int] = []
    cuts = _cut(text, 0, len(text), _TOP_LEVEL)
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        definition = _DEFINITION.match(text, start)
        a_class = definition is not None and definition[1] == b"class"
        hit = bisect_right(hits, start) < bisect_right(hits, end)
        starts += _cut(text, start, end, _MEMBER) if a_class and hit else [start]
    pieces: list[_Piece] = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        pieces.append(_Piece(start, text[start:end], pieces[-1] if pieces else None))
    return pieces


def _cut(text: bytes, start: int, end: int, pattern: re.Pattern[bytes]) -> list[int]:
    """Return where the pieces begin; a decorator stays with what it decorates."""
    cuts = [start]
    decorated = text.startswith(b"@", start) and pattern is _TOP_LEVEL
    for match in pattern.finditer(text, start, end):
        if not decorated:
            cuts.append(match.end())
        decorated = text.startswith((b"@", b"    @"), match.end())
    return cuts


def _called_names(pieces: list[_Piece], *, typed: bool) -> Iterator[bytes]:
    """Yield the names, each with a bracket, whose call sites tell where a kept function runs, and on what."""
    owner = b""
    for piece in pieces:
        if piece.definition is None:
            continue
        kind, name = piece.definition[1], piece.definition[2]
        if kind == b"class":
            owner = name
        signature = piece.text[piece.definition.end() : piece.text.find(b":\n", piece.definition.end())]
        if not piece.kept or kind != b"def" or name == b"forward":
            continue
        untyped = _UNTYPED.search(signature) is not None
        if name != b"__init__":
            if untyped or (typed and piece.floats):
                yield name + b"("
        elif untyped and b"config" not in signature:
            yield owner + b"("
