"""What the tests of this folder share: protected models, and what must hold for one wherever it has been."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import safe_rope
from safe_rope._protection.rewrite import is_protected
from safe_rope.rotation import plain
from support import families

KINDS = ("exact", "fp32")
CACHES = ("cos_cached", "sin_cached", "_cos_cached", "_sin_cached")
"""The last two have a property before them, which gives what fits the rest of the model."""


def build(family: str, tables: str = "exact", *, layers: int = 2, **overrides: Any) -> Any:
    """A model that was built under a guard."""
    with safe_rope.guard(tables=tables):
        return families.build(family, layers=layers, **overrides)


@functools.cache
def stock_module(family: str) -> nn.Module:
    """A rotary module that was built in FP32 without a guard. Do not change it."""
    (module, *_) = families.rotary_modules(families.build(family)).values()
    return module


def code_of(function: Any) -> Any:
    """What a function runs: its code, or its class where Hugging Face's ``kernels`` have made it a module."""
    return type(function) if isinstance(function, nn.Module) else function.__code__


@functools.cache
def can_be_pickled(family: str) -> bool:
    """Whether the stock model can: modules that ``kernels`` make of functions cannot."""
    try:
        pickle.dumps(families.build(family))
    except AttributeError:
        return False
    return True


def tokens(length: int = 12, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        3, families.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def assert_right(model: nn.Module, family: str, tables: str) -> None:
    """Assert that the rotary modules of ``model`` are protected, and show and deliver what is right."""
    # First what is shown as it stands, because whoever asks for tables has it put right.
    assert_shown_right(model, family, tables)
    for path, module in families.rotary_modules(model).items():
        for dtype in (torch.float32, torch.bfloat16):
            delivered = families.read_tables(module, dtype=dtype)
            if tables == "exact":
                assert families.ulps(delivered, families.reference(family)) <= 1, path
            else:
                for mine, theirs in zip(delivered, families.stock_tables(family), strict=True):
                    assert torch.equal(mine, theirs), path
    assert_shown_right(model, family, tables)


def assert_shown_right(model: nn.Module, family: str, tables: str) -> None:
    """Assert that every buffer of a rotary module is there, FP32, and right."""
    for path, module in families.rotary_modules(model).items():
        assert is_protected(module), path
        assert_buffers_right(module, stock_module(family), family, tables)


def assert_buffers_right(module: nn.Module, stock: nn.Module, family: str, tables: str) -> None:
    """Assert that what outside code reads is there, FP32, and right."""
    for name in ("inv_freq", "original_inv_freq"):
        assert hasattr(module, name) == hasattr(stock, name)
        if hasattr(stock, name):
            assert (name in module._buffers) == (name in stock._buffers)
            shown = getattr(module, name)
            assert shown.dtype == torch.float32
            assert torch.equal(shown, getattr(stock, name)), name
    for name in CACHES:
        assert (name in module._buffers) == (name in stock._buffers)
        if name in stock._buffers:
            shown, rows = getattr(module, name), getattr(stock, name)
            assert shown.dtype == torch.float32
            assert shown.shape == rows.shape
            if tables == "fp32":
                assert torch.equal(shown, rows)
            else:
                truth = families.reference(family, range(len(rows)))
                half = shown.shape[-1] // 2
                true = truth.cos if "cos" in name else truth.sin
                assert (shown[:, :half].double() - true).abs().max() < 6e-8


def assert_runs(model: nn.Module, length: int = 12) -> torch.Tensor:
    """Run ``model`` forward and return its finite logits."""
    with torch.no_grad():
        logits = model(tokens(length)).logits
    assert logits.isfinite().all()
    return logits  # type: ignore[no-any-return]


def modelling(family: str) -> Any:
    """The Python module of transformers that applies the tables of ``family``."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def record_applications(monkeypatch: Any, family: str) -> list[tuple[torch.Tensor, ...]]:
    """Listen to the application function of ``family``; what it does is not changed.

    Each call adds q, k, cos and sin as the function got them, and what q and k became.
    """
    calls: list[tuple[torch.Tensor, ...]] = []
    inner: Callable[..., Any] = modelling(family).apply_rotary_pos_emb
    by_row = inspect.signature(inner).parameters.get("position_ids")
    indexed = by_row is not None and by_row.default is inspect.Parameter.empty

    def listening(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(q, k, cos, sin, *args, **kwargs)
        # 4.36 hands over all rows and the position_ids that choose among them.
        positions = (args[0] if args else kwargs["position_ids"]) if indexed else ...
        rows = (plain(cos)[positions].detach().clone(), plain(sin)[positions].detach().clone())
        calls.append(
            (q.detach().clone(), k.detach().clone(), *rows, *(r.detach().clone() for r in result[:2]))
        )
        return result

    monkeypatch.setattr(modelling(family), "apply_rotary_pos_emb", listening)
    return calls


def assert_applied_exactly(
    calls: list[tuple[torch.Tensor, ...]], family: str, positions: Sequence[int]
) -> None:
    """Assert that each call got the exact FP32 tables of ``positions`` and rounded q and k once."""
    assert calls
    truth = families.reference(family, positions)
    half = truth.cos.shape[-1]
    for q, k, cos, sin, rotated_q, rotated_k in calls:
        assert cos.dtype == sin.dtype == torch.float32
        for row_cos, row_sin in zip(cos.unbind(0), sin.unbind(0), strict=True):
            assert families.ulps(families.Tables(row_cos[:, :half], row_sin[:, :half]), truth) <= 1
        for given, got in ((q, rotated_q), (k, rotated_k)):
            assert got.dtype == given.dtype
            true = rotate(given.double(), truth)
            assert relative_error(got, true) <= 1.001 * relative_error(true.to(given.dtype), true) + 1e-7


def rotate(states: torch.Tensor, tables: families.Tables) -> torch.Tensor:
    """The rotary embedding in float64: element i pairs with i + rotary_dim / 2, the rest passes through.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with GPT-NeoX's order of the elements.
    """
    half = tables.cos.shape[-1]
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    turned = (first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin)
    return torch.cat((*turned, rest), dim=-1)


def relative_error(values: torch.Tensor, true: torch.Tensor) -> float:
    """RMS of the difference over RMS of the truth."""
    return float((values.double() - true).pow(2).mean().sqrt() / true.double().pow(2).mean().sqrt())
