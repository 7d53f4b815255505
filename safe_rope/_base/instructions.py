"""What code does, one step after the other: the same on every Python, as far as that can be.

CPython 3.13 has one instruction for two loads or stores of local variables. From 3.12 on a comprehension
is in the code around it, a slice is read and written by one instruction, and what ends a function may be
there several times. From 3.11 on a function of an imported module is taken as an attribute, not as a method.
From 3.14 on a call such as ``tuple(x for x in xs)`` is there a second time, without the call.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterator, Sequence
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
_IDLE = {"EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "KW_NAMES", "CACHE"}
"""What leaves the stack as it is, whatever `dis` says of it, and stands between two steps."""
_IS_FOLLOWED = ("LOAD_ATTR", "PUSH_NULL") in itertools.pairwise(
    one.opname for one in dis.get_instructions(compile("f.of(*x)", "", "eval"))
)
"""Whether the empty place beside what is called is above it, as from CPython 3.13 on."""
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
    goes_to: int | None = None
    """The offset where it may jump to."""

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
    done = [*_steps(code)]
    for at in [at for at, one in enumerate(done) if calls(one)]:
        # What is called has two places on the stack from CPython 3.11 on, one of which may be empty.
        is_pair = "PUSH_NULL" in dis.opmap or done[at].name == "CALL_METHOD"
        called = _left(done, at, done[at].depth + is_pair)
        if called is not None and done[called].name == "LOAD_ATTR":
            done[called] = done[called]._replace(is_method=True)
    return tuple(done)


def _steps(code: types.CodeType) -> Iterator[Step]:
    depth, arriving, is_called = 0, dict[int, int](), False
    done = [*_without_shortcuts([*dis.get_instructions(code)])]
    for one, following in zip(done, [*(one.opname for one in done[1:]), ""], strict=True):
        depth = arriving.get(one.offset, depth)
        goes_to = one.argval if one.opcode in _JUMPS else None
        if goes_to is not None:
            arriving[goes_to] = depth + dis.stack_effect(one.opcode, one.arg, jump=True)
        names = _LOCAL.findall(one.opname)
        if names and isinstance(one.argval, tuple):
            for name, value in zip(names, one.argval, strict=True):
                depth += 1 if name.startswith("LOAD") else -1
                yield Step(name, value, one.offset, depth, is_part=False)
            continue
        depth += dis.stack_effect(one.opcode, one.arg, jump=False)
        if one.opname in _IDLE or (one.opname == "PUSH_NULL" and is_called):
            continue
        is_called = _IS_FOLLOWED and (one.opname, following) == ("LOAD_ATTR", "PUSH_NULL")
        is_part = one.opname in ("BINARY_SUBSCR", "BINARY_SLICE") or one.argrepr == "[]"
        is_method = is_called or _is_method(one)
        yield Step(one.opname, one.argval, one.offset, depth + is_called, is_part, is_method, goes_to)
        if one.opname.startswith(_AWAY):
            depth = 0


def _without_shortcuts(done: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Yield instructions but for those that stand in for a call, where the function called is a builtin."""
    until = 0
    for at, one in enumerate(done):
        if one.opname == "COPY" and done[at + 1].opname == "LOAD_COMMON_CONSTANT":
            until = next(jump.argval for jump in done[at:] if jump.opcode in _JUMPS)
        if one.offset >= until:
            yield one


def _is_method(one: dis.Instruction) -> bool:
    if sys.version_info < (3, 12):
        return one.opname == "LOAD_METHOD"
    return one.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and bool((one.arg or 0) & 1)


def calls(step: Step) -> bool:
    """Whether a step calls a function."""
    return step.name.startswith("CALL") and "INTRINSIC" not in step.name


def is_in_place(step: Step) -> bool:
    """Whether a step may change its left operand in place: ``a += b`` and its kin."""
    return step.name.startswith("INPLACE") or (
        step.name == "BINARY_OP" and not step.is_part and step.value not in _PLAIN
    )


def inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of comprehensions and functions in code, but for what makes annotations of those."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_name != "__annotate__":
            yield constant


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code, and that of comprehensions and functions in it."""
    yield code
    for one in inner(code):
        yield from codes(one)


def call(done: tuple[Step, ...], at: int) -> tuple[list[int], list[int]]:
    """Return the steps that make the arguments of what step ``at`` takes to call it, and those that call it.

    Where an argument is chosen, what calls may be there once for each choice.
    """
    places = {one.offset: index for index, one in reversed([*enumerate(done)])}
    inside, calling, waiting = list[int](), list[int](), [at + 1]
    while waiting:
        for index in range(waiting.pop(), len(done)):
            one = done[index]
            if index in inside or index in calling:
                break
            is_result = one.depth == done[at].depth and one.name.startswith("CALL_FUNCTION")
            if one.depth < done[at].depth or is_result:
                calling.append(index)
                break
            inside.append(index)
            if one.goes_to in places:
                waiting.append(places[one.goes_to])
            if one.name.startswith(_AWAY):
                break
    return inside, calling


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
    if not calls(step):
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


def _left(done: Sequence[Step], before: int, depth: int) -> int | None:
    """Return the last step before another that puts something where the stack is ``depth`` high then."""
    for index in reversed(range(before)):
        if done[index].depth == depth and not done[index].name.startswith(_TAKING):
            return index
    return None
