"""What the code of a module's class does, told from its bytecode."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from safe_rope._base import instructions
from safe_rope._base.changes import changes_what_is_kept, writes_to_arguments
from safe_rope._base.methods import (
    CONSTRUCTORS,
    INITIALISING,
    all_names,
    by_name,
    called_by_forward,
    constructing,
    everything,
    function_behind,
    functions_behind,
    helpers,
    maybe_called_by_forward,
    members,
    methods_of,
    names_in,
    names_of,
    reached,
    reached_by_forward,
    takes_another,
)

_COUNTING = {"arange", "linspace", "logspace", "cumsum", "range", "meshgrid", "ndgrid"}
_TO_INTEGERS = {
    *("long", "int", "int32", "int64", "to", "type", "type_as", "copy_", "item", "tolist", "numpy"),
    *("argsort", "sort", "msort", "topk", "argmax", "argmin", "max", "min", "unique", "unique_consecutive"),
    *("searchsorted", "bucketize", "nonzero", "argwhere", "where", "full_like", "zeros_like"),
}
"""Attributes of torch and its tensors that may make integers of other numbers."""
_LISTED = {"tensor", "as_tensor", "LongTensor", "IntTensor"}
_SINES = {"sin", "cos", "sinh", "cosh", "polar", "matrix_exp"}
_WAVES = {*_SINES, "exp", "outer", "einsum", "pow"}
PRODUCTS = {"matmul", "einsum", "bmm", "mm", "mv", "baddbmm", "addmm", "addbmm", "tensordot", "linear"}
_ATTENTION = {"softmax", "scaled_dot_product_attention", "flash_attn_func", "flex_attention"}


class Facts(NamedTuple):
    """What the methods of a class other than its constructor make of positions, and what they call makes.

    Only functions of the package that defines the class are followed, and methods of torch are not.
    """

    counts: bool
    """They make a count."""
    computes: bool
    """They make a count, and take powers, exponentials, sines or outer products."""
    turns: bool
    """They take sines or cosines."""
    makes_waves: bool
    """They, the constructor, or what helps them take sines or cosines of what they count."""
    makes_own_waves: bool
    """So they do, without a method that initialises a module which it is given, and no constructor names."""
    turns_counts: bool
    """``forward``, or what helps it, counts, and takes sines or cosines."""
    rotates: bool
    """They take both sines and cosines, which hardly anything but positions needs."""
    counts_when_called: bool
    """``forward``, or what helps it, makes tensors of counts."""

    @property
    def makes_no_positions(self) -> bool:
        """Whether they neither make counts nor take sines of anything."""
        return not (
            self.computes or self.turns or self.makes_waves or self.rotates or self.counts_when_called
        )


class Conduct(NamedTuple):
    """How the methods of a class other than its constructor, and what they call, behave in a call."""

    counts: bool
    """As of `Facts`."""
    computes: bool
    """As of `Facts`."""
    turns: bool
    """As of `Facts`."""
    finishes: bool
    """``forward``, or what it calls or reads, takes a sine, a cosine or an exponential."""
    widens: bool
    """``forward``, or what it calls, asks for FP32, and no method for the dtype of anything."""
    asks_for_fp32: bool
    """They, or what helps them, ask for FP32 or more, maybe of a table."""
    stores: bool
    """They may change what is kept between two calls."""
    keeps: bool
    """``forward``, or what it calls or reads, may."""
    writes: bool
    """They may write to what they are given."""
    multiplies: bool
    """They take products of matrices, which autocast lowers."""
    attends: bool
    """They take the softmax of attention."""
    asks_its_class: bool
    """They look at the class of what they are called on, or of anything else."""
    asks_dtypes: bool
    """``forward``, or what it calls, looks at the dtype of anything."""
    compares_dtypes: bool
    """``forward``, or what it calls, compares the dtype of something with that of something else."""


_WIDE = {"float", "float32", "double", "float64"}
_MOVING = {
    *("to", "type_as", "float", "half", "bfloat16", "cpu", "cuda", "detach", "clone", "contiguous", "expand"),
    *("expand_as", "view", "reshape", "unsqueeze", "squeeze", "flatten", "chunk", "split", "narrow"),
    *("index_select", "embedding", "shape", "size", "device", "dtype", "torch", "nn", "functional", "F"),
}
"""Names in code that computes nothing with what it moves, casts or takes a part of."""
_ARITHMETIC = {
    *("abs", "neg", "add", "sub", "mul", "div", "true_divide", "pow", "square", "sqrt", "rsqrt"),
    *("exp", "exp2", "log", "log2", "log10", "log1p", "floor", "ceil", "round", "sign", "relu"),
    *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "min", "max", "stack", "cat", "t"),
    *("mT", "T", "permute", "repeat", "repeat_interleave", "new_tensor", "tensor", "long", "int", "bool"),
    *("where", "outer", "transpose", "reciprocal"),
    *("double", "flip", "tril", "triu", "range", "len", "math", "pi", "e", "unflatten", "ones_like", "int64"),
}
"""Names in code that computes with numbers, element by element."""
_WHOLE = re.compile(
    r"(^|_)(ids?|inds?|bbox|pos|positions?|index|indices|idx|lens?|lengths?|masks?|labels?|tokens?)$"
)
"""Names of what holds whole numbers."""
_TALKING = ("distributed", "reduce_scatter", "barrier", "all_gather", "all_reduce", "all_to_all")
"""How the names of what waits for other ranks begin."""


def only_hands_out(cls: type) -> bool:
    """Whether a class has no ``forward``, or one that computes nothing with what its module holds.

    An object that its module holds may be called there, and compute.
    """
    function = next((function_behind(value) for name, value in members(cls) if name == "forward"), None)
    return function is None or (_only_moves(function.__code__) and not facts(cls).turns_counts)


@functools.lru_cache(maxsize=4096)
def _only_moves(code: types.CodeType) -> bool:
    own = code.co_varnames[:1]
    held: set[str] = set()
    last = None
    for one in (step for inner in instructions.codes(code) for step in instructions.steps(inner)):
        if one.attribute is not None and last in own:
            held.add(one.attribute)
        last = one.loads
        if one.name.startswith(("BINARY", "INPLACE", "UNARY")) and not one.is_part:
            return False
    return names_of(code) <= _MOVING | held


def makers(cls: type) -> dict[str, bool]:
    """Names of the methods and properties besides ``forward`` that count and take sines or cosines.

    Each with whether ``forward`` asks for it, too.

    Those that change what is kept between two calls, and are a part of the constructor, build a module's
    tables, and are none.
    """
    own = by_name(cls)
    of_forward = set(reached_by_forward(cls))
    constructors = [function for name in CONSTRUCTORS for function in functions_behind(own.get(name))]
    of_constructor = set(reached(constructors, own))
    found = {}
    for name, value in own.items():
        if name in (*CONSTRUCTORS, *INITIALISING, "forward") or isinstance(value, type):
            continue
        functions = functions_behind(value)
        helping = list(reached(functions, own))
        stores = any(changes_what_is_kept(function.__code__) for function in helping)
        if _turn_counts(helping) and not (stores and not of_constructor.isdisjoint(functions)):
            found[name] = not of_forward.isdisjoint(functions)
    return found


def _turn_counts(functions: list[types.FunctionType]) -> bool:
    names = all_names(functions)
    return bool(names & _COUNTING) and _take_waves(names, functions)


def turns_counts(function: Any) -> bool:
    """Whether a function, or what helps it, counts, and takes sines or cosines."""
    return _turn_counts(list(reached(functions_behind(function))))


@functools.lru_cache(maxsize=4096)
def hands_on_to_waves(cls: type) -> bool:
    """Whether ``forward`` names a class of no module whose methods, or what helps them, take sines."""
    helping = [one for helper in helpers([*reached_by_forward(cls)]) for one in methods_of(helper)]
    return _take_waves(all_names(helping), helping)


@functools.lru_cache(maxsize=4096)
def beside_arithmetic(cls: type) -> frozenset[str]:
    """Names in ``forward``, and in what helps it, that are none of arithmetic, moves, counts or helpers."""
    functions = reached_by_forward(cls)
    plain = _ARITHMETIC | _MOVING | _COUNTING | {one.__name__ for one in functions}
    return frozenset(all_names(functions) - plain - set(by_name(cls)))


@functools.lru_cache(maxsize=4096)
def talks_to_ranks(cls: type) -> bool:
    """Whether ``forward``, or what helps it, names a collective: one rank alone would wait in it."""
    return any(name == "dist" or name.startswith(_TALKING) for name in all_names(reached_by_forward(cls)))


def counts_positions(cls: Any) -> bool:
    """Whether a class counts, or what helps its constructor does for sines and cosines."""
    found = facts(cls)
    return found.counts or found.makes_waves


@functools.lru_cache(maxsize=4096)
def may_count(cls: type) -> bool:
    """Whether a class counts, or what its constructor calls does."""
    return bool(_COUNTING & set(all_names(everything(cls, methods_of(cls)))))


@functools.lru_cache(maxsize=4096)
def may_make_whole(cls: type) -> bool:
    """Whether the constructor of a class, or what it calls, may make integers of other numbers."""
    codes = [code for one in constructing(cls) for code in instructions.codes(one.__code__)]
    done = [one for code in codes for one in dis.get_instructions(code)]
    attributes = {one.argval for one in done if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    by_python = any(one.opname == "LOAD_GLOBAL" and one.argval in ("int", "round") for one in done)
    return not _TO_INTEGERS.isdisjoint(attributes) or (by_python and not _LISTED.isdisjoint(attributes))


def facts(cls: Any) -> Facts:
    """Return the facts of a class."""
    return _facts(cls)


@functools.lru_cache(maxsize=4096)
def _facts(cls: Any) -> Facts:
    methods = methods_of(cls)
    names, own = all_names(methods), everything(cls, methods)
    by_forward = reached_by_forward(cls)
    later = all_names(by_forward).union(*(all_names(methods_of(helper)) for helper in helpers(own)))
    counts, makes_waves = bool(names & _COUNTING), _make_waves(own)
    for_itself = own
    given = {name for name, value in members(cls) if name in INITIALISING and takes_another(value)}
    if makes_waves and given and given.isdisjoint(all_names(constructing(cls))):
        for_itself = everything(cls, methods_of(cls, with_initialising=False))
    return Facts(
        counts=counts,
        computes=counts and bool(names & _WAVES),
        turns=_take_waves(names, methods),
        makes_waves=makes_waves,
        makes_own_waves=makes_waves and (for_itself is own or _make_waves(for_itself)),
        turns_counts=bool(later & _COUNTING) and _take_waves(later, by_forward),
        rotates={"sin", "cos"} <= names or bool(names & {"polar", "matrix_exp"}) or _has_phasors(methods),
        counts_when_called=bool(later & (_COUNTING - {"range"})),
    )


def _make_waves(functions: list[types.FunctionType]) -> bool:
    """Whether functions, and the classes that help them, take sines or cosines of what they count."""
    names = all_names(functions)
    names |= all_names(one for helper in helpers(functions) for one in everything(helper, methods_of(helper)))
    counted = names & (_COUNTING | {"array", "tensor", "FloatTensor"})
    return bool(counted) and (bool(names & _SINES) or any(map(_turns, functions)))


def conduct(cls: Any) -> Conduct:
    """Return how the methods of a class behave."""
    return _conduct(cls)


@functools.lru_cache(maxsize=4096)
def _conduct(cls: Any) -> Conduct:
    methods = methods_of(cls)
    names, codes = all_names(methods), [function.__code__ for function in methods]
    helping = [one for helper in helpers(everything(cls, methods)) for one in methods_of(helper)]
    with_helpers = [*codes, *(function.__code__ for function in helping)]
    keeps_properties = any(isinstance(value, functools.cached_property) for _, value in members(cls))
    called = all_names(called_by_forward(cls)) | all_names(helping)
    hands_on = called.isdisjoint(_COUNTING) and bool(makers(cls))  # a method that it keeps counts for it
    return Conduct(
        *facts(cls)[:3],
        finishes=hands_on or not (_SINES | {"exp", "exp2", "pow"}).isdisjoint(called),
        widens=bool(called & {"float", "float32"}) and names.isdisjoint({"type_as", "dtype"}),
        asks_for_fp32=not _WIDE.isdisjoint(names | called),
        stores=keeps_properties or any(map(changes_what_is_kept, codes)),
        keeps=keeps_properties
        or any(changes_what_is_kept(one.__code__) for one in maybe_called_by_forward(cls)),
        writes=any(map(writes_to_arguments, codes)),
        multiplies=bool((names | all_names(helping)) & PRODUCTS) or any(map(_has_at, with_helpers)),
        attends=bool(names & _ATTENTION),
        asks_its_class=any(map(_asks_for_a_class, codes)),
        asks_dtypes=not called.isdisjoint({"type_as", "dtype"}),
        compares_dtypes=any(_compares_dtypes(one.__code__) for one in reached_by_forward(cls)),
    )


def _compares_dtypes(code: types.CodeType) -> bool:
    """Whether code has ``a.dtype != b.dtype``, or the like with a variable."""
    done = instructions.steps(code)
    return any(
        one.name in ("COMPARE_OP", "IS_OP") and any(step.attribute == "dtype" for step in done[at - 2 : at])
        for at, one in enumerate(done)
    )


@functools.lru_cache(maxsize=4096)
def counts_as_given(cls: type, by: tuple[str, ...] = ("arange",)) -> bool:
    """Whether ``forward``, or what helps it, makes a count right away in the dtype of something.

    The dtype of what its name says to be whole numbers is none that rounds them. ``by``: what makes counts.
    """
    codes = (code for one in reached_by_forward(cls) for code in instructions.codes(one.__code__))
    return any(_counts_in_a_dtype(code, by) for code in codes)


def _counts_in_a_dtype(code: types.CodeType, by: tuple[str, ...]) -> bool:
    done = instructions.steps(code) if not names_of(code).isdisjoint(by) else ()
    for at, one in enumerate(done):
        if one.attribute not in by:
            continue
        inside, results = instructions.call(done, at)
        if any(_is_dtype_of_something(done, inner) for inner in inside):
            return True
        for cast in (result + 1 for result in results if result + 1 < len(done)):
            if done[cast].attribute not in ("to", "type", "type_as"):
                continue
            inside, _ = instructions.call(done, cast)
            if done[cast].attribute == "type_as" or any(_is_dtype_of_something(done, i) for i in inside):
                return True
    return False


def _is_dtype_of_something(done: tuple[instructions.Step, ...], at: int) -> bool:
    of = done[at - 1].attribute or done[at - 1].loads
    return done[at].attribute == "dtype" and not _WHOLE.search(str(of))


def _turns(function: types.FunctionType) -> bool:
    """Whether a function has an imaginary constant, as in ``torch.exp(1j * phase)``."""
    return any(isinstance(constant, complex) for constant in function.__code__.co_consts)


def _has_phasors(functions: Iterable[types.FunctionType]) -> bool:
    """Whether any of them takes exponentials of imaginary numbers."""
    return any(_turns(function) and "exp" in names_in(function) for function in functions)


def _take_waves(names: Iterable[str], functions: Iterable[types.FunctionType]) -> bool:
    """Whether ``names`` are of sines or cosines, or ``functions`` take exponentials of imaginary numbers."""
    return not _SINES.isdisjoint(names) or _has_phasors(functions)


def _asks_for_a_class(code: types.CodeType) -> bool:
    if names_of(code).isdisjoint({"type", "__class__"}):
        return False
    done = (step for inner in instructions.codes(code) for step in instructions.steps(inner))
    return any(
        (one.name == "LOAD_GLOBAL" and one.value == "type") or one.attribute == "__class__" for one in done
    )


_AT = {
    (one.opcode, one.arg or 0)
    for source in ("a @ b", "a @= b")
    for one in dis.get_instructions(compile(source, "", "exec"))
    if one.opname.startswith(("BINARY", "INPLACE"))
}
"""Opcode and argument of matrix products."""


def _has_at(code: types.CodeType) -> bool:
    # All methods of a model are looked through, which `dis` would take long for.
    units = code.co_code
    is_there = not _AT.isdisjoint(zip(units[::2], units[1::2], strict=True))
    return is_there or any(map(_has_at, instructions.inner(code)))
