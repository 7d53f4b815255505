"""Constructors that keep other numbers under the names of their arguments, as vLLM's YaRN does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM, LENGTH = 16, 96
FP32, BF16 = torch.float32, torch.bfloat16


class Scaled(nn.Module):
    """The scale that is kept is the one that was given, times a factor."""

    def __init__(self, base: float, dtype: torch.dtype, scale: float = 1.0, factor: float = 1.25) -> None:
        super().__init__()
        self.base, self.dtype = base, dtype
        self.scale = scale * factor
        self.register_buffer("cos_sin_cache", self.cache().to(dtype), persistent=False)
        self._forward_method = self.turn

    def cache(self) -> torch.Tensor:
        inv_freq = 1.0 / (self.base ** (torch.arange(0, DIM, 2, dtype=FP32) / DIM))
        phases = torch.outer(torch.arange(LENGTH, dtype=FP32), inv_freq)
        return torch.cat((phases.cos(), phases.sin()), dim=-1) * self.scale

    def forward(self, *args: Any) -> Any:
        return self._forward_method(*args)

    def turn(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Widened(Scaled):
    """All channels are turned, those beyond the given ones by 0."""

    def __init__(self, base: float, dtype: torch.dtype, rotary_dim: int = DIM // 2) -> None:
        self.angles = rotary_dim // 2
        super().__init__(base, dtype, factor=1.0)
        self.rotary_dim = DIM

    def cache(self) -> torch.Tensor:
        inv_freq = self.base ** -(torch.arange(0, 2 * self.angles, 2, dtype=FP32) / DIM)
        inv_freq = torch.cat((inv_freq, torch.zeros(DIM // 2 - self.angles)))
        phases = torch.outer(torch.arange(LENGTH, dtype=FP32), inv_freq)
        return torch.cat((phases.cos(), phases.sin()), dim=-1)


class Inline(Scaled):
    """Makes the table in its constructor."""

    def __init__(self, base: float, dtype: torch.dtype, scale: float = 1.0, factor: float = 1.25) -> None:
        super().__init__(base, dtype, scale, factor)
        inv_freq = 1.0 / (base ** (torch.arange(0, DIM, 2, dtype=FP32) / DIM))
        phases = torch.outer(torch.arange(LENGTH, dtype=FP32), inv_freq)
        table = torch.cat((phases.cos(), phases.sin()), dim=-1) * self.scale
        self.register_buffer("cos_sin_cache", table.to(dtype), persistent=False)

    def cache(self) -> torch.Tensor:
        return torch.zeros(LENGTH, DIM)


def verdict(module: nn.Module) -> tuple[str, list[str]]:
    report = safe_rope.audit(nn.ModuleDict({"rotary_emb": module}))
    return report.verdict, [finding.source for finding in report.findings]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("cls", [Scaled, Widened])
def test_a_method_of_the_module_tells_what_its_table_should_hold(
    cls: type[Scaled], dtype: torch.dtype
) -> None:
    assert verdict(cls(1e4, dtype)) == ("ok", [])
    assert verdict(cls(1e4, dtype).to(BF16))[0] == ("ok" if dtype == BF16 else "damaged")
    for damage in (torch.Tensor.zero_, lambda table: table[3].fill_(torch.nan)):
        module = cls(1e4, dtype)
        damage(module.cos_sin_cache)
        assert verdict(module)[0] == "damaged"
    module = cls(1e4, FP32)
    module.cos_sin_cache.copy_(module.cos_sin_cache.bfloat16())
    assert verdict(module)[0] == "damaged"


OTHERS: list[Callable[[], nn.Module]] = [
    lambda: Inline(1e4, FP32),
    lambda: Inline(1e4, BF16),
    lambda: Inline(1e4, BF16, 1.0, 1.004),
]


@pytest.mark.parametrize("make", OTHERS)
def test_where_none_does_nobody_knows_the_arguments(make: Callable[[], nn.Module]) -> None:
    said = "its constructor cannot be run again, as its arguments are not known"
    assert verdict(make()) == ("unknown", [said])
    module = make()
    module.cos_sin_cache.zero_()
    assert verdict(module)[0] == "damaged"


class Base(nn.Module):
    """lmdeploy's: positions are divided by a factor."""

    def __init__(self, dim: int, base: int = 10000, scaling_factor: float = 1.0) -> None:
        super().__init__()
        self.scaling_factor, self.dim, self.base = scaling_factor, dim, base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        steps = position_ids[:, None, :].float() / self.scaling_factor
        phases = (self.inv_freq[None, :, None].float() @ steps).transpose(1, 2)
        angles = torch.cat((phases, phases), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Stretched(Base):
    """Divides slow frequencies instead, and keeps neither the factor nor the lengths."""

    def __init__(self, dim: int, base: int = 10000, scaling_factor: float = 1.0, longest: int = 8192) -> None:
        super().__init__(dim, base, scaling_factor)
        is_slow = 2 * torch.pi / self.inv_freq > longest
        self.scaling_factor = 1.0
        self.register_buffer("inv_freq", torch.where(is_slow, self.inv_freq / scaling_factor, self.inv_freq))


def test_frequencies_are_unknown_where_arguments_are_not_kept() -> None:
    def found(module: nn.Module) -> dict[str, str]:
        return {one.what: one.severity for one in safe_rope.audit(module).findings if one.severity != "note"}

    assert found(Stretched(DIM)) == {}
    for longest in (2, 64):
        assert found(Stretched(DIM, 10000, 8.0, longest)) == {"inv_freq": "unknown", "forward": "unknown"}
        assert found(Stretched(DIM, 10000, 8.0, longest).to(BF16))["inv_freq"] == "damaged"
        module = Stretched(DIM, 10000, 8.0, longest)
        module.inv_freq.zero_()
        assert found(module)["inv_freq"] == "damaged"


class Applied(nn.Module):
    """Turns by positions over a scale; a plain one for all rows, so that no convention tells its answer."""

    def __init__(self, base: float, scale: float = 1.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.register_buffer("inv_freq", base ** (-torch.arange(0, DIM, 2, dtype=FP32) / DIM))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = (position_ids.float() / self.scale)[..., None] * self.inv_freq.float()
        phases = torch.cat((phases, phases), dim=-1)[0]
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class AppliedToSlow(Applied):
    """Its constructor uses the scale, and then keeps another."""

    def __init__(self, base: float, scale: float = 1.0) -> None:
        super().__init__(base, scale)
        self.inv_freq = torch.where(self.inv_freq < 0.1, self.inv_freq / self.scale, self.inv_freq)
        self.scale = 1.0


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_guarded_forward_of_another_scale_is_not_damaged(dtype: torch.dtype) -> None:
    """The guard has seen the scale; the audit builds another from the one that is kept."""
    x, positions = torch.zeros(1, LENGTH, DIM), torch.arange(LENGTH)[None]
    expected = AppliedToSlow(1e4, 8.0)(x, positions)
    with safe_rope.guard():
        module = AppliedToSlow(1e4, 8.0)
    module.to(dtype)
    assert all(map(torch.equal, module(x, positions), expected))
    assert safe_rope.audit(module).verdict != "damaged"
    plain = Applied(1e4, 1.0).to(BF16)
    assert safe_rope.audit(plain).verdict == "damaged"
