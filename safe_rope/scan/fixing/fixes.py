"""Edits: byte-exact, and safe only where the FP32 table stays the same bit for bit."""

from __future__ import annotations

import ast
import math
import re

from safe_rope.scan.engine import ASKED, PINNED, Argument, Call, Edit, File, Fix, Place, Step, Value, tensors

# Up to here every whole number is a float32; beyond, arange rounds otherwise than a cast does.
_EXACT = 2**24
# Arguments of arange that an integer tensor, or a tensor made from one, would not take the same way.
_OBSTACLES = {"out", "requires_grad", "layout", "pin_memory"}
# A bracket that closes after what stands in it, and after comments and line ends.
_CLOSED = re.compile(rb"(?:[\s\\]|#[^\r\n]*[\r\n])*\)")


def torch_name(file: File, name: str, place: Place, *near: ast.expr) -> str | None:
    """Return how to write a name of torch at a place: as an expression near it does, or by an import.

    None where there is no way, or where the last of these, what is called, may be another module's.
    """
    if name in file.walk.written or not all(file.names.is_certain(node, place) for node in near[-1:]):
        return None
    for node in near:
        if isinstance(node, ast.Attribute) and file.names.qualify(node.value, place) == "torch":
            return f"{ast.unparse(node.value)}.{name}"
    imported = {
        full: local
        for local, full in file.walk.imports.items()
        if file.walk.bound.get(local, place.order) < place.order and not file.names.bindings(local, place)
    }
    return f"{imported['torch']}.{name}" if "torch" in imported else imported.get(f"torch.{name}")


def edit(file: File, start: int, end: int, replacement: str) -> Edit:
    """Return an edit of the bytes as read, given offsets in the text."""
    return Edit(file.source.as_read(start), file.source.as_read(end), replacement)


def is_editable(call: Call) -> bool:
    """Say whether the call itself says all that the fix must know."""
    # The fix asks for the dtype after all other arguments, which a walrus may change.
    binds = any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(call.node))
    return call.complete and not _OBSTACLES & call.keywords.keys() and not binds


def through_integers(file: File, call: Call, place: Place, *, keep: bool = True) -> Fix | None:
    """Count in int64, then cast to the given dtype, or to float32 if the given dtype is not kept.

    The fix is safe if every bound is provably whole and the given dtype is kept. Then the same numbers are
    rounded to the same dtype, once, whatever intercepts the allocating call.
    """
    bounds = call.bounds
    values = [file.of(bound) for bound in bounds]
    if (
        not is_editable(call)
        or not values
        or any(value.whole is not True and value.is_float for value in values)
    ):
        return None
    made = _in_int64(file, call, place, keep=keep)
    if made is None:
        return None
    edits, kept = made
    for bound, value in zip(bounds, values, strict=True):
        if value.is_float:
            literal = value.constant is not None and not _names(bound.value)
            # No integer is the -0.0 that a count from it begins with.
            literal = literal and (value.constant != 0 or math.copysign(1, value.constant) > 0)
            kept = kept and literal
            if literal and bound.direct:
                start, stop = file.source.start(bound.value), file.source.end(bound.value)
                edits.append(edit(file, start, stop, f"{value.constant:.0f}"))
    # What Python counts itself is whole.
    ranged = file.inference.call(call.node, place).function != call.function
    whole = all(
        (ranged and _is_exact(value)) or is_whole(file, at) for at, value in zip(bounds, values, strict=True)
    )
    cast = "" if "dtype" in call.keywords else " to float32"
    return Fix(whole and kept, f"Count in int64, then cast{cast}.", tuple(edits))


def filled(file: File, call: Call, place: Place) -> Fix | None:
    """Make a table of whole numbers in int64, then cast it to the dtype that it has in FP32."""
    made = _in_int64(file, call, place) if is_editable(call) else None
    return None if made is None else Fix(made[1], "Make it in int64, then cast.", tuple(made[0]))


def _in_int64(file: File, call: Call, place: Place, *, keep: bool = True) -> tuple[list[Edit], bool] | None:
    """Return edits that make a call in int64 and cast what it makes, and whether to the dtype that it has.

    None where that cannot be written. ``keep``: cast to the given dtype, else to float32.
    """
    given = call.keywords.get("dtype")
    near = (call.node.func,) if given is None else (given.value, call.node.func)
    integer, float32 = (torch_name(file, name, place, *near) for name in ("int64", "float32"))
    end = file.source.end(call.node)
    if integer is None or (given is not None and (not given.direct or given.place is not place)):
        return None
    target = file.source.segment(given.value) if given is not None and keep else float32
    if target is None or "\n" in target or "\r" in target or file.source.text[end - 1 : end] != b")":
        return None
    if given is None:
        dtype, kept = _append(file, call, f"dtype={integer}"), not file.changes_default
    else:
        start, stop = file.source.start(given.value), file.source.end(given.value)
        of = file.of(given)  # what is cast to the default dtype is not float32 whatever that is
        dtype, kept = edit(file, start, stop, integer), keep and not of.assumed and of.dtype in PINNED
    return [dtype, edit(file, end, end, f".to({target})")], kept and not file.intercepts


def is_whole(file: File, argument: Argument) -> bool:
    """Say whether an argument is provably a whole number: by its type, or as what a floor division leaves."""
    value, node = file.of(argument), argument.value
    floored = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
    floored = floored and not {"__floordiv__", "__rfloordiv__"} & file.walk.functions.keys()
    whole = value.sort == "number" and value.whole is True and _is_exact(value)
    return whole and (floored or not value.assumed)


def _is_exact(value: Value) -> bool:
    return value.constant is None or abs(value.constant) <= _EXACT


def _names(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Name) for inner in ast.walk(node))


def _append(file: File, call: Call, argument: str) -> Edit:
    """Add an argument after the last one."""
    nodes = [*call.node.args, *(keyword.value for keyword in call.node.keywords)]
    end = max(file.source.end(node) for node in nodes)
    while (closed := _CLOSED.match(file.source.text, end, file.source.end(call.node) - 1)) is not None:
        end = closed.end()
    return edit(file, end, end, f", {argument}")


def with_dtype(file: File, call: Call, place: Place) -> Fix | None:
    """Give the call the dtype float32; the result's dtype changes, hence never safe."""
    if not call.complete or not (call.node.args or call.node.keywords):
        return None
    given = call.keywords.get("dtype")
    near = (call.node.func,) if given is None else (given.value, call.node.func)
    float32 = torch_name(file, "float32", place, *near)
    if float32 is None or (given is not None and (not given.direct or given.place is not place)):
        return None
    if given is None:
        dtype = _append(file, call, f"dtype={float32}")
    else:
        dtype = edit(file, file.source.start(given.value), file.source.end(given.value), float32)
    return Fix(False, "Ask for float32.", (dtype,))


def cast_operand(file: File, call: Call, step: Step) -> Fix | None:
    """Cast integers to float32 where an operation would give them the default dtype.

    Safe where they are provably integers, and all that they meet provably real numbers or integers.
    """
    operand, place = step.operand, step.place
    float32 = torch_name(file, "float32", place, call.node.func)
    if float32 is None:
        return None
    # The sign of nought, and sums and products of integers, stay what they are only if the cast comes last.
    whole = isinstance(operand, ast.Call | ast.Subscript | ast.Name | ast.Attribute)
    others = [file.value(node, place) for node in step.others]
    proven = all(value.is_proven_real for value in (file.value(operand, place), *others))
    # What integers meet must make them floating whatever is given for an annotation.
    proven = proven and (step.divides or not others or any(value.is_proven_float for value in others))
    end = file.source.end(operand)
    cast = [edit(file, end, end, f"{'' if whole else ')'}.to({float32})")]
    if not whole:
        start = file.source.start(operand)
        cast.insert(0, edit(file, start, start, "("))
    proven = proven and not file.changes_default and not file.intercepts
    return Fix(proven, "Cast to float32 before the operation.", tuple(cast))


def replace_cast(file: File, node: ast.expr, place: Place, *near: ast.expr) -> Fix | None:
    """Make a cast of positions one to float32; the result's dtype changes, hence never safe."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    call = file.inference.call(node, place)
    # From the dot on: a bracket around the value ends after the value.
    before = file.source.text[: file.source.end(node.func) - len(node.func.attr)].rstrip()
    start, end = len(before) - 1, file.source.end(node)
    if not before.endswith(b"."):
        return None
    if node.func.attr in ("half", "bfloat16"):
        float32 = torch_name(file, "float32", place, *near)
        replacement = f".to({float32})"
    else:
        argument = tensors.cast_argument(file.inference, call)
        if argument is None or not argument.direct or argument.place is not place:
            return None
        float32 = torch_name(file, "float32", place, argument.value, *near)
        target = file.of(argument)
        if target.source.endswith("Tensor"):
            return None  # it moves to the type's device, too
        if target.sort == "dtype" or "dtype" in call.keywords or node.func.attr == "type":
            start, end = file.source.start(argument.value), file.source.end(argument.value)
            replacement = f"{float32}"
        elif node.func.attr == "to" and not _is_tensor(file, argument):
            return None
        else:
            replacement = f".to(device={file.source.segment(argument.value)}.device, dtype={float32})"
    return Fix(False, "Cast to float32.", (edit(file, start, end, replacement),)) if float32 else None


def _is_tensor(file: File, argument: Argument) -> bool:
    """Say whether an argument is known as a tensor, or asked for what no dtype or device has."""
    if file.of(argument).sort == "tensor":
        return True
    uses = file.flow.uses(argument.place.scope, getattr(argument.value, "id", ""))
    asked = {above[-1].attr for _, above, _ in uses if isinstance(above[-1], ast.Attribute)}
    return not asked.isdisjoint(ASKED)
