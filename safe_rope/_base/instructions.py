"""What code does, one step after the other: the same on every Python, as far as that can be.

CPython 3.13 has one instruction for two loads or stores of local variables. From 3.12 on a comprehension
is in the code around it, and a slice is read and written by one instruction.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

_LOCAL = re.compile(r"(?:LOAD|STORE)_FAST")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_OPERATORS = ("+", "-", "*", "@", "/", "//", "%", "**", "&", "|", "^", "<<", ">>")
_PLAIN = {
    one.arg or 0
    for operator in _OPERATORS
    for one in dis.get_instructions(compile(f"a {operator} b", "", "eval"))
    if one.opname == "BINARY_OP"
}
"""Arguments of BINARY_OP that change nothing, other than those for ``a += b`` and its kin."""
_AWAY = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
_TAKING = ("POP_", "STORE_", "DELETE_")
_VIEWING = {
    *("view", "reshape", "chunk", "split", "unbind", "unflatten", "transpose", "narrow", "squeeze"),
    *("unsqueeze", "permute", "flatten", "select", "tensor_split", "swapaxes", "movedim", "view_as"),
    *("view_as_real", "view_as_complex", "mT", "T", "data", "detach"),
}
"""What gives a view of a tensor."""
_EACH = {"zip", "enumerate", "reversed", "list", "tuple"}
_BESIDE = {"STORE_ATTR": 0, "DELETE_ATTR": 0, "STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
"""What changes an attribute or a part, and how much of what says which lies on what is changed."""


class Step(NamedTuple):
    """One thing that code does."""

    name: str
    """The instruction's, as `dis` has it."""
    value: Any
    """What it names: a variable, an attribute, a constant."""
    offset: int
    depth: int
    """How many values are on the stack after it."""
    is_part: bool
    """Whether it takes a part: an index or a slice."""
    is_method: bool = False
    """Whether it takes an attribute to call it."""

    @property
    def loads(self) -> Any:
        """The variable that is loaded, None where none is."""
        return self.value if self.name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")) else None

    @property
    def attribute(self) -> str | None:
        """The attribute that is taken, None where none is."""
        return self.value if self.name in ("LOAD_ATTR", "LOAD_METHOD") else None


@functools.lru_cache(maxsize=256)
def steps(code: types.CodeType) -> tuple[Step, ...]:
    """Return what code does, without what functions in it do."""
    return tuple(_steps(code))


def _steps(code: types.CodeType) -> Iterator[Step]:
    depth, arriving = 0, dict[int, int]()
    for one in dis.get_instructions(code):
        depth = arriving.get(one.offset, depth)
        if one.opcode in _JUMPS:
            arriving[one.argval] = depth + dis.stack_effect(one.opcode, one.arg, jump=True)
        names = _LOCAL.findall(one.opname)
        if isinstance(one.argval, tuple) and len(names) == len(one.argval):
            for name, value in zip(names, one.argval, strict=True):
                depth += 1 if name.startswith("LOAD") else -1
                yield Step(name, value, one.offset, depth, is_part=False)
            continue
        depth += dis.stack_effect(one.opcode, one.arg, jump=False)
        is_part = one.opname in ("BINARY_SUBSCR", "BINARY_SLICE") or one.argrepr == "[]"
        yield Step(one.opname, one.argval, one.offset, depth, is_part, _is_method(one))
        if one.opname.startswith(_AWAY):
            depth = 0


def _is_method(one: dis.Instruction) -> bool:
    if sys.version_info < (3, 12):
        return one.opname == "LOAD_METHOD"
    return one.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and bool((one.arg or 0) & 1)


def is_in_place(step: Step) -> bool:
    """Whether a step may change its left operand in place: ``a += b`` and its kin."""
    return step.name.startswith("INPLACE") or (
        step.name == "BINARY_OP" and not step.is_part and step.value not in _PLAIN
    )


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code, and that of comprehensions and functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def rebound(done: tuple[Step, ...]) -> Iterator[tuple[int, str]]:
    """Yield each step that assigns or deletes a variable, and which; but no variable of a comprehension."""
    inner: dict[str, int] = {}  # the variables of a comprehension in the code, and how deep its result lies
    for at, one in enumerate(done):
        inner = {name: depth for name, depth in inner.items() if one.depth >= depth}
        if one.name == "LOAD_FAST_AND_CLEAR":
            inner[one.value] = one.depth - 1  # in place of what it goes through
        elif one.name.startswith(("STORE_FAST", "DELETE_FAST", "STORE_DEREF")) and one.value not in inner:
            yield at, one.value


def views(done: tuple[Step, ...], names: Collection[str]) -> set[str]:
    """Return ``names`` and the variables that hold what they hold, or a view of it.

    Those of ``for x in (q, k)``, of ``first, second = q.chunk(2, -1)`` and of ``part = q[..., :64]``.
    """
    found = {*names}
    for at, one in enumerate(done):
        if one.name.startswith("STORE_FAST"):
            before = at - 1
            while done[before].name.startswith("STORE_FAST"):
                before -= 1  # what is unpacked goes to several
            if not found.isdisjoint(_held(done, before)):
                found.add(one.value)
    return found


def _held(done: tuple[Step, ...], at: int | None) -> set[Any]:
    """Return the variables of which what step ``at`` leaves is a view, or one of several things."""
    if at is None or at < 0:
        return set()
    step = done[at]
    if step.loads is not None:
        return {step.loads}
    if step.name.startswith(("UNPACK", "GET_ITER", "FOR_ITER")) or step.attribute in _VIEWING:
        return _held(done, at - 1)
    if step.is_part:
        return _held(done, _left(done, at, step.depth))
    if step.name in ("BUILD_TUPLE", "BUILD_LIST"):
        items = range(step.depth, step.depth + step.value)
        return set().union(*(_held(done, _left(done, at, depth)) for depth in items))
    if not step.name.startswith("CALL") or "INTRINSIC" in step.name:
        return set()
    begins = 1 + next(
        index for index in reversed(range(-1, at)) if index < 0 or done[index].depth < step.depth
    )
    called = done[begins : begins + 3]
    of_module = called[0].name == "LOAD_GLOBAL" and any(one.attribute in _VIEWING for one in called)
    if of_module or any(one.loads in _EACH for one in called[:2]):
        return {one.loads for one in done[begins:at]}
    holder = _left(done, at, step.depth)
    return _held(done, holder) if holder is not None and done[holder + 1].attribute in _VIEWING else set()


def changed(done: tuple[Step, ...], at: int, methods: Collection[str | None] = ()) -> int | None:
    """Return where what step ``at`` changes was put on the stack; None where it changes nothing.

    It assigns or deletes an attribute or a part, or takes one of the methods that change what they are of.
    """
    name = done[at].name
    if done[at].attribute is not None:
        return at - 1 if done[at].attribute in methods else None
    if name not in _BESIDE:
        return None
    is_turned = name.startswith("STORE") and done[at - 1].name.startswith(("SWAP", "ROT_"))
    return _left(done, at, done[at - 1].depth - _BESIDE[name] - is_turned)


def source(done: tuple[Step, ...], at: int) -> tuple[Any, bool]:
    """Return the variable that what step ``at`` leaves is a part of, and whether by an attribute of it."""
    by_attribute = False
    position: int | None = at
    while position is not None and position >= 0:
        step = done[position]
        if step.attribute is not None:
            by_attribute = True
            position -= 1
        elif step.is_part:
            position = _left(done, position, step.depth)
        else:
            return step.loads, by_attribute
    return None, by_attribute


def _left(done: tuple[Step, ...], before: int, depth: int) -> int | None:
    """Return the last step before another that puts something where the stack is ``depth`` high then."""
    for index in reversed(range(before)):
        if done[index].depth == depth and not done[index].name.startswith(_TAKING):
            return index
    return None
