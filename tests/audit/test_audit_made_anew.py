"""Tables that a forward makes anew are right, whatever is kept of them between two calls."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import safe_rope

pytestmark = pytest.mark.contract
DIM, TRAINED = 16, 32


class LongRotary(nn.Module):
    """As Phi-3's in transformers 4.41 to 4.47, and in the code of its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.short = [1.0 + 0.1 * i for i in range(DIM // 2)]
        self.long = [1.5 + 0.3 * i for i in range(DIM // 2)]
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, DIM, 2, dtype=torch.int64).float() / DIM))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def frequencies(self, length: torch.Tensor, device: torch.device) -> torch.Tensor:
        factors = self.long if length > TRAINED else self.short
        shape = torch.arange(0, DIM, 2, dtype=torch.int64, device=device).float() / DIM
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * 10000.0**shape)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.inv_freq = self.frequencies(torch.max(position_ids) + 1, x.device)
        columns = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        phase = (columns.float() @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((phase, phase), dim=-1)
        return both.cos().to(dtype=x.dtype), both.sin().to(dtype=x.dtype)


class ReadsWhatIsKept(LongRotary):
    """The first call makes them anew, and no other."""

    is_made = False

    def frequencies(self, length: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = self.inv_freq if self.is_made else super().frequencies(length, device)
        self.is_made = True
        return made


class Grows(nn.Module):
    """Its rows follow how many there are, as those of dynamic NTK do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", self.made(TRAINED), persistent=False)

    def made(self, rows: int) -> torch.Tensor:
        base = 10000.0 * rows / TRAINED
        inverse = 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)
        phases = torch.outer(torch.arange(rows).float(), inverse)
        return torch.cat((phases.sin(), phases.cos()), dim=-1)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        rows = int(position_ids.max()) + 1
        if rows > len(self.weights):
            self.weights = self.made(rows)
        return self.weights[position_ids]


class Model(PreTrainedModel):
    config_class = PretrainedConfig
    kind: type[nn.Module] = LongRotary

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.rotary_emb = self.kind()

    def _init_weights(self, module: nn.Module) -> None: ...


class ReadingModel(Model):
    kind = ReadsWhatIsKept


class GrowingModel(Model):
    kind = Grows


@pytest.mark.parametrize("lengths", [(), (12,), (48,), (12, 48, 12)])
@pytest.mark.parametrize("how", ["stock", "guard", "protect"])
def test_a_model_that_has_run_is_ok(how: str, lengths: tuple[int, ...]) -> None:
    model = _made(how, Model)
    stock = LongRotary()
    for length in lengths:
        ids = torch.arange(length)[None]
        expected: Any = stock(torch.zeros(1), ids)
        for true, got in zip(expected, model.rotary_emb(torch.zeros(1), ids), strict=True):
            assert torch.equal(torch.as_tensor(getattr(got, "table", got)), true)
    report = safe_rope.audit(model)
    assert report.ok, str(report)


@pytest.mark.parametrize("how", ["stock", "guard", "protect"])
def test_rows_that_a_longer_sequence_has_made_are_ok(how: str) -> None:
    model, stock = _made(how, GrowingModel), Grows()
    for length in (12, 100, 20):
        ids = torch.arange(length)[None]
        assert torch.equal(model.rotary_emb(ids), stock(ids))
        report = safe_rope.audit(model)
        assert report.ok, str(report)


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_kept_frequencies_that_a_later_call_reads_are_judged(how: str) -> None:
    model = _made(how, ReadingModel)
    model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
    with torch.no_grad():
        model.rotary_emb.inv_freq *= 3
    model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
    assert not safe_rope.audit(model).ok


def _made(how: str, make: type[Model]) -> Model:
    if how == "guard":
        with safe_rope.guard(tables="fp32"):
            return make(PretrainedConfig())
    model = make(PretrainedConfig())
    if how == "protect":
        safe_rope.protect(model, tables="fp32")
    return model


class CacheOfTheFirstCall(nn.Module):
    """DeepSeek-V2's: the length of its cache is None until the first call has made it anew."""

    def __init__(self, dim: int = DIM, max_position_embeddings: int = TRAINED, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float() / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._set_cos_sin_cache(max_position_embeddings, torch.get_default_dtype())
        self.max_seq_len_cached: int | None = None

    def _set_cos_sin_cache(self, seq_len: int, dtype: torch.dtype) -> None:
        self.max_seq_len_cached = seq_len
        phases = torch.outer(torch.arange(seq_len, dtype=self.inv_freq.dtype), self.inv_freq)
        emb = torch.cat((phases, phases), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.max_seq_len_cached is None or seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len=seq_len, dtype=x.dtype)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("how", ["stock", "guard", "protect"])
def test_a_cache_that_has_no_length_yet_is_measured(how: str, has_run: bool) -> None:
    true, x = CacheOfTheFirstCall()(torch.zeros(1), TRAINED), torch.zeros(1)
    with safe_rope.guard(tables="fp32") if how == "guard" else contextlib.nullcontext():
        model = CacheOfTheFirstCall()
    if has_run:
        model(x, TRAINED)
    if how == "protect":
        safe_rope.protect(model, tables="fp32")
    assert safe_rope.audit(model).ok
    model.to(torch.bfloat16)
    report = safe_rope.audit(model)
    assert report.verdict == ("damaged" if how == "stock" else "ok"), str(report)
    made = [torch.as_tensor(one) for one in model(x, TRAINED)]
    assert all(map(torch.equal, made, true)) == (how != "stock")
