"""Rounded frequencies in modules that torch has made of others are not ok, without a constructor to ask."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import safe_rope

BF16, DIM, IDS = torch.bfloat16, 32, torch.arange(600)[None]


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, p: Tensor) -> Tensor:
        return (p[..., None].float() * self.inv_freq.float()).cos()


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope, self.norm = Phases(), nn.BatchNorm1d(DIM // 2)

    def forward(self, p: Tensor) -> Tensor:
        return self.norm(self.rope(p)[0])


def bare(module: nn.Module) -> nn.Module:
    made = nn.Module()
    part = module.rope if isinstance(module, Parent) else module
    made.register_buffer("inv_freq", part.inv_freq)
    return made


MADE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fx": torch.fx.symbolic_trace,
    "export": lambda module: torch.export.export(module.eval(), (IDS,)).module(),
    "trace": lambda module: torch.jit.trace(module.eval(), IDS, check_trace=False),
    "script": lambda module: torch.jit.script(module.eval()),
    "bare": bare,
}


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("cls", [Phases, Parent])
@pytest.mark.parametrize("around", [False, True])
def test_what_torch_has_made_is_judged_by_its_numbers(how: str, cls: type[nn.Module], around: bool) -> None:
    for dtype in (torch.float32, BF16):
        part = cls()
        (part.rope if isinstance(part, Parent) else part).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = MADE[how](part)
        report = safe_rope.audit(nn.Sequential(nn.Linear(4, 4), model) if around else model)
        loses_its_name = how == "fx"  # what is computed while it is traced is a constant
        wrong = "unknown" if loses_its_name else "damaged"
        assert report.verdict == ("ok" if dtype == torch.float32 else wrong), str(report)
        assert len(report.findings) == (dtype == BF16)


class Rows(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(600.0), 1e4 ** (-torch.arange(0, DIM, 2) / DIM))
        made = {
            "cos": phases.cos(),
            "both": torch.stack((phases.sin(), phases.cos()), -1).flatten(-2)[None],
            "drawn": torch.randn(600, DIM),
            "smooth": torch.outer(torch.arange(600.0), torch.rand(DIM)),
        }
        self.register_buffer("rows", made[kind])

    def forward(self, p: Tensor) -> Tensor:
        return self.rows.squeeze()[p] * 2


@pytest.mark.parametrize("how", ["fx", "export", "trace", "script"])
@pytest.mark.parametrize("kind", ["cos", "both", "drawn", "smooth"])
def test_rounded_sines_and_cosines_are_not_ok(how: str, kind: str) -> None:
    for dtype in (torch.float32, BF16):
        model = Rows(kind).to(dtype).float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = safe_rope.audit(MADE[how](model))
        rounded = dtype == BF16 and kind in ("cos", "both")
        assert report.verdict == ("unknown" if rounded else "ok"), str(report)


QUARTERS = torch.tensor([0.0, 1.0, 0.0, -1.0]).repeat(8)
WINDOW = torch.hann_window(32)
NO_NUMBERS = torch.full((16,), float("nan"))


@pytest.mark.parametrize(
    "values",
    [QUARTERS[:, None].repeat(1, 4), (WINDOW[:, None] * WINDOW).to(BF16), NO_NUMBERS],
    ids=["whole numbers", "a window", "no numbers"],
)
@pytest.mark.parametrize("is_traced", [False, True])
def test_what_holds_no_rounded_positions_is_ok(values: Tensor, is_traced: bool) -> None:
    module = nn.Module()
    module.register_buffer("held", values)
    if is_traced:
        graph = torch.fx.Graph()
        graph.output(graph.get_attr("held"))
        module = torch.fx.GraphModule(module, graph)
    assert safe_rope.audit(module).verdict == "ok"


def test_statistics_that_are_no_numbers_are_no_positions() -> None:
    norm = nn.BatchNorm1d(16)
    norm.running_mean.copy_(NO_NUMBERS)
    assert safe_rope.audit(nn.Sequential(nn.Linear(16, 16), norm)).verdict == "ok"
