"""audit() calls no table damaged that a class makes by a formula of its own, which nobody can run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import of
from torch import nn

import safe_rope

DIM, BASE, LENGTH = 16, 10000.0, 64


class Scaled(nn.Module):
    """What it is given is kept under a name that tells nothing; frequencies, rows or amplitude follow it."""

    def __init__(self, dim: int, length: int, base: float, scaling: dict[str, Any]) -> None:
        super().__init__()
        self.dim, self.base, self.s = dim, base, scaling
        exact = base ** -(torch.arange(0, dim, 2).double() / dim)
        self.register_buffer("inv_freq", self.frequencies(exact).float(), persistent=False)
        self.make(length)

    def frequencies(self, exact: torch.Tensor) -> torch.Tensor:
        return exact

    def positions(self, length: int) -> torch.Tensor:
        return torch.arange(length).float()

    def make(self, length: int) -> None:
        self.max_seq_len_cached = length
        phases = torch.outer(self.positions(length), self.inv_freq).repeat(1, 2)
        amplitude = self.s.get("amplitude", 1.0)
        self.register_buffer("cos_cached", phases.cos() * amplitude, persistent=False)
        self.register_buffer("sin_cached", phases.sin() * amplitude, persistent=False)

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > self.max_seq_len_cached:
            self.make(seq_len)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class Linear(Scaled):
    def frequencies(self, exact: torch.Tensor) -> torch.Tensor:
        return exact / self.s["factor"]


class Dividing(Scaled):
    def positions(self, length: int) -> torch.Tensor:
        return super().positions(length) / self.s["factor"]


class Last(Scaled):
    """Only the lowest frequency is stretched, as with YaRN and a long training."""

    def frequencies(self, exact: torch.Tensor) -> torch.Tensor:
        return torch.cat((exact[:-1], exact[-1:] / self.s["factor"]))


class Window(Scaled):
    """Beyond a window, every position is its last one."""

    def positions(self, length: int) -> torch.Tensor:
        return super().positions(length).clamp(max=self.s["window"])


class Swapped(Scaled):
    def frequencies(self, exact: torch.Tensor) -> torch.Tensor:
        return exact[[1, 0, *range(2, len(exact))]]


FORMULAS: dict[str, Callable[[], Scaled]] = {
    "linear": lambda: Linear(DIM, LENGTH, BASE, {"factor": 4.0}),
    "dividing": lambda: Dividing(DIM, LENGTH, BASE, {"factor": 3.0}),
    "amplitude": lambda: Scaled(DIM, LENGTH, BASE, {"amplitude": 1.1}),
    "both": lambda: Linear(DIM, LENGTH, BASE, {"factor": 4.0, "amplitude": 1.1}),
    "last": lambda: Last(DIM, LENGTH, BASE, {"factor": 4.0}),
    "window": lambda: Window(DIM, LENGTH, BASE, {"window": 48}),
    "swapped": lambda: Swapped(DIM, LENGTH, BASE, {}),
}


@pytest.mark.parametrize("length", [LENGTH, 2 * LENGTH])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_of_its_own_is_unknown_not_damaged(name: str, length: int) -> None:
    rotary = FORMULAS[name]()
    cos, _ = rotary(torch.zeros(1), length)
    phases = rotary.positions(length).double()[:, None] * rotary.inv_freq.double()
    assert (cos[:, : DIM // 2].double() - phases.cos() * rotary.s.get("amplitude", 1)).abs().max() < 1e-5
    report = safe_rope.audit(nn.Sequential(rotary))
    assert {found.severity for found in report.findings} == {"unknown"}, str(report)
    assert [module.verdict for module in report.modules] == ["unknown"]
    assert "meta device" not in str(report)
    assert "damaged inv_freq" not in str(report)


@pytest.mark.parametrize("name", FORMULAS)
def test_its_tables_are_damaged_where_they_show_it(name: str) -> None:
    cast = FORMULAS[name]().bfloat16()
    report = safe_rope.audit(nn.Sequential(cast))
    assert of(report, "inv_freq") or (name == "swapped" and not report.ok), str(report)
    for number in (0.0, float("nan"), 1e-40):
        rotary = FORMULAS[name]()
        for buffer in rotary.buffers():
            buffer.fill_(number)
        report = safe_rope.audit(nn.Sequential(rotary))
        assert of(report, "cos_cached, sin_cached"), f"{number}\n{report}"
        assert of(report, "forward"), f"{number}\n{report}"


@pytest.mark.parametrize("name", FORMULAS)
def test_what_a_guard_has_run_is_ok(name: str) -> None:
    with safe_rope.guard():
        model = nn.Sequential(FORMULAS[name]())
    report = safe_rope.audit(model.bfloat16())
    assert report.modules, str(report)
    assert not [found for found in report.findings if found.severity == "damaged"], str(report)


class ByLength(nn.Module):
    """Beyond the built length it makes other frequencies by a rule of its own, as YaRN's dynamic NTK does."""

    def __init__(self, dim: int, max_position_embeddings: int, base: float) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.make(max_position_embeddings)

    def make(self, length: int) -> None:
        self.max_seq_len_cached = length
        base = self.base * (length / self.max_position_embeddings) ** 1.7
        inv_freq = 1.0 / base ** (torch.arange(0, self.dim, 2).float() / self.dim)
        self.register_buffer("inv_freq", inv_freq)
        phases = torch.outer(torch.arange(length).float(), inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", phases.cos(), persistent=False)
        self.register_buffer("sin_cached", phases.sin(), persistent=False)

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > self.max_seq_len_cached:
            self.make(seq_len)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class ByPositions(ByLength):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = int(position_ids.max()) + 1
        if length > self.max_seq_len_cached:
            self.make(length)
        phases = position_ids[..., None].float() * self.inv_freq.repeat(2)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


def run(rotary: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    by_length = type(rotary).__name__ == "ByLength"
    return rotary(torch.zeros(1), length if by_length else torch.arange(length)[None])  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", [(), (12,), (200,), (200, 12)])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("kind", [ByLength, ByPositions])
def test_a_rule_of_its_own_beyond_the_built_length_is_ok(
    kind: type[ByLength], guarded: bool, lengths: tuple[int, ...]
) -> None:
    stock = kind(DIM, LENGTH, BASE)
    with safe_rope.guard(tables="fp32") if guarded else contextlib.nullcontext():
        model = nn.Sequential(kind(DIM, LENGTH, BASE))
    for length in lengths:
        for true, got in zip(run(stock, length), run(model[0], length), strict=True):
            assert torch.equal(true, got)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert [module.verdict for module in report.modules] == ["ok"]


@pytest.mark.parametrize("lengths", [(), (200,), (200, 12)])
@pytest.mark.parametrize("kind", [ByLength, ByPositions])
def test_what_is_damaged_beside_such_a_rule_is_damaged(
    kind: type[ByLength], lengths: tuple[int, ...]
) -> None:
    for number in (None, 0.0, 3.0):
        rotary, stock = kind(DIM, LENGTH, BASE), kind(DIM, LENGTH, BASE)
        for length in lengths:
            run(rotary, length), run(stock, length)
        for buffer in rotary.buffers():
            buffer.copy_(buffer.bfloat16() if number is None else torch.full_like(buffer, number))
        pairs = zip(run(stock, 60), run(rotary, 60), strict=True)
        off = max(float((true - got).abs().max()) for true, got in pairs)
        assert off > 1e-3
        report = safe_rope.audit(nn.Sequential(rotary))
        assert [module.verdict for module in report.modules] == ["damaged"], f"{number}\n{report}"


class Amplified(nn.Module):
    """Puts what it works out under the name of an argument, as vLLM's and SGLang's DeepSeek YaRN do."""

    def __init__(self, dim: int, factor: float, dtype: torch.dtype, mscale: float = 1.0) -> None:
        super().__init__()
        self.dim, self.factor, self.dtype = dim, factor, dtype
        self.mscale = 1.0 + 0.1 * mscale * factor
        phases = torch.outer(torch.arange(LENGTH).float(), BASE ** -(torch.arange(0, dim, 2) / dim))
        cache = torch.cat((phases.cos(), phases.sin()), -1) * self.mscale
        self.register_buffer("cos_sin_cache", cache.to(dtype), persistent=False)

    def forward(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
        first, second = query.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.2, 1.4])
def test_an_argument_that_is_kept_as_something_else_is_unknown(factor: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(Amplified(DIM, factor, dtype))
    report = safe_rope.audit(model)
    assert [module.verdict for module in report.modules] == ["unknown"], str(report)


def test_rounded_frequencies_under_such_an_amplitude_are_damaged() -> None:
    rotary = Amplified(DIM, 1.2, torch.float32)
    low = (BASE ** -(torch.arange(0, DIM, 2) / DIM)).bfloat16().float()
    phases = torch.outer(torch.arange(LENGTH).float(), low)
    rotary.cos_sin_cache = torch.cat((phases.cos(), phases.sin()), -1) * rotary.mscale
    rotary.mscale = 1.0  # as its argument was
    assert [module.verdict for module in safe_rope.audit(rotary).modules] == ["damaged"]


class SetByAMethod(nn.Module):
    """A factor in a tensor, which a method sets."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", BASE ** -(torch.arange(0, dim, 2) / dim), persistent=False)
        self.register_buffer("strength", torch.tensor(1 / 3))

    def rescale(self, factor: float) -> None:
        self.strength.fill_(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.arange(x.shape[1])[:, None] * (self.inv_freq.float() * self.strength.float())
        return phase.cos().to(x.dtype)


@pytest.mark.parametrize(("factor", "verdict"), [(0.3, "ok"), (2 / 7, "ok"), (0.25, "unknown")])
def test_a_number_that_a_method_has_set_is_no_damage(factor: float, verdict: str) -> None:
    """In FP32; one that 16 bits hold may be a rounded one."""
    model = nn.Sequential(SetByAMethod())
    model[0].rescale(factor)
    assert safe_rope.audit(model).verdict == verdict
    with safe_rope.guard():
        guarded = nn.Sequential(SetByAMethod())
    guarded.to(torch.bfloat16)[0].rescale(factor)
    assert safe_rope.audit(guarded).verdict == verdict
    assert float(guarded[0].strength) == pytest.approx(factor, rel=1e-7)
    assert safe_rope.audit(nn.Sequential(SetByAMethod()).to(torch.bfloat16)).verdict == "damaged"
