"""Modules that turn q and k themselves, as those of vLLM and SGLang: what they apply is dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope._audit.command.compare import compare_sides

HEAD, DIM, LENGTH, ORIGINAL = 24, 16, 300, 64
POSITIONS = [0, 1, 2, 63, 64, 65, 200]
FREQUENCIES = 1.0 / (10000.0 ** (torch.arange(0, DIM, 2).double() / DIM))


class Joined(nn.Module):
    """vLLM's: one table for cos and sin; halves are turned, or neighbours; forward calls an attribute."""

    def __init__(self, is_neox_style: bool, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.max_position_embeddings = HEAD, DIM, LENGTH
        self.is_neox_style, self.scale, self.dtype = is_neox_style, scale, dtype
        self.register_buffer("cos_sin_cache", self.cache().to(dtype), persistent=False)
        self._forward_method = self.forward_native

    def cache(self) -> torch.Tensor:
        inv_freq = 1.0 / (
            10000.0 ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float) / self.rotary_dim)
        )
        phases = torch.einsum("i,j->ij", torch.arange(self.max_position_embeddings).float(), inv_freq)
        return torch.cat((phases.cos(), phases.sin()), dim=-1) * self.scale

    def forward(self, *args: Any) -> Any:
        return self._forward_method(*args)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        self.cos_sin_cache = self.cos_sin_cache.to(query.dtype)
        return self.turned(positions, query), key

    def turned(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        heads = x.view(len(positions), -1, self.head_size)
        x1, x2 = (
            heads[..., :DIM].chunk(2, -1) if self.is_neox_style else (heads[..., :DIM:2], heads[..., 1:DIM:2])
        )
        out = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        whole = torch.cat(out, -1) if self.is_neox_style else torch.stack(out, -1).flatten(-2)
        return torch.cat((whole, heads[..., DIM:]), dim=-1).view(x.shape)


class ByHeads(Joined):
    """DeepSeek's: heads are an axis of q."""

    def forward_native(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:  # type: ignore[override]
        assert query.dim() == 3
        return super().forward_native(positions, query, key)


class LongBehindShort(nn.Module):
    """SGLang's longrope: the rows for long sequences follow those for short ones, and a call says which."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.max_position_embeddings = HEAD, DIM, LENGTH
        self.original = ORIGINAL
        tables = [self.cache(ORIGINAL, 1.0), self.cache(LENGTH, 4.0)]
        self.register_buffer("long_short_cos_sin_cache", torch.cat(tables), persistent=False)

    def cache(self, rows: int, factor: float) -> torch.Tensor:
        inv_freq = 1.0 / (factor * 10000.0 ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim))
        phases = torch.outer(torch.arange(rows).float(), inv_freq)
        return torch.cat((phases.cos(), phases.sin()), dim=-1)

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        rows = positions + (self.original if bool((positions >= self.original).any()) else 0)
        cos, sin = self.long_short_cos_sin_cache.index_select(0, rows).chunk(2, dim=-1)
        out = []
        for x in (query.unflatten(-1, (-1, self.head_size)), key.unflatten(-1, (-1, self.head_size))):
            x1, x2 = x[..., :DIM].chunk(2, dim=-1)
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            out.append(torch.cat((x1 * c - x2 * s, x2 * c + x1 * s, x[..., DIM:]), dim=-1).flatten(-2))
        return tuple(out)


def dumped(module: nn.Module, file: Path) -> dict[str, torch.Tensor]:
    report = safe_rope.audit(nn.ModuleDict({"rotary_emb": module}), POSITIONS)
    report.dump(file)
    return report.tables["rotary_emb"]


def off(table: dict[str, torch.Tensor], phases: torch.Tensor, scale: float = 1.0) -> float:
    waves = ((table["cos"], phases.cos()), (table["sin"], phases.sin()))
    return max(float((got.double() - true * scale).abs().max()) for got, true in waves)


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("kind", [Joined, ByHeads])
def test_what_a_module_applies_is_dumped(
    kind: type[Joined], is_neox_style: bool, dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    rotary = kind(is_neox_style, dtype, scale)
    table = dumped(rotary, tmp_path / "engine.safetensors")
    assert table["positions"].tolist() == POSITIONS
    phases = torch.tensor(POSITIONS)[:, None] * FREQUENCIES
    rounding = 2.0**-20 * 200 if dtype == torch.float32 else 2.0**-8
    assert off(table, phases, scale) < rounding
    assert rotary.cos_sin_cache.dtype == dtype  # a copy has answered


def test_which_rows_are_applied_may_depend_on_the_call(tmp_path: Path) -> None:
    table = dumped(LongBehindShort(), tmp_path / "engine.safetensors")
    assert table["positions"].tolist() == POSITIONS
    positions = torch.tensor(POSITIONS)[:, None]
    phases = positions * FREQUENCIES / torch.where(positions < ORIGINAL, 1.0, 4.0)
    assert off(table, phases) < 1e-4
    usual = safe_rope.audit(LongBehindShort()).tables[""]["positions"]
    assert 256 in usual
    assert int(usual.max()) < LENGTH


def test_engine_and_trainer_are_compared(tmp_path: Path) -> None:
    engine, trainer = tmp_path / "engine.safetensors", tmp_path / "trainer.safetensors"
    sides = [{"name": file.name, "dump": str(file)} for file in (engine, trainer)]

    def is_beyond(one: nn.Module, other: nn.Module, tolerance: float | None) -> bool:
        dumped(one, engine), dumped(other, trainer)
        asked = {"positions": [], "longest": None, "tables": "stock", "tolerance": tolerance, "ulp": None}
        (found,) = compare_sides({"sides": sides, **asked})["modules"]
        return found["first_beyond"] is not None

    halves, neighbours = Joined(True, torch.float32), Joined(False, torch.float32)
    rounded, damaged = Joined(True, torch.bfloat16), Joined(True, torch.float32)
    damaged.cos_sin_cache[:] = damaged.cos_sin_cache.roll(1, 0)
    assert not is_beyond(halves, neighbours, None)
    assert is_beyond(rounded, halves, None)
    assert not is_beyond(rounded, halves, 2.0**-7)
    assert is_beyond(damaged, halves, 2.0**-7)
    empty = Joined(True, torch.float32)
    empty.cos_sin_cache[:] = torch.nan
    assert is_beyond(empty, halves, 2.0**-7)


class Saying(Joined):
    """Says when it is called, with whatever it is called."""

    def forward(self, *args: Any) -> Any:
        print("called")
        return super().forward(*args)


def test_what_need_not_be_given_anything_is_asked_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert safe_rope.audit(Saying(True, torch.bfloat16)).ok
    assert capsys.readouterr().out.split() == ["called"]
