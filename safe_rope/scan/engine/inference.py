"""Values of expressions in one file: one evaluator over names, numbers, dtypes and tensors."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cached_property

from safe_rope.scan.engine import dtypes, integers, tensors
from safe_rope.scan.engine.call_sites import FORWARDS, CallSites
from safe_rope.scan.engine.fractions import Fractions
from safe_rope.scan.engine.names import Argument, Call, Names
from safe_rope.scan.engine.scopes import Binding, Place, Scope
from safe_rope.scan.engine.values import (
    COMPLEX,
    DEVICE,
    FLOAT,
    INT,
    INT_BY_NAME,
    INTS,
    NONE,
    UNKNOWN,
    Value,
    assume,
    join,
    number,
    tensor,
)  # fmt: skip
from safe_rope.scan.engine.vocabulary import DEVICES, INTEGER_TENSORS, MASKS, RETURNS_INTEGERS, SHAPES
from safe_rope.scan.engine.walk import Walk

_DEPTH = 40
_MOST = 2000  # expressions that one question leaves open
_TRUTH = Value("number", True, False, bound=1)
_MASK_BY_NAME = Value(whole=True, assumed=True)
_INTEGER_BY_NAME = Value(dtype="int", assumed=True)
_ROUNDS = {"round", "ceil", "floor", "trunc"}  # which call a method that gives anything
_MAKES_FIELDS = {"namedtuple", "make_dataclass", "type"}
_FLOATS = {f"{module}.{name}" for module in ("math", "torch", "numpy") for name in ("pi", "e", "inf")} | {
    "math.tau"
}
_ATTRIBUTES = {"shape": INTS, "ndim": INT, "device": DEVICE}


class Inference:
    """Evaluates expressions; never raises, and knows nothing rather than guess."""

    def __init__(self, walk: Walk, names: Names, call_sites: CallSites) -> None:
        self.walk = walk
        self.names = names
        self._call_sites = call_sites
        self._active: dict[tuple[int, int], int] = {}  # what is being asked, and within how many others
        # What is unknown because it rests on an expression around it, by how many are around that.
        self._open: dict[tuple[int, int], int] = {}
        self._defined: dict[str, bool] = {}
        self._above = 0  # the outermost such expression of what was asked last
        self._known: dict[tuple[int, int], Value] = {}
        self._calls: dict[tuple[int, int], tuple[Call, Place]] = {}

    def value(self, node: ast.expr, place: Place) -> Value:
        """Return what is known of an expression at a place."""
        key = (id(node), id(place))
        if key in self._known:
            return self._known[key]
        depth = self._active.get(key, len(self._active))
        if depth < len(self._active) or depth > _DEPTH or len(self._open) > _MOST:
            self._above = min(self._above, depth if depth < len(self._active) else 0)
            return UNKNOWN
        if key in self._open:
            self._above = min(self._above, self._open[key])
            return UNKNOWN
        around, self._above = self._above, depth
        self._active[key] = depth
        try:
            value = self._value(node, place)
        finally:
            del self._active[key]
            above, self._above = self._above, around
        if value is not UNKNOWN or above == depth:
            self._known[key] = value
        else:
            self._open[key] = above
            self._above = min(around, above)
        if not depth:
            self._open.clear()
        return value

    def of(self, argument: Argument) -> Value:
        """Return what is known of a call's argument."""
        return self.value(argument.value, argument.place)

    def defines(self, name: str) -> bool:
        """Say whether a class of the file may have an attribute of this name that is not a tensor's."""
        if name not in self._defined:
            owners = self.walk.classes.values()
            written = name in self.walk.functions or self.names.writes(name) or self._is_field(name)
            computed = self.walk.functions.get("__getattr__", ())
            self._defined[name] = (
                written
                or any(name in owner.attributes for owner in owners)
                or any(one.owner is not None for one in computed)
            )
        return self._defined[name]

    def _is_field(self, name: str) -> bool:
        """Say whether a class of another file is given it by name, or a named tuple has it."""
        named, texts = self._fields
        return name in named or any(re.search(rf"\b{name}\b", text) for text in texts)

    @cached_property
    def _fields(self) -> tuple[set[str], list[str]]:
        """What classes are given by name, and the texts of what else may name their fields."""
        named: set[str] = set()
        texts: list[str] = []
        for called, sites in self.walk.calls.items():
            for site in sites if called[:1].isupper() or called in _MAKES_FIELDS else ():
                assert isinstance(site.node, ast.Call)
                named.update(word.arg for word in site.node.keywords if word.arg is not None)
                unpacked: list[ast.expr] = [word.value for word in site.node.keywords if word.arg is None]
                searched = [site.node] if called in _MAKES_FIELDS else unpacked
                texts += [ast.unparse(one) for one in searched]
        return named, texts

    def arguments(self, scope: Scope, parameter: str) -> list[Argument]:
        """Return what the calls in this file give to a parameter of a function."""
        return self._call_sites.arguments(scope, parameter)

    def given_to_variables(self, position: int, parameter: str) -> list[Argument]:
        """Return what the calls of variables give by a position or a name."""
        return self._call_sites.of_variables(position, parameter)

    def call(self, node: ast.Call, place: Place) -> Call:
        """Return a call with its full name and all its arguments."""
        key = (id(node), id(place))
        if key not in self._calls:  # what is kept with the answer keeps its ids
            self._calls[key] = self.names.call(node, place), place
        return self._calls[key][0]

    def _value(self, node: ast.expr, place: Place) -> Value:
        match node:
            case ast.Constant(value=constant):
                if constant is None:
                    return NONE
                if isinstance(constant, complex):
                    return COMPLEX
                if isinstance(constant, str) and constant.endswith("Tensor"):
                    return dtypes.named(constant) or UNKNOWN
                return number(constant) if isinstance(constant, int | float) else UNKNOWN
            case ast.Name():
                return self._name(node, place)
            case ast.Attribute():
                return self._attribute(node, place)
            case ast.Call():
                return self._call(node, place)
            case ast.BinOp():
                left, right = self.value(node.left, place), self.value(node.right, place)
                if "tensor" in (left.sort, right.sort):
                    return tensors.promote(node.op, left, right)
                return integers.arithmetic(node.op, left, right)
            case ast.UnaryOp():
                return self._unary(node, place)
            case ast.Subscript():
                return self._subscript(node, place)
            case ast.IfExp():
                chosen = dtypes.of_choice(self, node, place)
                return chosen or join([self.value(node.body, place), self.value(node.orelse, place)])
            case ast.BoolOp():
                return join([self.value(operand, place) for operand in node.values])
            case ast.Compare():
                inner = self.value(node.left, place)
                return tensors.BOOL if inner.sort == "tensor" else assume(_TRUTH)
            case ast.NamedExpr():
                return self.value(node.value, place)
            case ast.Tuple() | ast.List():
                return self._sequence(node.elts, place)
            case ast.ListComp() | ast.GeneratorExp():
                return self._sequence([node.elt], place)
        return UNKNOWN

    def _sequence(self, elements: list[ast.expr], place: Place) -> Value:
        values = [self.value(element, place) for element in elements if not isinstance(element, ast.Starred)]
        joined = join(values)
        known = values and joined.sort in ("number", "numbers")
        if not known:
            return UNKNOWN
        return replace(joined, sort="numbers", constant=None)

    def _unary(self, node: ast.UnaryOp, place: Place) -> Value:
        inner = self.value(node.operand, place)
        if isinstance(node.op, ast.USub) and inner.constant is not None:
            return number(-inner.constant)
        if isinstance(node.op, ast.Invert):
            # Of tensors, none but booleans and integers have a complement.
            return tensors.BOOL if inner.sort in ("tensor", "unknown") else INT
        return _TRUTH if isinstance(node.op, ast.Not) else inner

    def _subscript(self, node: ast.Subscript, place: Place) -> Value:
        inner = self.value(node.value, place)
        if inner.sort == "numbers" and not isinstance(node.slice, ast.Slice):
            return _element(inner, bound=inner.bound)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            item = self.names.item(node, place)
            if item is not None and (kept := self.of(item)).sort == "dtype":
                return assume(kept)
            return (
                INT_BY_NAME
                if inner.sort == "unknown" and integers.known_integer(node.slice.value)
                else UNKNOWN
            )
        if isinstance(node.value, ast.Attribute) and inner.sort in ("number", "unknown"):
            return INT_BY_NAME if integers.known_integer(node.value.attr) else UNKNOWN
        return inner if inner.sort in ("tensor", "numbers", "device") or inner is _MASK_BY_NAME else UNKNOWN

    def _attribute(self, node: ast.Attribute, place: Place) -> Value:
        own = getattr(node.value, "id", "") in ("self", "cls")  # which is no tensor
        function = self.names.qualify(node, place)
        dtype = dtypes.named(function)
        if dtype is not None and not own:
            return dtype
        if function in _FLOATS:
            return assume(FLOAT) if node.attr in self.walk.written else FLOAT
        if node.attr in _ATTRIBUTES:
            known = _ATTRIBUTES[node.attr]
            return assume(known) if own or self.defines(node.attr) else known
        if own:
            bindings = self.names.attributes(node.attr, place)
            value = self._joined(bindings)
            if value.sort not in ("unknown", "none") and (dtype is not None or node.attr != "dtype"):
                others = self._joined([*bindings, *self.names.inherited(node.attr, place)])
                written = self.names.writes(node.attr, place.scope.owner)
                if value.is_float:
                    value = replace(value, nominal=True)  # a class of another file may give an int
                return value if others == value and not others.assumed and not written else assume(value)
        if node.attr == "dtype":
            return dtypes.of_attribute(self, node, place)
        if node.attr in ("T", "mT", "data", "real"):
            return self.value(node.value, place)
        if integers.known_integer(node.attr):
            return INT_BY_NAME
        if node.attr in ("weight", "bias") or "inv_freq" in node.attr:
            return tensor("inherited")
        if DEVICES.fullmatch(node.attr):
            return DEVICE
        return _INTEGER_BY_NAME if INTEGER_TENSORS.fullmatch(node.attr) else UNKNOWN

    def _name(self, node: ast.Name, place: Place) -> Value:
        bindings = self.names.bindings(node.id, place)
        if not bindings:
            full = self.names.qualify(node, place)
            return FLOAT if full in _FLOATS else dtypes.named(full) or _by_name(node.id)
        value = self._joined(bindings)
        if self.names.may_be_other(node.id, place):
            value = assume(value)
        if value.sort == "tensor" and not value.dtype and INTEGER_TENSORS.fullmatch(node.id):
            return tensor("int", assumed=True)
        return value if value.sort not in ("unknown", "none") else _by_name(node.id)

    def _joined(self, bindings: list[Binding]) -> Value:
        return join([self._bound(binding) for binding in bindings])

    def _bound(self, binding: Binding) -> Value:
        if binding.how == "parameter":
            return self._parameter(binding)
        if binding.value is None:
            annotated = self._annotated(binding.annotation)
            return assume(annotated) if self._is_given_otherwise(binding, annotated) else annotated
        if binding.how == "item":
            return self._item(binding)
        value = self.value(binding.value, binding.place)
        if binding.how == "buffer":
            return tensors.registered(value)
        if binding.how == "element":
            return _element(value, bound=value.bound)
        if isinstance(binding.value, ast.List | ast.ListComp):
            value = assume(value)  # it can be changed in place
        annotated = self._annotated(binding.annotation)
        if value.is_float and annotated.nominal and binding.place.scope.kind == "class":
            return replace(value, nominal=True)  # a field: an int may be given
        if value.floating is False and binding.annotation and self._is_given_otherwise(binding, annotated):
            return assume(value)
        return assume(annotated) if value.sort == "unknown" and annotated.sort != "unknown" else value

    def _annotated(self, annotation: ast.expr | None) -> Value:
        """Return what an annotation says, which is sure only where the file keeps the meaning of ``int``."""
        value = dtypes.of_annotation(annotation)
        known = value.sort not in ("number", "numbers") or not self._defines_int
        return value if known else assume(value)

    @cached_property
    def _defines_int(self) -> bool:
        walk = self.walk
        defined = (walk.imports, walk.module.bindings, walk.functions, walk.classes)
        return any("int" in some for some in defined)

    def _is_given_otherwise(self, binding: Binding, annotated: Value) -> bool:
        """Say whether a call of the class gives a float, perhaps to this field of a whole number."""
        scope = binding.place.scope
        if scope.kind != "class" or annotated.floating is not False:
            return False
        made = self._call_sites.constructing(scope)
        given = [one for call in made for one in (*call.positional, *call.keywords.values())]
        given += self._call_sites.unpacked(made)
        if any(call.mapped for call in made):
            fields = scope.bindings.items()
            given += self._call_sites.items(next(name for name, some in fields if binding in some))
        return any(_is_fraction(self.of(one)) for one in given)

    def _item(self, binding: Binding) -> Value:
        """Return what a loop takes from its iterable."""
        assert binding.value is not None
        taken: ast.expr | None = binding.value
        if isinstance(taken, ast.Call):
            function = self.names.qualify(taken.func, binding.place)
            if function == "range" or (function == "enumerate" and binding.index == (0,)):
                return INT
            if function in ("enumerate", "zip", "reversed", "sorted"):
                index = binding.index if function == "zip" else (0,)
                known = function != "enumerate" and len(index) == 1 and index[0] < len(taken.args)
                taken = taken.args[index[0]] if known else None
        return UNKNOWN if taken is None else _element(self.value(taken, binding.place))

    def _parameter(self, binding: Binding) -> Value:
        """Return what a parameter is: by annotation, else by its calls in this file and its default."""
        annotated = self._annotated(binding.annotation)
        default = UNKNOWN if binding.value is None else self.value(binding.value, binding.place)
        if annotated.sort in ("number", "numbers") or annotated.is_int:
            of = binding.place.scope, binding.parameter
            if binding.value is not None and Fractions(self).may_be(binding.value, binding.place):
                default = FLOAT
            values = [default, *map(self._given, self._call_sites.arguments(*of, indirect=True))]
            # A tensor may be for another function.
            named = of[0].name not in FORWARDS or annotated.sort in ("number", "numbers")
            others = self._call_sites.supposed(*of) if named else ()
            supposed = [self._given(one, surely=False) for one in others]
            supposed = [one for one in supposed if one.sort != "tensor"]
            if _is_implicit(of[0]) or any(_contradicts(value, annotated) for value in values + supposed):
                return assume(annotated)
        if annotated.sort in ("number", "numbers", "device") or annotated.dtype not in ("", "inherited"):
            return annotated
        if DEVICES.fullmatch(binding.parameter):
            return DEVICE
        sites = self.arguments(binding.place.scope, binding.parameter)
        given = [self.of(site) for site in sites]
        if annotated.sort == "tensor":
            if MASKS.fullmatch(binding.parameter):
                return tensor(annotated.dtype, whole=True, assumed=True)
            if INTEGER_TENSORS.fullmatch(binding.parameter):
                return tensor("int", assumed=True)
            value = join(given)
            return assume(value) if value.sort == "tensor" and not annotated.dtype else annotated
        value = default
        if given:
            value = join(given if value.sort in ("unknown", "none") else [*given, value])
        elif value.sort == "number":
            # A default of 0 says little; one of 2048 for a size says what the size is.
            sized = value.floating is False and integers.known_integer(binding.parameter)
            value = INT_BY_NAME if sized else UNKNOWN
        if value.sort in ("unknown", "none") or (value.sort == "dtype" and not value.dtype):
            if annotated.sort == "dtype" or binding.parameter.endswith("dtype"):
                return Value("dtype", dtype="inherited", source=binding.parameter)
            return annotated
        if value.sort == "number":
            return Value("number", value.whole, value.floating, assumed=True)
        return assume(value)

    def _given(self, argument: Argument, *, surely: bool = True) -> Value:
        """Return what is known of an argument, which what the file computes may make a fraction."""
        value = self.of(argument)
        if value.sort == "tensor" or _is_fraction(value):
            return value
        return FLOAT if Fractions(self).may_be(argument.value, argument.place, given=surely) else value

    def _call(self, node: ast.Call, place: Place) -> Value:
        call = self.call(node, place)
        if call.function == "torch.get_default_dtype":
            return Value("dtype", dtype="default", source="torch.get_default_dtype()")
        if call.function == "torch.device":
            return DEVICE
        counted = self.names.counted(call)
        if counted is not None and counted is not call:
            given = tensors.given_dtype(self, counted)
            made = "default" if counted.floats else "int"
            name = made if given is None else given.dtype or "inherited"
            assumed = (given is not None and given.assumed) or not counted.complete
            return tensor(name, whole=True, grid=True, assumed=assumed)
        if (
            call.function == "getattr"
            and (dtype := dtypes.named(self.names.qualify(node, place))) is not None
        ):
            return dtype
        if (result := tensors.of_call(self, call, place)).sort != "unknown" or result.dtype:
            return result
        result = integers.of_call(self, node, call.function, place)
        if result.sort == "unknown":
            result = self._returned(node.func, call.function, place)
        elif self._is_replaced(call.function):
            result = assume(result)
        if result.sort != "unknown":
            return result
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name.endswith("dtype") and call.positional:
            dtype = self.of(call.positional[0])  # the result serves for it, on some device say
            return assume(dtype) if dtype.sort == "dtype" else UNKNOWN
        return _INTEGER_BY_NAME if RETURNS_INTEGERS.fullmatch(name) else UNKNOWN

    def _is_replaced(self, function: str) -> bool:
        """Say whether a builtin or a module's function is given another meaning, perhaps by a class."""
        name = function.rpartition(".")[2]
        rounds = name in _ROUNDS and f"__{name}__" in self.walk.functions
        return rounds or name in self.walk.written

    def _returned(self, node: ast.expr, function: str, place: Place) -> Value:
        """Return what a function or method of this file returns, by its annotation or as it computes it."""
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        scopes = self.walk.functions.get(
            node.attr if isinstance(node, ast.Attribute) and own else function[1:], []
        )
        if own:
            scopes = [scope for scope in scopes if scope.parent is place.scope.owner]
        elif not function.startswith("."):
            return UNKNOWN
        if len(scopes) != 1 or not isinstance(scopes[0].node, ast.FunctionDef):
            return UNKNOWN
        decorators = {getattr(one, "id", "") for one in scopes[0].node.decorator_list}
        if not decorators <= {"staticmethod", "classmethod"}:
            return UNKNOWN  # what is called is what the decorator makes of it
        annotated = self._annotated(scopes[0].node.returns)
        returned = [self.value(*one) for one in scopes[0].returns]
        if annotated.sort not in ("unknown", "tensor") or annotated.dtype or not returned:
            shown = all(
                (one.sort, one.dtype, one.floating) == (annotated.sort, annotated.dtype, annotated.floating)
                and not one.is_float
                for one in returned
            )
            shown = shown and not self.names.is_overridden(scopes[0])
            name = scopes[0].name
            other = own and (name in self.walk.written or self.names.attributes(name, place))
            shown = shown and not other
            return annotated if shown else assume(annotated)
        computed = assume(join(returned))
        return computed if computed.sort in ("tensor", "dtype") else annotated


def _is_implicit(scope: Scope) -> bool:
    """Say whether a function is one that an operator, an assignment or a class statement calls."""
    special = scope.name.startswith("__") and scope.name.endswith("__")
    decorators = getattr(scope.node, "decorator_list", ())
    sets = any(isinstance(one, ast.Attribute) and one.attr == "setter" for one in decorators)
    return sets or (special and scope.name not in (*FORWARDS, "__init__"))


def _contradicts(value: Value, annotated: Value) -> bool:
    """Say whether what is given is another kind of number than the annotation says, or a tensor."""
    if annotated.floating is True:
        return value.sort == "tensor" or value.dtype == "complex"
    return _is_fraction(value)


def _is_fraction(value: Value) -> bool:
    """Say whether it is surely no whole number, or may be something else than those."""
    if value.sort == "numbers":
        return value.floating is not False
    mixed = value.sort == "number" and value.floating is None and not value.assumed
    return value.is_float or mixed or (value.sort == "tensor" and not value.is_int)


def _by_name(name: str) -> Value:
    """Return what a name alone says."""
    if DEVICES.fullmatch(name):
        return DEVICE
    if MASKS.fullmatch(name):
        return _MASK_BY_NAME
    by_name = INTEGER_TENSORS.fullmatch(name) and not SHAPES.fullmatch(name)
    return _INTEGER_BY_NAME if by_name else UNKNOWN


def _element(value: Value, bound: float | None = None) -> Value:
    """Return what one of several numbers, or a part of a tensor, is."""
    if value.sort == "numbers":
        return replace(value, sort="number", bound=bound)
    return value if value.sort in ("tensor", "device") else UNKNOWN
