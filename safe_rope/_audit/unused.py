"""Tables whose numbers do no harm, or may do none: code asks for their dtype, or nothing rotates by them."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator

from torch import nn

from safe_rope._base import instructions, methods
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import calling_convention

BESIDE_ALIBI = "its config asks for ALiBi, and no attention rotates by what it returns"

MAY_MAKE_ANEW = "its code asks whether it is FP32, and may make another where it is not"

MADE_FIRST = "its forward puts another there before it reads the numbers"

ROUNDED_LAST = "its forward puts it there, and may have rounded what is right last"

MAY_BE_REAL = "its own code may have taken the real part alone"

IN_WHICH = ", in which forward may compute, or round what is right last"

_KIND = {"dtype", "device", "shape", "ndim", "is_cuda"}
_EVERYTHING = {"_buffers", "buffers", "named_buffers", "state_dict", "__dict__", "vars", "getattr"}


def is_beside_alibi(module: nn.Module) -> bool:
    """Whether a rotary module stands in a model that has ALiBi instead, as Falcon's may."""
    has_alibi = getattr(getattr(module, "config", None), "alibi", None) is True
    return has_alibi and calling_convention(stock_class(module)) is not None


def only_tells_its_dtype(name: str, cls: type, others: Iterable[type]) -> bool:
    """Whether methods of ``cls`` read of the table ``name`` what kind it is alone, and others nothing.

    Args:
        name: a buffer's name.
        cls: the class of the module that has it.
        others: the classes of the modules of its model.

    """
    own = methods.methods_of(cls)
    reads = [one for function in own for one in _reads(name, function)]
    if not (reads and all(reads)) or any(_EVERYTHING & methods.names_in(one) for one in own):
        return False
    beside = [*_of_torch(cls)]
    beside += (one for other in others if other is not cls for one in methods.methods_of(other))
    return not any(
        name in methods.names_in(one) for one in beside if one.__name__ not in methods.INITIALISING
    )


def is_left_real(name: str, cls: type) -> bool:
    """Whether a method of a class takes the real part of its table, and puts another in its place."""
    codes = (code for one in methods.methods_of(cls) for code in instructions.codes(one.__code__))
    return any(_is_left_real(name, instructions.steps(code)) for code in codes)


def _is_left_real(name: str, done: tuple[instructions.Step, ...]) -> bool:
    pairs = itertools.pairwise(one.attribute for one in done)
    return (name, "real") in pairs and any(one.name == "STORE_ATTR" and one.value == name for one in done)


def is_replaced_unread(name: str, cls: type) -> bool:
    """Whether ``forward`` of a class puts another table there wherever it reads the numbers of one."""
    codes = [code for one in methods.reached_by_forward(cls) for code in instructions.codes(one.__code__)]
    replaced = {_is_replaced_unread(name, instructions.steps(code)) for code in codes}
    return True in replaced and False not in replaced


def _is_replaced_unread(name: str, done: tuple[instructions.Step, ...]) -> bool | None:
    """Whether steps read the table where they have put another there, and only there; None if they do not."""
    reads = [
        one.offset
        for one, then in itertools.pairwise(done)
        if one.attribute == name and then.attribute not in _KIND
    ]
    put = next((one.offset for one in done if one.name == "STORE_ATTR" and one.value == name), None)
    if put is None:
        return False if reads else None
    skipping = (one.goes_to for one in done if one.goes_to is not None and one.offset < put < one.goes_to)
    end = min(skipping, default=done[-1].offset + 1)
    return all(put < read < end for read in reads)


def is_compared_with_fp32(name: str, cls: type) -> bool:
    """Whether ``forward`` of a class, or what it calls, asks if its table is FP32, and not to widen it."""
    codes = (code for one in methods.reached_by_forward(cls) for code in instructions.codes(one.__code__))
    return any(_is_compared(name, instructions.steps(code)) for code in codes)


def _is_compared(name: str, done: tuple[instructions.Step, ...]) -> bool:
    """Whether steps have ``self.name.dtype != torch.float32``, or the like."""
    return any(
        done[at].attribute == name
        and done[at + 1].attribute == "dtype"
        and done[at + 3].attribute == "float32"
        and done[at + 4].name in ("COMPARE_OP", "IS_OP")
        and not _is_widened(name, done[at + 5 :])
        for at in range(len(done) - 4)
    )


def _is_widened(name: str, done: tuple[instructions.Step, ...]) -> bool:
    """Whether steps take ``self.name.to(torch.float32)`` or ``.float()`` where they first take it."""
    taken = next((at for at, one in enumerate(done) if one.attribute == name), len(done))
    then = [one.attribute for one in done[taken + 1 : taken + 4]]
    return then[:1] == ["float"] or (then[:1] == ["to"] and then[2:] == ["float32"])


def _of_torch(cls: type) -> Iterator[types.FunctionType]:
    """Yield the methods that a class has from a module of torch, as those of an Embedding."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") and base is not nn.Module:
            yield from (one for one in vars(base).values() if isinstance(one, types.FunctionType))


def _reads(name: str, function: types.FunctionType) -> Iterable[bool]:
    """Yield for each use of an attribute of that name whether it asks for its dtype and the like."""
    for code in instructions.codes(function.__code__):
        done = instructions.steps(code)
        for at, one in enumerate(done):
            if one.value == name:
                yield at + 1 < len(done) and done[at + 1].attribute in _KIND
