"""What a call makes a part of a module's state."""

from __future__ import annotations

import ast
from typing import NamedTuple

from safe_rope.scan.engine import Call, File, Site, Value


class Registration(NamedTuple):
    """A tensor that is no integer one, as a buffer or a parameter, and what is known of it."""

    name: str
    tensor: ast.expr
    value: Value
    parameter: bool


def registration(file: File, site: Site, call: Call) -> Registration | None:
    """Return what a call registers; None where that is nothing, or integers."""
    kept = _kept(site, call)
    value = None if kept is None else file.value(kept[1], site.place)
    if kept is None or value is None or value.sort == "none" or value.is_int:
        return None
    name, tensor, parameter = kept
    return Registration(name, tensor, value, parameter)


def _kept(site: Site, call: Call) -> tuple[str, ast.expr, bool] | None:
    """Return name and tensor of what a call registers, and whether it is a parameter."""
    function = call.node.func
    if isinstance(function, ast.Attribute) and function.attr == "register_buffer":
        name, tensor = call.argument(0, "name"), call.argument(1, "tensor")
        if name is None or tensor is None:
            return None
        parts = name.value.values if isinstance(name.value, ast.JoinedStr) else [name.value]
        text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        return text, tensor.value, False
    last = call.function.rpartition(".")[2]
    if last not in ("Buffer", "Parameter") or not call.function.startswith("torch.") or not call.positional:
        return None
    attribute = getattr(site.targets[0], "attr", "") if site.targets else ""
    return attribute, call.positional[0].value, last == "Parameter"
