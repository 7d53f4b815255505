"""Which of its tensors a module takes sines or cosines of products with: followed through its bytecode.

Each value is followed as the set of what it is made of, step by step and through the functions that are
called. Nothing is run, and what cannot be followed counts as not turned.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any, NamedTuple

from safe_rope._base import bytecode, instructions, methods

_SINES = {"sin", "cos", "sin_", "cos_", "sinh", "cosh", "polar", "matrix_exp"}
_MULTIPLYING = {"mul", "mul_", "multiply", "div", "outer", "ger", "inner", *bytecode.PRODUCTS}
_DRAWING = {
    *("rand", "randn", "rand_like", "randn_like", "randint", "normal", "normal_", "uniform", "uniform_"),
    *("standard_normal", "trunc_normal_", "cauchy_", "exponential_", "log_normal_", "random_"),
}
_PRODUCTS = {
    (one.opname, one.argval)
    for operator in ("*", "@", "/")
    for source in (f"a {operator} b", f"a {operator}= b")
    for one in dis.get_instructions(compile(source, "", "exec"))
    if one.opname.startswith(("BINARY", "INPLACE"))
}
_EMPTY = (
    *("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT", "PUSH_", "LOAD_ASSERTION_ERROR"),
    "LOAD_BUILD_CLASS",
)
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF")
_DEEPEST = 8  # calls within calls
_MOST = 300  # functions that are followed for one class, each for every way in which it is called
_ROUNDS = 2  # the second has what a loop's first has left in variables


class _Held(NamedTuple):
    """What the module holds by a name, whether it has been multiplied, and whether it has been called."""

    name: str
    is_multiplied: bool = False
    is_called: bool = False


class _Turned(NamedTuple):
    """Names of what sines are taken of: of products with it, and of what it returns.

    And names of what ``forward`` returns products with.
    """

    multiplied: frozenset[str]
    called: frozenset[str]
    returned: frozenset[str]


_SHAPES = {
    *("shape", "size", "dim", "ndim", "numel", "dtype", "device", "len", "isinstance"),
    *("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty"),
}
"""What asks a tensor for no values."""
_LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""What asks its arguments for no values."""
_SELF, _SINE, _PRODUCT, _EXP, _IMAGINARY = "self", "sine", "product", "exp", "imaginary"
_SHAPE, _ALIKE = "shape", "alike"
_Made = frozenset[Any]
"""What a value is made of: words as above, `_Held`, functions, code and Python modules."""
_NOTHING: _Made = frozenset()
_CALLED = {
    **dict.fromkeys(_SINES, _SINE),
    **dict.fromkeys(_MULTIPLYING, _PRODUCT),
    **dict.fromkeys(_SHAPES, _SHAPE),
    **dict.fromkeys(_LIKE, _ALIKE),
    "exp": _EXP,
}


@functools.lru_cache(maxsize=4096)
def turned_at_random(cls: type) -> frozenset[str]:
    """Names of what a class takes sines or cosines of products with, if its constructor draws numbers."""
    drawn = any(not _DRAWING.isdisjoint(methods.names_in(one)) for one in methods.constructing(cls))
    return turned_when_multiplied(cls) if drawn else frozenset()


def turned_when_multiplied(cls: type) -> frozenset[str]:
    """Names of what a class takes sines or cosines of products with."""
    return _turned(cls).multiplied if bytecode.facts(cls).turns else frozenset()


def turned_when_called(cls: type) -> frozenset[str]:
    """Names of the modules that a class calls to take sines or cosines of what they return."""
    return _turned(cls).called if bytecode.facts(cls).turns else frozenset()


def returned_when_multiplied(cls: type) -> frozenset[str]:
    """Names of what the ``forward`` of a class returns products with, which others may take sines of."""
    return _turned(cls).returned


@functools.lru_cache(maxsize=4096)
def _turned(cls: type) -> _Turned:
    return _Following(cls).turned()


@functools.lru_cache(maxsize=4096)
def freezes(cls: type) -> bool:
    """Whether the constructor of a class says of any parameter whether it is trained."""
    codes = [code for one in methods.constructing(cls) for code in instructions.codes(one.__code__)]
    keywords = (names for code in codes for names in code.co_consts if isinstance(names, tuple))
    named = {name for names in (*keywords, *(code.co_names for code in codes)) for name in names}
    return bool(named & {"requires_grad", "requires_grad_"})


class _Following:
    """One class, and what was found of it so far."""

    def __init__(self, cls: type) -> None:
        self._methods = methods.methods_by_name(cls)
        own = methods.by_name(cls)
        self._called = {name for name in self._methods if callable(own[name])}  # no properties
        self._of_self = {one.__code__ for functions in self._methods.values() for one in functions}
        self._found: set[_Held] = set()
        self._results: dict[Any, _Made] = {}
        self._depth = 0

    def turned(self) -> _Turned:
        results = _NOTHING
        for name in sorted(self._methods, key=lambda name: name != "forward"):
            for function in self._methods[name]:
                result = self._run(function.__code__, function, {}, _NOTHING)
                results |= result if name == "forward" else _NOTHING
        multiplied = frozenset(one.name for one in self._found if one.is_multiplied)
        called = frozenset(one.name for one in self._found if one.is_called)
        handed_on = (one for one in results if isinstance(one, _Held) and one.is_multiplied)
        return _Turned(multiplied, called, frozenset(one.name for one in handed_on))

    def _run(
        self, code: types.CodeType, function: types.FunctionType, around: dict[str, _Made], given: _Made
    ) -> _Made:
        """Follow code with each of its arguments made of what is ``given``; return what its result is of."""
        key = code, given, tuple(around.items())
        if key in self._results or self._depth == _DEEPEST or len(self._results) == _MOST:
            return self._results.get(key, given)
        self._results[key] = _NOTHING  # where it calls itself
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 4) + bool(code.co_flags & 8)
        variables = {**around, **dict.fromkeys(code.co_varnames[:count], given)}
        if code in self._of_self:
            variables.update(dict.fromkeys(code.co_varnames[:1], frozenset({_SELF})))
        self._depth += 1
        for _ in range(_ROUNDS):
            self._results[key] |= self._follow(code, function, variables)
        self._depth -= 1
        return self._results[key]

    def _follow(
        self, code: types.CodeType, function: types.FunctionType, variables: dict[str, _Made]
    ) -> _Made:
        stack: dict[int, _Made] = {}
        before, returned = 0, _NOTHING
        for one in instructions.steps(code):
            after, top = one.depth, stack.get(before, _NOTHING)
            if one.name.startswith(_VARIABLES):
                stack[after] = variables.get(one.value, _NOTHING)
            elif one.name.startswith(("STORE_FAST", "STORE_DEREF")):
                variables[one.value] = variables.get(one.value, _NOTHING) | top
            elif one.name == "SWAP":
                below = after - one.value + 1
                stack[after], stack[below] = stack.get(below, _NOTHING), top
            elif one.name == "COPY":
                stack[after] = stack.get(after - one.value, _NOTHING)
            elif one.name.startswith("RETURN_VALUE"):
                returned |= top
            elif one.name.startswith(_EMPTY) or (one.name.startswith("BUILD_") and not one.value):
                stack[after] = _constant(one.value)
            elif one.name == "LOAD_GLOBAL":
                stack.update(dict.fromkeys(range(before + 1, after + 1), self._global(function, one.value)))
            elif one.name.startswith(("LIST_", "SET_", "MAP_")) and isinstance(one.value, int):
                whole = after - one.value + 1
                stack[whole] = stack.get(whole, _NOTHING) | top
            elif not one.name.startswith(("POP_", "STORE_", "DELETE_")):
                stack.update(self._made(one, before, stack, function, variables))
            before = after
        return returned

    def _made(
        self,
        one: instructions.Step,
        before: int,
        stack: dict[int, _Made],
        function: types.FunctionType,
        variables: dict[str, _Made],
    ) -> dict[int, _Made]:
        """What a step puts where on the stack, of what it takes from there."""
        of = _NOTHING.union(*(stack.get(at, _NOTHING) for at in range(min(one.depth, before), before + 1)))
        if one.name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
            of = self._attribute(of, one, function)
        elif instructions.calls(one):
            low = min(one.depth, before)  # what is called, beside a null or its object
            called = stack.get(low, _NOTHING) | (stack.get(low + 1, _NOTHING) if low < before else _NOTHING)
            is_followed = self._is_followed(called)
            of = self._call(called if _ALIKE in called else of, is_followed, function, variables)
        elif (one.name, one.value) in _PRODUCTS:
            of = _multiplied(of)
        return dict.fromkeys(range(min(one.depth, before), one.depth + 1), of)

    def _global(self, function: types.FunctionType, name: str) -> _Made:
        value = function.__globals__.get(name)
        found = methods.called_beside(function, value)
        kept = value if isinstance(value, types.ModuleType) else found
        word = _word(name) if value is None or callable(value) else _NOTHING  # else ``device`` may be one
        return word | (frozenset() if kept is None else frozenset({kept}))

    def _attribute(self, of: _Made, one: instructions.Step, function: types.FunctionType) -> _Made:
        if _SELF in of:
            return of - {_SELF} | {_Held(one.value)}
        modules = {module for module in of if isinstance(module, types.ModuleType)}
        if one.value in _SHAPES and not modules:
            return _NOTHING
        called = {methods.called_beside(function, vars(module).get(one.value)) for module in modules}
        word = _word(one.value) if modules or one.is_method else _NOTHING  # else it is a table of that name
        return (of - modules) | word | (called - {None})

    def _is_followed(self, called: _Made) -> bool:
        """Whether something with code is called: its result is of what that returns."""
        functions = any(isinstance(one, types.CodeType | types.FunctionType) for one in called)
        return functions or any(isinstance(one, _Held) and one.name in self._called for one in called)

    def _call(
        self, of: _Made, is_followed: bool, function: types.FunctionType, variables: dict[str, _Made]
    ) -> _Made:
        if _SHAPE in of:
            return _NOTHING
        # ``torch.relu`` has torch itself on the stack, beside what is called.
        of = frozenset(one for one in of if not isinstance(one, types.ModuleType))
        held = {one for one in of if isinstance(one, _Held)}
        if _SINE in of or {_EXP, _IMAGINARY} <= of:
            self._found |= held
        given = frozenset(of - {_SINE, _EXP, _PRODUCT, _ALIKE})
        given = _multiplied(given) if _PRODUCT in of else given
        result = _NOTHING if is_followed else given
        for one in of:
            if isinstance(one, types.CodeType):
                result |= self._run(one, function, dict(variables), given - {one})
            elif isinstance(one, types.FunctionType):
                result |= self._run(one.__code__, one, {}, given - {one})
            elif isinstance(one, _Held):
                for method in self._methods.get(one.name, ()):
                    result |= self._run(method.__code__, method, {}, given - {one})
        result = frozenset(x for x in result if not isinstance(x, types.CodeType | types.FunctionType))
        is_module = held == of and not any(one.name in self._methods for one in held)
        return frozenset(one._replace(is_called=True) for one in held) if is_module else result


def _word(name: str) -> _Made:
    return frozenset({_CALLED[name]}) if name in _CALLED else _NOTHING


def _constant(value: Any) -> _Made:
    if isinstance(value, types.CodeType):
        return frozenset({value})
    return frozenset({_IMAGINARY}) if isinstance(value, complex) else _NOTHING


def _multiplied(of: _Made) -> _Made:
    return frozenset(one._replace(is_multiplied=True) if isinstance(one, _Held) else one for one in of)
