"""The harness of `test_do_no_harm`: its truth is true, and it tells every kind of cell when it sees one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harm_cells
import pytest
import torch
from harm_cells import BOTH_CRASH, BROKEN, MADE_WRONG, NAMED, OTHER_DTYPES, REPAIRED, RIGHT, SILENTLY_WRONG
from harm_paths import CAST, DEFAULT_DTYPE, HALF_AND_BACK, META, PLAIN, LoadPath
from harm_runs import run
from styles import LENGTHS, STYLES
from torch import nn

from safe_rope.errors import PrecisionWarning

FP32_ROUNDINGS = 2.0**-23 * max(LENGTHS)


def test_there_are_more_than_eighty_styles() -> None:
    assert len(STYLES) >= 85
    assert len({style.make for style in STYLES.values()}) == len(STYLES)


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.exact is not None])
def test_truth_is_what_a_formula_gives(name: str) -> None:
    truth = harm_cells.truth_of(name)
    formula = harm_cells.formula_of(STYLES[name], truth)
    assert formula is not None, "the style names frequencies that can be read"
    assert truth.inv_freq is not None
    assert truth.inv_freq.dtype == torch.float32
    for leaf, exact in zip(truth.leaves, formula, strict=True):
        leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        assert ((leaf - exact).abs() <= FP32_ROUNDINGS * exact.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_right_where_nobody_touches_it(name: str) -> None:
    first, second = run(STYLES[name], PLAIN), run(STYLES[name], PLAIN)
    for tables in ("exact", "fp32"):
        assert harm_cells.judge(STYLES[name], PLAIN, first, second, tables) == (RIGHT, "")


@pytest.mark.parametrize("name", STYLES)
def test_a_style_says_whether_a_load_path_harms_it(name: str) -> None:
    style = STYLES[name]
    harmed = []
    for path in (CAST, DEFAULT_DTYPE, HALF_AND_BACK, META):
        if path.name not in style.not_on:
            result = run(style, path)
            harmed.append(result.error is not None or harm_cells.damage_of(result, style, path) is not None)
    assert any(harmed) != ("unharmed" in style.tags)


# ---- kinds of cells -----------------------------------------------------------------------------------


class Meddler:
    """Stands in for safe_rope: does something to the model, and reports something."""

    def __init__(self, meddle: Callable[[nn.Module], Any], **report: Any) -> None:
        self.meddle = meddle
        self.report = SimpleNamespace(protected=[], unprotected=[], **report)

    def guard(self, *, tables: str) -> Any:
        return contextlib.nullcontext()

    def protect(self, model: nn.Module, *, tables: str) -> Any:
        self.meddle(model)
        return self.report


def kind(name: str, path: LoadPath, library: Meddler, how: Any = "protect") -> str:
    style = STYLES[name]
    found, _ = harm_cells.judge(
        style, path, run(style, path), run(style, path, how, "exact", library), "exact"
    )
    return found


def nothing(model: nn.Module) -> None:
    pass


def halve(model: Any) -> None:
    model.inv_freq.mul_(0.5)


def one_bit(model: Any) -> None:
    model.inv_freq[3] = torch.nextafter(model.inv_freq[3], torch.tensor(1.0))


def repair(model: Any) -> None:
    truth = harm_cells.truth_of(type(model).__name__).inv_freq
    assert truth is not None
    model.inv_freq = truth.clone()


def fail(model: nn.Module) -> None:
    raise ValueError("cannot")


def answer_in_fp32(model: Any) -> None:
    repair(model)
    forward = model.forward
    model.forward = lambda x: forward(x.float())  # type: ignore[method-assign]


def turn_the_other_way(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, out: (out[0], -out[1]))


def round_the_answer(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, out: tuple(t.bfloat16().float() for t in out))


def warn(model: nn.Module) -> None:
    warnings.warn(f"{type(model).__name__} is not understood", PrecisionWarning, stacklevel=1)


def keep_in_fp32(model: Any) -> None:
    model.pe = model.pe.float()


def add_a_key(model: nn.Module) -> None:
    model.register_buffer("more", torch.zeros(1))


def entry(name: str, reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(module_class=f"styles.buffers.{name}", reason=reason)


def reporting(name: str, where: str, reason: str | None = None) -> Meddler:
    library = Meddler(nothing)
    getattr(library.report, where).append(entry(name, reason))
    return library


BUFFER = "InvFreqBuffer"


@pytest.mark.parametrize(
    ("expected", "name", "path", "library"),
    [
        (RIGHT, BUFFER, PLAIN, Meddler(nothing)),
        (MADE_WRONG, BUFFER, PLAIN, Meddler(halve)),
        (MADE_WRONG, BUFFER, PLAIN, Meddler(one_bit)),
        (MADE_WRONG, BUFFER, PLAIN, Meddler(turn_the_other_way)),
        (MADE_WRONG, BUFFER, PLAIN, Meddler(round_the_answer)),
        (BROKEN, BUFFER, PLAIN, Meddler(fail)),
        (BROKEN, BUFFER, CAST, Meddler(fail)),
        (SILENTLY_WRONG, BUFFER, CAST, Meddler(nothing)),
        (SILENTLY_WRONG, BUFFER, HALF_AND_BACK, Meddler(nothing)),
        (SILENTLY_WRONG, BUFFER, META, Meddler(nothing)),
        (SILENTLY_WRONG, BUFFER, CAST, reporting("AnotherClass", "unprotected", "why")),
        (SILENTLY_WRONG, BUFFER, CAST, reporting(BUFFER, "protected")),
        (
            SILENTLY_WRONG,
            BUFFER,
            CAST,
            reporting(BUFFER, "protected", "applied as stock (no function known)"),
        ),
        (NAMED, BUFFER, CAST, reporting(BUFFER, "unprotected", "why")),
        (NAMED, BUFFER, CAST, reporting(BUFFER, "protected", "its cache is not kept")),
        (NAMED, BUFFER, CAST, Meddler(warn)),
        (MADE_WRONG, BUFFER, PLAIN, Meddler(lambda model: (halve(model), warn(model)))),
        (REPAIRED, BUFFER, CAST, Meddler(repair)),
        (REPAIRED, BUFFER, HALF_AND_BACK, Meddler(repair)),
        (REPAIRED, BUFFER, META, Meddler(repair)),
        (OTHER_DTYPES, BUFFER, CAST, Meddler(answer_in_fp32)),
        (OTHER_DTYPES, BUFFER, PLAIN, Meddler(add_a_key)),
        (OTHER_DTYPES, "PersistentSinusoids", CAST, Meddler(keep_in_fp32)),
        (RIGHT, "PersistentSinusoids", CAST, Meddler(nothing)),
        (BOTH_CRASH, "LogSpacedBias", DEFAULT_DTYPE, Meddler(nothing)),
        (BROKEN, "MetaLlama", CAST, Meddler(lambda model: setattr(model, "freqs_cis", None))),
        (MADE_WRONG, "MetaLlama", CAST, Meddler(lambda model: model.freqs_cis.conj_physical_())),
    ],
)
def test_each_kind_of_cell_is_told(expected: str, name: str, path: LoadPath, library: Meddler) -> None:
    assert kind(name, path, library) == expected


def test_tables_of_fp32_bits_are_compared_by_their_bits() -> None:
    style = STYLES[BUFFER]
    stock, guarded = run(style, PLAIN), run(style, PLAIN)
    exact = harm_cells.formula_of(style, harm_cells.truth_of(BUFFER))
    assert exact is not None
    guarded.leaves = [table.float() for table in exact]
    assert harm_cells.judge(style, PLAIN, stock, guarded, "exact") == (RIGHT, "")
    assert harm_cells.judge(style, PLAIN, stock, guarded, "fp32")[0] == MADE_WRONG
