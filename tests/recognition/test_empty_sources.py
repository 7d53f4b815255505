"""A constructor that asks an empty tensor for its dtype has filled what it makes by that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import safe_rope
from safe_rope._recognition.explained import is_damage
from safe_rope._recognition.provenance import Origin, Provenance

HALF = 16
RATES = [10000.0 ** (-i / HALF) for i in range(HALF)]
MAKERS: dict[str, Callable[[], Tensor]] = {
    "new_tensor": lambda: torch.empty(3).new_tensor(RATES),
    "new_full": lambda: torch.empty(0).new_full((HALF,), 1e4) ** -(torch.arange(HALF) / HALF),
    "full_like": lambda: torch.full_like(torch.empty(HALF), 1e4) ** -(torch.arange(HALF) / HALF),
    "type_as": lambda: torch.tensor(RATES).type_as(torch.empty(1)),
    "cat": lambda: torch.cat((torch.empty(0), torch.tensor(RATES))),
}


class Rotary(nn.Module):
    maker = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", MAKERS[self.maker](), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phase = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@pytest.mark.contract
@pytest.mark.parametrize("maker", MAKERS)
def test_a_right_table_is_ok_and_a_cast_one_is_repaired(maker: str) -> None:
    cls = type("Rotary", (Rotary,), {"maker": maker})
    model = cls()
    true = model.inv_freq.clone()
    assert safe_rope.audit(model).verdict == "ok"
    model.to(torch.bfloat16)
    assert safe_rope.audit(model).verdict == "damaged"
    safe_rope.protect(model)
    assert torch.equal(model.inv_freq, true)


@pytest.mark.contract
@pytest.mark.parametrize(
    "changed",
    [
        lambda memory: memory.requires_grad_(False),
        lambda memory: memory.unsqueeze_(0).squeeze_(0),
        lambda memory: setattr(memory, "requires_grad", False) or memory,
        *([nn.Buffer] if hasattr(nn, "Buffer") else []),
    ],
    ids=lambda changed: getattr(changed, "__name__", "changed"),
)
def test_memory_that_got_no_values_is_still_empty(changed: Callable[[Tensor], Tensor]) -> None:
    with Provenance() as provenance:
        memory = changed(torch.empty(HALF))
        filled = changed(torch.empty(HALF)).copy_(torch.arange(HALF))
    assert provenance.origin(memory) is Origin.EMPTY
    assert not provenance.origin(filled) & Origin.EMPTY


class Later(nn.Module):
    """Its constructor makes memory, and its holder fills that when the guard is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(HALF), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phase = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def _copies(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].inv_freq.copy_(torch.tensor(RATES))


def _assigns(model: nn.Module) -> None:
    model[0].inv_freq.data = torch.tensor(RATES)


@pytest.mark.contract
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("fill", [_copies, _assigns])
def test_what_fills_memory_of_faint_numbers_is_kept(fill: Callable[[nn.Module], None], is_cast: bool) -> None:
    freed = [torch.arange(1, HALF + 1).float() * 1e-40 for _ in range(256)]
    del freed  # what torch.empty gets again
    with safe_rope.guard():
        model = nn.Sequential(Later())
    fill(model)
    assert safe_rope.audit(model).verdict != "damaged"
    model = model.bfloat16() if is_cast else model
    stock = Later()
    stock.inv_freq.copy_(torch.tensor(RATES))
    x = torch.zeros(1, 64, 4)
    assert all(map(torch.equal, model(x), stock(x)))


@pytest.mark.parametrize("fill", [_copies, _assigns])
def test_what_fills_memory_of_no_numbers_is_kept(fill: Callable[[nn.Module], None]) -> None:
    torch.use_deterministic_algorithms(True)  # which gives memory NaN
    try:
        with safe_rope.guard():
            model = nn.Sequential(Later())
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(model[0].inv_freq.isnan().all())
    fill(model)
    stock = Later()
    stock.inv_freq.copy_(torch.tensor(RATES))
    x = torch.zeros(1, 64, 4)
    assert all(map(torch.equal, model.bfloat16()(x), stock(x)))


def test_faint_numbers_tell_of_nothing_that_it_is_unfilled() -> None:
    faint = torch.arange(1, HALF + 1).float() * 1e-40
    assert not is_damage(torch.tensor(RATES), faint)
    assert is_damage(faint, torch.tensor(RATES))
