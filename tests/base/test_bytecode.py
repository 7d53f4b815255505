"""What is told from a class's bytecode is told of its methods, whatever stands around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zero_init import zero_init
from torch import nn

from safe_rope._base.bytecode import facts

pytestmark = pytest.mark.usefixtures("deepspeed_group")


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.arange(4) @ torch.arange(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local: list[torch.Tensor] = []
        local.append(x.clone().mul_(2))
        return self.kept.clone().add_(1) + local[0]


class InPlace(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(1)
        return x


class InADictionary(Reads):
    def forward(self, x: Any) -> Any:
        self.seen["calls"] += 1  # type: ignore[operator,index]
        return x


class InAList(Reads):
    def forward(self, x: Any) -> Any:
        self.history.append(x)  # type: ignore[operator]
        return x


@pytest.mark.parametrize(
    ("cls", "stores"), [(Reads, False), (InPlace, True), (InADictionary, True), (InAList, True)]
)
def test_what_changes_what_is_kept(cls: type[nn.Module], stores: bool) -> None:
    assert facts(cls).stores == stores
    assert not facts(cls).multiplies


def test_a_constructor_that_zero_init_has_replaced_is_no_method() -> None:
    class Product(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.other = self.kept @ self.kept

    with zero_init():
        pass
    assert not facts(Product).stores
    assert not facts(Product).multiplies

    with zero_init():

        class Inside(Product):
            def __init__(self) -> None:
                super().__init__()
                self.more = 1

        assert not facts(Inside).stores
