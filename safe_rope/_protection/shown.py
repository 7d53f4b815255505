"""How a table of a protected module looks to code outside of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.text import class_name
from safe_rope._recognition.arguments import first_argument
from safe_rope._recognition.tables import is_frequency
from safe_rope.rotation._cos_sin import CosSin

STATE = "_safe_rope"
"""The attribute in which a protected module keeps its state."""
_MACHINERY = ("torch.", "deepspeed.", "accelerate.", "safetensors.")
"""What carries tensors about and computes nothing with them."""
_INITIALISE = ("_init_weights", "_initialize_weights", "init_weights", "reset_parameters")


class Shown(property):
    """A table as an attribute of a protected class: exact, and of the stock model's dtype where they meet.

    A property, since Dynamo before torch 2.8 follows no other descriptor that may be written to.
    """

    def __init__(self, name: str) -> None:
        def get(module: Any) -> Any:
            attributes = module.__dict__  # Dynamo before torch 2.8 takes no ``vars`` of a module
            for place in (attributes, module._buffers, module._parameters):
                if name in place:
                    return _seen(module, name, place[name])
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")

        def put(module: Any, value: Any) -> None:
            vars(module)[name] = value

        def delete(module: Any) -> None:
            if name not in vars(module):
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            del vars(module)[name]

        super().__init__(get, put, delete)


def _seen(module: Any, name: str, table: Any) -> Any:
    if torch.compiler.is_compiling():
        return table
    state = vars(module).get(STATE)
    nominal = state.nominal.get(name) if state is not None else None
    if nominal is None or type(table) is not torch.Tensor or table.dtype in LOW:
        return table
    if nominal == table.dtype and not table.is_meta:
        return table
    frame = sys._getframe(2)
    if str(frame.f_globals.get("__name__")).startswith(_MACHINERY):
        return table
    if frame.f_code.co_name in _INITIALISE:
        return table.clone() if table.is_meta else table  # nothing is known of what is written on meta
    if table.is_meta:
        return CosSin(table, nominal)
    if not _is_code_of_a_module(frame):
        return CosSin(table, nominal) if nominal in LOW else table
    if nominal not in LOW:
        return table.to(nominal)
    # A module computes with it, and decides by its dtype what else it makes.
    phase = f"{class_name(type(module))}.{name}"
    return CosSin(table, nominal, faced=True, phase=phase if is_frequency(name) else None)


def _is_code_of_a_module(frame: Any) -> bool:
    if not frame.f_code.co_argcount:
        return False
    owner = first_argument(frame)
    return isinstance(owner, nn.Module) and hasattr(type(owner), frame.f_code.co_name)
