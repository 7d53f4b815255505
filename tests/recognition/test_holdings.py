"""What the types of what a module keeps rule out is not there, and what may be there is looked for."""

import collections
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from safe_rope._recognition.holdings import entries, keeps_nothing, unfilled

TABLE = torch.arange(8.0)


class Plain:
    """An object of this file that holds a table."""

    def __init__(self) -> None:
        self.cos = TABLE


class Slotted:
    """The same in a slot."""

    __slots__ = ("cos",)

    def __init__(self) -> None:
        self.cos = TABLE


Pair = collections.namedtuple("Pair", ["cos", "sin"])

HELD: dict[str, Any] = {
    "tensor": TABLE,
    "parameter outside of parameters": nn.Parameter(TABLE, requires_grad=False),
    "list": [TABLE],
    "named tuple": Pair(TABLE, TABLE),
    "dict": {"cos": TABLE},
    "namespace": types.SimpleNamespace(cos=TABLE),
    "object": Plain(),
    "slot": Slotted(),
    "none": None,
}
DULL: dict[str, Any] = {
    "number": 3,
    "text": "text",
    "config": LlamaConfig(),
    "function": len,
    "dtype": torch.float32,
    "module": types,
}


class Holder(nn.Module):
    """Keeps one thing."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.__dict__["kept"] = kept


@pytest.mark.parametrize("name", HELD)
def test_what_may_hold_a_table_is_looked_at(name: str) -> None:
    module = Holder(HELD[name])
    assert list(entries(module)) or unfilled(module)
    assert not keeps_nothing(module)


def test_a_buffer_is_looked_at_even_an_empty_one() -> None:
    module = Holder(1)
    assert keeps_nothing(module)
    module.register_buffer("inv_freq", None)
    assert not keeps_nothing(module)


@pytest.mark.parametrize("name", DULL)
def test_what_holds_nothing_is_told_by_its_type(name: str) -> None:
    module = Holder(DULL[name])
    assert not list(entries(module))
    assert keeps_nothing(module)


def test_a_name_that_gets_another_type_is_looked_at_again() -> None:
    module = Holder(1)
    assert keeps_nothing(module)
    module.__dict__["kept"] = TABLE
    assert not keeps_nothing(module)
    module.__dict__["kept"] = 1
    assert keeps_nothing(module)
