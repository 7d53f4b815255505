"""Edits: byte-exact, and safe only where the FP32 table stays the same bit for bit."""

from __future__ import annotations

import ast

from safe_rope.scan.engine import Call, Edit, File, Fix, Place, tensors

# Arguments of arange that an integer tensor, or a tensor made from one, would not take the same way.
_OBSTACLES = {"out", "requires_grad", "layout"}


def torch_name(file: File, place: Place) -> str | None:
    """Return what this file calls torch."""
    for local, full in file.walk.imports.items():
        if full == "torch" and not file.names.bindings(local, place):
            return local
    return (
        None if file.names.bindings("torch", place) else "torch" if "torch" not in file.walk.imports else None
    )


def sibling(file: File, node: ast.expr, place: Place, name: str) -> str | None:
    """Return how to write a torch dtype at a place, in the way that ``node`` writes one."""
    if isinstance(node, ast.Attribute) and file.names.qualify(node, place).startswith("torch."):
        return f"{ast.unparse(node.value)}.{name}"
    torch = torch_name(file, place)
    return None if torch is None else f"{torch}.{name}"


def edit(file: File, start: int, end: int, replacement: str) -> Edit:
    """Return an edit of the bytes as read, given offsets in the text."""
    return Edit(file.source.as_read(start), file.source.as_read(end), replacement)


def is_editable(call: Call) -> bool:
    """Say whether the call itself says all that the fix must know."""
    return call.complete and not _OBSTACLES & call.keywords.keys()


def through_integers(file: File, call: Call, place: Place, cast: str | None = None) -> Fix | None:
    """Count in int64, then cast; ``cast`` is what to cast to, the given dtype when None.

    Safe where every bound is provably whole and the given dtype is kept: then the same numbers are rounded
    to the same dtype, once, whatever the allocating call is intercepted by.
    """
    values = file.bounds(call)
    if (
        not is_editable(call)
        or not values
        or any(value.whole is not True and (value.is_float or value.whole is False) for value in values)
    ):
        return None
    whole = all(value.whole for value in values)
    given = call.keywords.get("dtype")
    end = file.source.end(call.node)
    if given is None:
        torch = torch_name(file, place)
        if torch is None:
            return None
        edits = (_append(file, call, f"dtype={torch}.int64"), edit(file, end, end, f".to({torch}.float32)"))
        return Fix(whole, "Count in int64, then cast to float32.", edits)
    if not given.direct or given.place is not place:
        return None
    integer = sibling(file, given.value, place, "int64")
    if integer is None:
        return None
    target = cast or file.source.segment(given.value)
    start, stop = file.source.start(given.value), file.source.end(given.value)
    if file.source.text[end - 1 : end] != b")" or "\n" in target or "\r" in target:
        return None
    edits = (edit(file, start, stop, integer), edit(file, end, end, f".to({target})"))
    return Fix(whole and cast is None, "Count in int64, then cast.", edits)


def _append(file: File, call: Call, argument: str) -> Edit:
    """Add an argument after the last one."""
    nodes = [*call.node.args, *(keyword.value for keyword in call.node.keywords)]
    end = max(file.source.end(node) for node in nodes)
    # A bracket around the last argument ends after it.
    text = file.source.text
    while (follows := text[end : file.source.end(call.node) - 1].lstrip()).startswith(b")"):
        end = file.source.end(call.node) - 1 - len(follows) + 1
    return edit(file, end, end, f", {argument}")


def with_dtype(file: File, call: Call, place: Place, dtype: str = "float32") -> Fix | None:
    """Give the call an explicit dtype; the result's dtype changes, hence never safe."""
    if not call.complete or not (call.node.args or call.node.keywords):
        return None
    given = call.keywords.get("dtype")
    if given is None:
        torch = torch_name(file, place)
        edits = () if torch is None else (_append(file, call, f"dtype={torch}.{dtype}"),)
    else:
        named = sibling(file, given.value, place, dtype)
        direct = given.direct and given.place is place and named is not None
        start, end = file.source.start(given.value), file.source.end(given.value)
        edits = (edit(file, start, end, named or ""),) if direct else ()
    return Fix(False, f"Ask for {dtype}.", edits) if edits else None


def cast_operand(file: File, operand: ast.expr, place: Place) -> Fix | None:
    """Cast integers to float32 where an operation would give them the default dtype."""
    torch = torch_name(file, place)
    if torch is None or not isinstance(operand, ast.Call | ast.Subscript | ast.Name | ast.Attribute):
        return None
    end = file.source.end(operand)
    cast = edit(file, end, end, f".to({torch}.float32)")
    return Fix(True, "Cast to float32 before the operation.", (cast,))


def replace_cast(file: File, node: ast.expr, place: Place) -> Fix | None:
    """Make a cast of positions one to float32; the result's dtype changes, hence never safe."""
    torch = torch_name(file, place)
    if torch is None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    call = file.inference.call(node, place)
    start, end = file.source.end(node.func.value), file.source.end(node)
    if node.func.attr in ("half", "bfloat16"):
        replacement = f".to({torch}.float32)"
    else:
        argument = tensors.cast_argument(file.inference, call)
        if argument is None or not argument.direct or argument.place is not place:
            return None
        if file.value(argument.value, argument.place).sort == "dtype":
            start, end = file.source.start(argument.value), file.source.end(argument.value)
            replacement = f"{torch}.float32"
        else:
            replacement = f".to(device={file.source.segment(argument.value)}.device, dtype={torch}.float32)"
    return Fix(False, "Cast to float32.", (edit(file, start, end, replacement),))
