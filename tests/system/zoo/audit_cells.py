"""What the audit says of a style under a load path, beside what has become of its tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harm_cells import damage_of
from harm_paths import (
    CAST,
    DEFAULT_DTYPE,
    HALF_AND_BACK,
    META,
    PLAIN,
    ZERO_3,
    ZERO_INIT,
    Held,
    LoadPath,
    filled_memory,
    functions_put_back,
    gathered,
)
from harm_runs import run
from laboratory.zoo.tables import Table, damage, is_computed, stored
from styles import STYLES, Style
from torch import nn

import safe_rope

LOW = (torch.bfloat16, torch.float16)
UNFILLED = "on meta"


def low_state(model: nn.Module) -> nn.Module:
    """Put a BF16 checkpoint in the place of what the model holds."""
    state = {n: v.bfloat16() if v.is_floating_point() else v for n, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def half_filled(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on meta and give it what a file holds of it."""
    state = make().state_dict()
    with filled_memory(), torch.device("meta"):  # what is made of meta may be memory as it was
        model = make()
    model.load_state_dict(state, assign=True)
    return model


PATHS = (
    *(PLAIN, CAST, HALF_AND_BACK, ZERO_INIT, ZERO_3, DEFAULT_DTYPE, META),
    LoadPath("BF16 state, assigned", torch.bfloat16, load=low_state),
    LoadPath("meta, FP32 state assigned", torch.float32, build=half_filled),
)


class Seen(NamedTuple):
    """One style under one load path.

    Attributes:
        style: its name.
        path: the load path's.
        verdict: the audit's.
        lost: what is wrong with its tables, by name; ``UNFILLED`` where one has no values.
        report: the audit's, as text.
    """

    style: str
    path: str
    verdict: str
    lost: dict[str, str]
    report: str

    @property
    def problem(self) -> str | None:
        """Say what of the verdict is wrong, or None.

        Lost tables may be called right where nothing reads them, and right ones damaged where forward
        computes wrongly from them.
        """
        lost = any(text != UNFILLED for text in self.lost.values())
        if self.verdict == "unknown" or (self.verdict == "damaged") == lost:
            return None
        if lost != _answers_wrong(self.style, self.path):
            return None
        said = self.lost or "nothing is lost"
        return f"{self.style}, {self.path}: {self.verdict}, but {said}\n{self.report}"


def look(style: Style, path: LoadPath) -> Seen | None:
    """Load a style, audit it, and compare its tables; None where it cannot be loaded so."""
    expected = _expected(style)
    style.reset()
    with warnings.catch_warnings(), functions_put_back():
        warnings.simplefilter("ignore")
        try:
            model = path.build(_factory(style, path))
            path.load(model)
        except Exception:
            return None
        own = model.held if path.held else model
        report = safe_rope.audit(model)
        lost = damage(expected[0], stored(own))
        lost |= _lost_parameters(own, expected[1])
    style.reset()
    return Seen(style.name, path.name, report.verdict, lost, str(report))


def _factory(style: Style, path: LoadPath) -> Callable[[], nn.Module]:
    return (lambda: Held(style.make)) if path.held else style.make


def _expected(style: Style) -> tuple[dict[str, Table], dict[str, torch.Tensor]]:
    """The tables that the style holds as plain torch builds it in FP32, and the frozen parameters."""
    made: list[Any] = []
    for seed in (0, 1):
        style.reset()
        torch.manual_seed(seed)
        made.append(style.make())
    style.reset()
    model, again = made
    if "no position" in style.tags:
        return {}, {}
    others = dict(again.named_parameters())
    frozen = {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if not value.requires_grad and is_computed(value, others[name])
    }
    second = stored(again)
    tables = {
        path: Table(values.detach().clone(), 0.0)
        for path, values in stored(model).items()
        if values.numel() > 1 and is_computed(values, second.get(path))
    }
    return tables, frozen


def _lost_parameters(model: nn.Module, expected: dict[str, torch.Tensor]) -> dict[str, str]:
    """A parameter may be rounded once to the model's dtype, unless it holds frequencies."""
    lost = {}
    with gathered(model):
        for name, parameter in model.named_parameters():
            true = expected.get(name)
            if true is None:
                continue
            if parameter.is_meta:
                lost[name] = UNFILLED
                continue
            once = true.to(parameter.dtype) if true.dim() > 1 or "slope" in name else true
            off = (parameter.detach().double() - once.double()).abs()
            if bool((off > 2.0**-20 * once.double().abs()).any() | off.isnan().any()):
                lost[name] = f"off by {float(off.max()):.2g}"
    return lost


def _answers_wrong(style: str, path: str) -> bool:
    """Whether what the loaded style returns is not what plain torch makes of it in FP32."""
    where = next(one for one in PATHS if one.name == path)
    result = run(STYLES[style], where)
    return result.error is not None or damage_of(result, STYLES[style], where) is not None
