"""A parent's constructor that sets a table of its child, when the child's own constructor has ended.

The truth of the tables is what the same code makes in FP32 without the library.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from support.zero_init import zero_init
from torch import Tensor, nn

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]
DIM, POSITIONS = 32, torch.tensor([0, 1, 7, 100, 511, 1023])
Build = Callable[[], Any]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)

    def scale(self) -> None:
        scales = torch.ones(DIM // 2)
        scales[4:] = 0.3
        self.inv_freq = self.inv_freq * scales

    def stretch(self) -> None:
        self.inv_freq.mul_(torch.tensor(0.3))

    def base(self) -> None:
        self.inv_freq = 1 / torch.tensor(33000.0) ** (torch.arange(0, DIM, 2) / DIM)

    def forward(self, positions: Tensor) -> Tensor:
        phases = positions[:, None].float() * self.inv_freq
        return torch.cat((phases.cos(), phases.sin()))


class Rows(nn.Module):
    def __init__(self, length: int = 64) -> None:
        super().__init__()
        self.build(length)

    def build(self, length: int = 1024) -> None:
        positions = torch.arange(length, dtype=torch.float32) * torch.tensor(0.1)
        phases = torch.outer(positions, 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("rows", torch.cat((phases.cos(), phases.sin()), -1), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.rows[positions]  # type: ignore[no-any-return]


class Built(Rows):
    def __init__(self) -> None:
        nn.Module.__init__(self)


def parent(child: Build, of: str) -> Build:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = child()
            getattr(self.rope, of)()
            self.linear = nn.Linear(4, 4)

        def forward(self, positions: Tensor) -> Tensor:
            return self.rope(positions)  # type: ignore[no-any-return]

    return Parent


class Model(nn.Module):
    """Initialises itself at its end, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((Rotary(),)) for _ in range(2))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.base()

    def forward(self, positions: Tensor) -> Tensor:
        return torch.cat([layer[0](positions) for layer in self.layers])


class Unregistered(Model):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        rope = Rotary()
        rope.scale()
        self.layers = nn.ModuleList(nn.ModuleList((copy.deepcopy(rope),)) for _ in range(2))


class Copies(Model):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rope = Rotary()
        self.layers = nn.ModuleList(nn.ModuleList((copy.deepcopy(self.rope),)) for _ in range(2))
        for layer in self.layers:
            layer[0].base()


STYLES: dict[str, Build] = {
    "scaled": parent(Rotary, "scale"),
    "stretched": parent(Rotary, "stretch"),
    "another base": parent(Rotary, "base"),
    "longer": parent(Rows, "build"),
    "built": parent(Built, "build"),
    "initialised": Model,
    "unregistered": Unregistered,
    "copies": Copies,
}
CONDITIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "zero.Init": zero_init,
    "default dtype": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:.*meets positions or activations:safe_rope.PrecisionWarning")
@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("style", STYLES)
def test_what_a_parent_sets_is_as_in_fp32(style: str, conditions: str) -> None:
    true = STYLES[style]()(POSITIONS)
    with safe_rope.guard() as session:
        with CONDITIONS[conditions]():
            model = STYLES[style]()
        used = model(POSITIONS)
    assert not session.report.unprotected
    assert safe_rope.audit(model).ok
    for result in (used, model(POSITIONS), model.bfloat16()(POSITIONS)):
        once = torch.finfo(result.dtype).eps / 2  # in the stock model's dtype
        assert (result.float() - true).abs().max() <= max(once, 1e-6)


class Drawn(nn.Module):
    """Nobody can say what it has set."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Rotary()
        self.rope.inv_freq = self.rope.inv_freq * torch.rand(DIM // 2) * torch.tensor(0.3)


@pytest.mark.parametrize("conditions", CONDITIONS)
def test_what_nobody_can_tell_is_named(conditions: str) -> None:
    told = pytest.warns(safe_rope.PrecisionWarning, match="values that its constructor does not give")
    with told, safe_rope.guard() as session:
        with CONDITIONS[conditions]():
            model = Drawn()
        kept = model.rope.inv_freq.clone()
    assert session.report.unprotected
    assert not safe_rope.audit(model).ok
    assert torch.equal(model.rope.inv_freq, kept)


def test_what_a_user_sets_is_no_parents() -> None:
    own = 500000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
    with safe_rope.guard() as session, default_dtype(torch.bfloat16):
        model = nn.Sequential(Rotary())
        model[0].inv_freq = own.clone()
    assert not session.report.unprotected
    assert torch.equal(model[0].inv_freq, own)
    assert safe_rope.audit(model).ok


def test_no_more_constructors_run_again_than_tell(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with runs.open("a") as file:
                file.write(".")
            self.part = STYLES["scaled"]()

    with safe_rope.guard() as session, default_dtype(torch.bfloat16):
        model = Root()
    assert not session.report.unprotected
    assert torch.equal(model.part(POSITIONS), STYLES["scaled"]()(POSITIONS))
    assert runs.read_text() == "."
