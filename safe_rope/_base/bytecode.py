"""What the code of a module's class does, told from its bytecode."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from safe_rope._base import instructions

_COUNTING = {"arange", "linspace", "logspace", "cumsum", "range", "meshgrid", "ndgrid"}
_SINES = {"sin", "cos", "polar"}
_WAVES = {"sin", "cos", "polar", "exp", "outer", "einsum", "pow"}
PRODUCTS = {"matmul", "einsum", "bmm", "mm", "mv", "baddbmm", "addmm", "addbmm", "tensordot", "linear"}
_ATTENTION = {"softmax", "scaled_dot_product_attention", "flash_attn_func", "flex_attention"}
_STORING = {"register_buffer", "setattr", "__dict__", "vars"}
CHANGING = {"append", "extend", "insert", "pop", "update", "setdefault", "add", "clear"}
INITIALISING = (
    "_init_weights",
    "_initialize_weights",
    "init_weights",
    "initialize_weights",
    "reset_parameters",
)
"""Methods that write what a module is to begin with."""
_ANNOTATING = ("__annotate__", "__annotate_func__")
"""What CPython from 3.14 on makes the annotations of a class with."""
_CONSTRUCTORS = ("__init__", "_old_init")  # zero.Init keeps what it has replaced under the other name


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
    function = next((_function_of(value) for name, value in _own(cls) if name == "forward"), None)
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
    return _names(code) <= _MOVING | held


def makers(cls: type) -> dict[str, bool]:
    """Names of the methods and properties besides ``forward`` that count and take sines or cosines.

    Each with whether ``forward`` asks for it, too.

    Those that change what is kept between two calls, and are a part of the constructor, build a module's
    tables, and are none.
    """
    own = by_name(cls)
    of_forward = set(reached_by_forward(cls))
    constructors = [function for name in _CONSTRUCTORS for function in _functions_of(own.get(name))]
    of_constructor = set(_reached(own, constructors, beside=True))
    found = {}
    for name, value in own.items():
        if name in (*_CONSTRUCTORS, *INITIALISING, "forward") or isinstance(value, type):
            continue
        functions = _functions_of(value)
        reached = list(_reached(own, functions, beside=True))
        stores = any(_changes_what_is_kept(function.__code__) for function in reached)
        if _turn_counts(reached) and not (stores and not of_constructor.isdisjoint(functions)):
            found[name] = not of_forward.isdisjoint(functions)
    return found


def _turn_counts(functions: list[types.FunctionType]) -> bool:
    names = _all_names(functions)
    return bool(names & _COUNTING) and _take_waves(names, functions)


def turns_counts(function: Any) -> bool:
    """Whether a function, or what helps it, counts, and takes sines or cosines."""
    return _turn_counts(list(_all_reached(_functions_of(function))))


@functools.lru_cache(maxsize=4096)
def hands_on_to_waves(cls: type) -> bool:
    """Whether ``forward`` names a class of no module whose methods, or what helps them, take sines."""
    helping = [one for helper in _helpers([*reached_by_forward(cls)]) for one in methods_of(helper)]
    return _take_waves(_all_names(helping), helping)


def constructing(cls: type) -> list[types.FunctionType]:
    """The constructors of a class and its bases, and the methods and functions that help them."""
    functions = [one for name, value in _own(cls) if name in _CONSTRUCTORS for one in _functions_of(value)]
    return list(_reached(by_name(cls), functions, beside=True))


def methods_by_name(cls: type) -> dict[str, list[types.FunctionType]]:
    """The methods and properties of a class and its bases that take an object, but for constructors."""
    found: dict[str, list[types.FunctionType]] = {}
    for name, value in _own(cls):
        if name not in _CONSTRUCTORS and not isinstance(value, staticmethod):
            found.setdefault(name, []).extend(_functions_of(value))
    return found


def called_beside(function: types.FunctionType, value: Any) -> types.FunctionType | None:
    """The function that a value is, if it is one of the package of another; None if it is not."""
    called = _function_of(value)
    return called if called is not None and _is_beside(called, function) else None


def stores_when_called(cls: type) -> bool:
    """Whether ``forward``, or a method that it names, may change what is kept between two calls."""
    own = by_name(cls)
    functions = _reached(own, _functions_of(own.get("forward")), beside=False)
    return any(_changes_what_is_kept(function.__code__) for function in functions)


@functools.lru_cache(maxsize=4096)
def reached_by_forward(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the functions of ``forward``, the methods that it names, and the functions that help them."""
    own = by_name(cls)
    return tuple(_reached(own, _functions_of(own.get("forward")), beside=True))


@functools.lru_cache(maxsize=4096)
def beside_arithmetic(cls: type) -> frozenset[str]:
    """Names in ``forward``, and in what helps it, that are none of arithmetic, moves, counts or helpers."""
    reached = reached_by_forward(cls)
    plain = _ARITHMETIC | _MOVING | _COUNTING | {one.__name__ for one in reached}
    return frozenset(_all_names(reached) - plain - set(by_name(cls)))


@functools.lru_cache(maxsize=4096)
def talks_to_ranks(cls: type) -> bool:
    """Whether ``forward``, or what helps it, names a collective: one rank alone would wait in it."""
    return any(name == "dist" or name.startswith(_TALKING) for name in _all_names(reached_by_forward(cls)))


def named_by_forward(cls: type) -> Iterator[Any]:
    """Yield what ``forward``, and what helps it, name: in their files, or on the class."""
    for function in reached_by_forward(cls):
        names = _names(function.__code__)
        yield from _named(function, names)
        yield from (value for name, value in _own(cls) if name in names)


def _reached(
    own: dict[str, Any], functions: Iterable[types.FunctionType], *, beside: bool
) -> Iterator[types.FunctionType]:
    """Yield functions, the methods among ``own`` that they name, and the functions ``beside`` them."""
    seen: set[Any] = set()
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        for name in _names(function.__code__):
            waiting += (one for one in _functions_of(own.get(name)) if _is_beside(one, function))
        waiting += _beside(function) if beside else ()


def _beside(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the functions of the same package that one names."""
    for value in _named(function, _names(function.__code__)):
        called = called_beside(function, value)
        if called is not None:
            yield called


def _is_beside(called: types.FunctionType, function: types.FunctionType) -> bool:
    return package(called.__module__) == package(function.__module__)


def _named(function: types.FunctionType, names: Iterable[str]) -> Iterator[Any]:
    """Yield what ``names`` are in the file of a function, and in the files beside it that they name."""
    own = vars(sys.modules.get(function.__module__, sys))
    found = [own[name] for name in names if name in own]
    yield from found
    for module in found:
        if isinstance(module, types.ModuleType) and package(module.__name__) == package(function.__module__):
            yield from (value for name in names if (value := vars(module).get(name)) is not None)


def facts(cls: Any) -> Facts:
    """Return the facts of a class."""
    return _facts(cls)


def counts_positions(cls: Any) -> bool:
    """Whether a class counts, or what helps its constructor does for sines and cosines."""
    found = facts(cls)
    return found.counts or found.makes_waves


@functools.lru_cache(maxsize=4096)
def _facts(cls: Any) -> Facts:
    methods = methods_of(cls)
    names, own = _all_names(methods), _everything(cls, methods)
    reached = reached_by_forward(cls)
    later = _all_names(reached).union(*(_all_names(methods_of(helper)) for helper in _helpers(own)))
    counts, makes_waves = bool(names & _COUNTING), _make_waves(own)
    for_itself = own
    given = {name for name, value in _own(cls) if name in INITIALISING and _takes_another(value)}
    if makes_waves and given and given.isdisjoint(_all_names(constructing(cls))):
        for_itself = _everything(cls, _methods_of(cls, with_initialising=False))
    return Facts(
        counts=counts,
        computes=counts and bool(names & _WAVES),
        turns=_take_waves(names, methods),
        makes_waves=makes_waves,
        makes_own_waves=makes_waves and (for_itself is own or _make_waves(for_itself)),
        turns_counts=bool(later & _COUNTING) and _take_waves(later, reached),
        rotates={"sin", "cos"} <= names or "polar" in names or _has_phasors(methods),
        counts_when_called=bool(later & (_COUNTING - {"range"})),
    )


def _make_waves(functions: list[types.FunctionType]) -> bool:
    """Whether functions, and the classes that help them, take sines or cosines of what they count."""
    names = _all_names(functions)
    names |= _all_names(
        one for helper in _helpers(functions) for one in _everything(helper, methods_of(helper))
    )
    counted = names & (_COUNTING | {"array", "range", "tensor", "FloatTensor"})
    return bool(counted) and (bool(names & _SINES) or any(map(_turns, functions)))


def conduct(cls: Any) -> Conduct:
    """Return how the methods of a class behave."""
    return _conduct(cls)


@functools.lru_cache(maxsize=4096)
def _conduct(cls: Any) -> Conduct:
    methods = methods_of(cls)
    names, codes = _all_names(methods), [function.__code__ for function in methods]
    helping = [one for helper in _helpers(_everything(cls, methods)) for one in methods_of(helper)]
    with_helpers = [*codes, *(function.__code__ for function in helping)]
    called = _all_names(_called(cls)) | _all_names(helping)
    hands_on = called.isdisjoint(_COUNTING) and bool(makers(cls))  # a method that it keeps counts for it
    return Conduct(
        *facts(cls)[:3],
        finishes=hands_on or not (_SINES | {"exp", "exp2", "pow"}).isdisjoint(called),
        widens=bool(called & {"float", "float32"}) and names.isdisjoint({"type_as", "dtype"}),
        asks_for_fp32=not _WIDE.isdisjoint(names | called),
        stores=any(map(_changes_what_is_kept, codes)) or _keeps_properties(cls),
        keeps=any(_changes_what_is_kept(one.__code__) for one in _may_call(cls)) or _keeps_properties(cls),
        writes=any(map(writes_to_arguments, codes)),
        multiplies=bool((names | _all_names(helping)) & PRODUCTS) or any(map(_has_at, with_helpers)),
        attends=bool(names & _ATTENTION),
        asks_its_class=any(map(_asks_for_a_class, codes)),
        asks_dtypes=not called.isdisjoint({"type_as", "dtype"}),
        compares_dtypes=any(_compares_dtypes(one.__code__) for one in reached_by_forward(cls)),
    )


def _may_call(cls: type) -> Iterator[types.FunctionType]:
    """Yield what forward and properties call, and what has the same names in the bases."""
    called = [*_called(cls)]
    names = _all_names(called)
    also = [one for name, every in methods_by_name(cls).items() if name in names for one in every]
    return _reached(by_name(cls), [*called, *also], beside=True)


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
    reached = reached_by_forward(cls)
    return any(_counts_in_a_dtype(code, by) for one in reached for code in instructions.codes(one.__code__))


def _counts_in_a_dtype(code: types.CodeType, by: tuple[str, ...]) -> bool:
    done = instructions.steps(code) if not _names(code).isdisjoint(by) else ()
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


def _keeps_properties(cls: type) -> bool:
    return any(isinstance(value, functools.cached_property) for _, value in _own(cls))


def _called(cls: type) -> Iterator[types.FunctionType]:
    """Yield ``forward``, the functions of properties, which it may read, and what they call."""
    named = [
        value
        for name, value in _own(cls)
        if name == "forward" or not isinstance(value, types.FunctionType | staticmethod | classmethod)
    ]
    functions = [function for value in named for function in _functions_of(value)]
    return _reached(by_name(cls), functions, beside=True)


def _turns(function: types.FunctionType) -> bool:
    """Whether a function has an imaginary constant, as in ``torch.exp(1j * phase)``."""
    return any(isinstance(constant, complex) for constant in function.__code__.co_consts)


def _has_phasors(functions: Iterable[types.FunctionType]) -> bool:
    """Whether any of them takes exponentials of imaginary numbers."""
    return any(_turns(function) and "exp" in _names(function.__code__) for function in functions)


def _take_waves(names: Iterable[str], functions: Iterable[types.FunctionType]) -> bool:
    """Whether ``names`` are of sines or cosines, or ``functions`` take exponentials of imaginary numbers."""
    return not _SINES.isdisjoint(names) or _has_phasors(functions)


def _all_names(functions: Iterable[types.FunctionType]) -> set[str]:
    return set().union(*(_names(function.__code__) for function in functions))


def _helpers(functions: list[types.FunctionType]) -> Iterator[type]:
    """Yield the classes of the same package that functions name, and that are no ``nn.Module``."""
    for function in functions:
        for cls in _named(function, _names(function.__code__)):
            if not isinstance(cls, type) or package(cls.__module__) != package(function.__module__):
                continue
            if not any(base.__module__.startswith("torch.") for base in cls.__mro__):
                yield cls


def _asks_for_a_class(code: types.CodeType) -> bool:
    if _names(code).isdisjoint({"type", "__class__"}):
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


@functools.lru_cache(maxsize=4096)
def _changes_what_is_kept(code: types.CodeType) -> bool:
    """Whether a method assigns an attribute or a buffer, or changes in place what its object holds."""
    if _names(code) & _STORING:
        return True
    first = code.co_varnames[0] if code.co_argcount else ""
    return any(_changes_what(inner, first) for inner in instructions.codes(code))


def _changes_what(code: types.CodeType, first: str) -> bool:
    """Whether code assigns an attribute, changes what ``first`` holds or a container that it has not made."""
    done, own = instructions.steps(code), {*code.co_varnames, *code.co_cellvars}
    writing = {one.attribute for one in done if one.attribute is not None and is_writing(one.attribute)}
    for at, one in enumerate(done):
        if one.name == "STORE_ATTR":
            return True
        whole = instructions.changed(done, at, writing)
        if whole is None:
            continue
        variable, by_attribute = instructions.source(done, whole)
        if variable == first and (by_attribute or one.attribute is None):
            return True
        if variable is not None and one.attribute is None and variable not in own:
            return True
    return False


@functools.lru_cache(maxsize=4096)
def changed_when_called(cls: type) -> frozenset[str]:
    """Names of the attributes that methods other than the constructor assign, delete or change in place."""
    return _all_changed(methods_of(cls))


@functools.lru_cache(maxsize=4096)
def changed_by_forward(cls: type) -> frozenset[str]:
    """Names of the attributes that ``forward``, or what it calls, assigns, deletes or changes in place."""
    return _all_changed(reached_by_forward(cls))


def _all_changed(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    codes = (code for function in functions for code in instructions.codes(function.__code__))
    return frozenset(name for code in codes for name in _attributes_changed(code))


def _attributes_changed(code: types.CodeType) -> Iterator[str]:
    done = instructions.steps(code)
    writing = {one.attribute for one in done if one.attribute is not None and is_writing(one.attribute)}
    if _names(code) & _STORING:
        yield from (one for one in code.co_consts if isinstance(one, str))
    for at, one in enumerate(done):
        if one.name in ("STORE_ATTR", "DELETE_ATTR"):
            yield one.value
        whole = instructions.changed(done, at, writing)
        while whole is not None and whole >= 0 and (name := done[whole].attribute) is not None:
            yield name  # of ``self.seen.data.add_(1)``, both
            whole -= 1


def writes_to_arguments(code: types.CodeType, first: int = 0) -> bool:
    """Whether a function changes in place what it is given, as ``q.mul_(cos)``, ``q *= cos`` or ``out=``.

    ``first``: the first argument that counts.
    """
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    own: Collection[str] = code.co_varnames[first : code.co_argcount + code.co_kwonlyargcount + has_more]
    if "out" in own or any("out" in one for one in code.co_consts if isinstance(one, tuple)):
        return True
    done = instructions.steps(code)
    own = instructions.views(done, own)
    writing = {one.attribute for one in done if one.attribute is not None and is_writing(one.attribute)}
    for at, one in enumerate(done):
        whole = instructions.changed(done, at, writing)
        if whole is not None and instructions.source(done, whole)[0] in own:
            return True
        if instructions.is_in_place(one) and at + 1 < len(done) and done[at + 1].value in own:
            return True
    return False


def is_writing(method: str) -> bool:
    """Whether a method of this name changes what it is of: a container's, or torch's in place."""
    return method in CHANGING or (method.endswith("_") and not method.endswith("__"))


@functools.lru_cache(maxsize=4096)
def methods_of(cls: type) -> tuple[types.FunctionType, ...]:
    """The methods of a class but its constructor, and the functions that they reach."""
    return _methods_of(cls, with_initialising=True)


def _methods_of(cls: type, *, with_initialising: bool) -> tuple[types.FunctionType, ...]:
    """As `methods_of`; those that initialise a module which they are given may be left out."""
    values = (
        value
        for name, value in _own(cls)
        if name not in _CONSTRUCTORS
        and (with_initialising or name not in INITIALISING or not _takes_another(value))
    )
    return tuple(_all_reached(map(_function_of, values)))


def _takes_another(value: Any) -> bool:
    """Whether a method takes something besides its object."""
    function = _function_of(value)
    return function is not None and function.__code__.co_argcount > 1


def _everything(cls: type, methods: tuple[types.FunctionType, ...]) -> list[types.FunctionType]:
    """The methods of a class, and its constructor with the functions that it reaches."""
    constructors = (_function_of(value) for name, value in _own(cls) if name in _CONSTRUCTORS)
    return [*methods, *_all_reached(constructors, {function.__code__ for function in methods})]


def by_name(cls: type) -> dict[str, Any]:
    """Return the attributes of a class and of its bases by name, but for those of torch."""
    return dict(reversed([*_own(cls)]))


def bases(cls: type) -> Iterator[type]:
    """Yield a class and its bases but for those of torch."""
    return (base for base in cls.__mro__ if not base.__module__.startswith("torch.") and base is not object)


def _own(cls: type) -> Iterator[tuple[str, Any]]:
    for base in bases(cls):
        held = tuple(vars(base).items())  # another thread may add an attribute
        yield from ((name, value) for name, value in held if name not in _ANNOTATING)


def _all_reached(
    functions: Iterable[types.FunctionType | None], seen: set[types.CodeType] | None = None
) -> Iterator[types.FunctionType]:
    """Yield functions, and those of the same package that they name, unless their code has been ``seen``."""
    seen = set() if seen is None else seen
    waiting = [function for function in functions if function is not None]
    while waiting:
        function = waiting.pop()
        if function.__code__ not in seen:
            seen.add(function.__code__)
            yield function
            waiting += _beside(function)


@functools.lru_cache(maxsize=4096)
def package(name: str | None) -> str:
    """What a Python module is a part of: its package, or the folder of a file that is in none."""
    name = name or ""
    if name.startswith("transformers."):
        return name  # of a library each model is a world of its own
    module = sys.modules.get(name)
    file = None if "." in name or hasattr(module, "__path__") else getattr(module, "__file__", None)
    return name.partition(".")[0] if file is None else os.path.dirname(os.path.abspath(file))


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The functions that a method or property runs, one for each type that it is told apart by."""
    values = [value.func if isinstance(value, functools.partialmethod) else value]
    if isinstance(value, functools.singledispatchmethod):
        values = list(value.dispatcher.registry.values())
    return [function for one in values if (function := _function_of(one)) is not None]


def _function_of(value: Any) -> types.FunctionType | None:
    try:
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
    except Exception:  # noqa: BLE001 - what stands for an optional import raises what it likes
        return None
    return value if isinstance(value, types.FunctionType) else None


def names_in(function: types.FunctionType) -> frozenset[str]:
    """Names of the globals and attributes in a function, and in the functions in it."""
    return _names(function.__code__)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names, instructions.inner(code)))
