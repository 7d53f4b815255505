"""Calls that cannot be asked for what the stock forward makes of them."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning


class Context:
    """What a module hands to its parts."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner


class Aware(nn.Module):
    """Rotary positions of a module that is known to what it holds."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.context = Context(self)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != position_ids.shape[1]:
            raise ValueError("x and position_ids differ in length")
        phases = position_ids[..., None].to(x.dtype) * self.inv_freq
        return torch.cat((phases.cos(), phases.sin()), dim=-1).to(x.dtype)


def test_a_call_that_raises_says_nothing_of_the_next() -> None:
    with safe_rope.guard():
        module = Aware()
    module.bfloat16()
    ids = torch.arange(2000)[None]
    x = torch.zeros(1, 2000, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="differ in length"):
        module(x, ids[:, :3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = module(x, ids)
    assert torch.equal(found, Aware()(x.float(), ids).bfloat16())


class Phases(nn.Module):
    """Cosines and sines in the dtype of what is given, as a model's own FP32 gives them."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.outer(torch.arange(x.shape[1]).to(x.dtype), self.inv_freq.to(x.dtype))
        return torch.cat((phases.cos(), phases.sin()), dim=-1)


def test_results_have_the_dtype_of_the_stock_ones_where_no_random_state_may_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with safe_rope.guard():
        module = Phases()
    module.bfloat16()

    def refuse() -> torch.Tensor:
        raise RuntimeError("not while a graph is captured")

    x = torch.zeros(1, 100, 32, dtype=torch.bfloat16)
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(torch, "get_rng_state", refuse)
        found = module(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, Phases().bfloat16()(x))


class ForKernels(nn.Module):
    """Takes what its kernels take, and nothing in FP32."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype in (torch.float16, torch.bfloat16), "no kernel for it"
        assert x.shape[1] < 2000, "too long"
        phases = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.inv_freq.float())
        return torch.cat((phases.cos(), phases.sin()), dim=-1).to(x.dtype)


@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.parametrize("vmapped", [False, True])
def test_a_forward_that_raises_in_fp32_runs_as_stock_and_is_named(way: str, vmapped: bool) -> None:
    with safe_rope.guard() if way == "guard" else contextlib.nullcontext():
        module = ForKernels()
    module.bfloat16()
    if way == "protect":
        safe_rope.protect(module)
    x = torch.zeros(1, 300, 32, dtype=torch.bfloat16)
    called = torch.vmap(lambda one: module(one[None])) if vmapped else module
    true = (ForKernels().bfloat16() if vmapped else ForKernels())(x)  # frequencies are rounded under vmap
    with pytest.warns(PrecisionWarning, match="raises where it is given FP32"):
        found = called(x)
    for _ in range(2):
        assert torch.equal(found.view_as(true), true)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if vmapped else "error")
            found = called(x)
    for wrong, reason in ((x.float(), "no kernel"), (x.repeat(1, 10, 1), "too long")):
        with pytest.raises(AssertionError, match=reason):
            module(wrong)


class CountsForKernels(ForKernels):
    """Counts its calls, and draws a number, before it looks at what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.lengths.append(x.shape[1])
        position_ids.add_(1)
        drawn = torch.rand(())
        return super().forward(x) + drawn.to(x.dtype)


@pytest.mark.parametrize("way", ["guard", "protect"])
def test_what_a_forward_does_before_it_raises_in_fp32_is_done_once(way: str) -> None:
    x = torch.zeros(1, 300, 32, dtype=torch.bfloat16)
    stock = CountsForKernels()  # with frequencies in FP32, in which the stock forward computes
    with safe_rope.guard() if way == "guard" else contextlib.nullcontext():
        module = CountsForKernels()
    module.bfloat16()
    if way == "protect":
        safe_rope.protect(module)
    done = []
    for one in (stock, module):
        torch.manual_seed(0)
        ids = torch.arange(300)[None].clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            results = [one(x, ids) for _ in range(3)]
        done.append((results, one.steps.item(), one.lengths, ids, torch.rand(())))
    (expected, *true), (found, *made) = done
    assert all(map(torch.equal, found, expected))
    for a, b in zip(made, true, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class WithoutMemory(Aware):
    """Has no memory for FP32 at its first call."""

    is_full = True

    def __init__(self) -> None:
        super().__init__()
        del self.context

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.is_full and x.dtype == torch.float32:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x, position_ids)


def test_memory_that_was_not_there_is_asked_for_again() -> None:
    ids, x = torch.arange(2000)[None], torch.zeros(1, 2000, 32)
    with safe_rope.guard():
        module = WithoutMemory()
    module.bfloat16()
    with pytest.warns(PrecisionWarning, match="raises where it is given FP32"):
        module(x.bfloat16(), ids)
    module.is_full = False
    assert torch.equal(module(x.bfloat16(), ids), Aware()(x, ids).bfloat16())
