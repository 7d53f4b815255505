"""A table is of the stock model's dtype to all code that is no application of rotary embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope

DIM, LENGTH = 16, 40
DTYPES = (torch.bfloat16, torch.float16)
Reader = Callable[[Tensor, Tensor], Tensor]


class Rotary(nn.Module):
    """Returns cos and sin, which a function of this file is known to apply."""

    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phase = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq).repeat(1, 2)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def is_compared(x: Tensor, cos: Tensor) -> Tensor:
    assert cos.dtype == x.dtype
    return x * cos


def added_at_rows(x: Tensor, cos: Tensor) -> Tensor:
    return x.clone().index_add_(0, torch.arange(LENGTH), cos)


def takes_memory(x: Tensor, cos: Tensor) -> Tensor:
    storage = cos.untyped_storage()
    return x * torch.empty(0, dtype=x.dtype).set_(storage, 0, cos.shape, cos.stride())  # type: ignore[call-overload]


def is_nested(x: Tensor, cos: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor([cos[:3], cos[3:7]])
    return x[:8].view(2, 4, DIM) + nested.to_padded_tensor(0.0)


READERS: list[Reader] = [
    is_compared,
    added_at_rows,
    takes_memory,
    is_nested,
    lambda x, cos: x.to(cos.dtype) * cos,
    lambda x, cos: x.type_as(cos) * cos,
    lambda x, cos: x.to(torch.promote_types(x.dtype, cos.dtype)) * cos,
    lambda x, cos: torch.func.jvp(lambda one: one * cos, (x,), (x,))[1],
    lambda x, cos: x.clone().masked_scatter_(torch.ones_like(x, dtype=torch.bool), cos),
    lambda x, cos: x.clone().mul_(cos),
    lambda x, cos: torch.empty(0, dtype=x.dtype).set_(cos.contiguous()) * x,
    lambda x, cos: x * cos.contiguous().view(torch.int16).view(x.dtype),
]


def model(dtype: torch.dtype, how: str) -> Rotary:
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext():
        made = Rotary()
    made = made.to(dtype)
    if how == "protect":
        safe_rope.protect(made)
    return made


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reader", READERS)
def test_it_reads_what_a_true_table_rounded_once_holds(reader: Reader, dtype: torch.dtype, how: str) -> None:
    x = torch.linspace(-1, 1, LENGTH * DIM).view(LENGTH, DIM).to(dtype)
    cos, _ = model(dtype, how)(x)
    true, _ = Rotary()(x.float())
    assert safe_rope.rotation.is_marked(cos)
    result = reader(x, cos)
    torch.testing.assert_close(result, reader(x, true.to(dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_application_still_gets_fp32(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, LENGTH * DIM).view(LENGTH, DIM).to(dtype)
    protected = model(dtype, "guard")
    true: Any = Rotary()(x.float())
    torch.testing.assert_close(apply_rotary(x, *protected(x)), apply_rotary(x.float(), *true).to(dtype))


def test_16_bits_are_written_to_a_table() -> None:
    x = torch.zeros(LENGTH, DIM, dtype=torch.bfloat16)
    cos, _ = model(torch.bfloat16, "guard")(x)
    before = cos.float()
    cos.index_add_(0, torch.arange(3), torch.ones(3, DIM, dtype=torch.bfloat16))
    before[:3] += 1
    torch.testing.assert_close(cos.float(), before, rtol=0, atol=0)


OF_ANOTHER_DTYPE: list[Callable[[Tensor, torch.dtype], Tensor]] = [
    lambda cos, dtype: torch.zeros_like(cos, dtype=dtype),
    lambda cos, dtype: torch.ones_like(cos, dtype=dtype),
    lambda cos, dtype: torch.empty_like(cos, dtype=dtype).zero_(),
    lambda cos, dtype: torch.full_like(cos, 0.5, dtype=dtype),
    lambda cos, dtype: torch.rand_like(cos, dtype=dtype).mul_(0),
    lambda cos, dtype: cos.new_zeros(3, dtype=dtype),
    lambda cos, dtype: cos.new_tensor([1.0, 2.0], dtype=dtype),
    lambda cos, dtype: cos.sum(-1, dtype=dtype),
    lambda cos, dtype: cos.mean(-1, dtype=dtype),
    lambda cos, dtype: cos.cumsum(-1, dtype=dtype),
    lambda cos, dtype: cos.prod(-1, dtype=dtype),
    lambda cos, dtype: torch.linalg.vector_norm(cos, dim=-1, dtype=dtype),
]


@pytest.mark.parametrize("asked", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", OF_ANOTHER_DTYPE)
def test_a_dtype_that_is_asked_for_is_given(function: Any, asked: torch.dtype) -> None:
    x = torch.zeros(LENGTH, DIM, dtype=torch.bfloat16)
    cos, _ = model(torch.bfloat16, "guard")(x)
    result, true = function(cos, asked), function(Rotary()(x.float())[0].double(), torch.float64)
    assert result.dtype == asked
    assert safe_rope.rotation.is_marked(result) <= (asked in DTYPES)
    torch.testing.assert_close(result.double(), true, rtol=2 * torch.finfo(asked).eps, atol=1e-5)


def test_what_is_made_in_a_tables_own_dtype_holds_it_exactly() -> None:
    cos, _ = model(torch.bfloat16, "guard")(torch.zeros(LENGTH, DIM, dtype=torch.bfloat16))
    copied = torch.zeros_like(cos, dtype=cos.dtype)
    copied[:] = cos
    assert torch.equal(copied.float(), cos.float())


def test_new_tensors_are_of_the_stock_models_dtype() -> None:
    cos, _ = model(torch.bfloat16, "guard")(torch.zeros(LENGTH, DIM, dtype=torch.bfloat16))
    assert cos.new_tensor([1.0, 2.0]).dtype == cos.new(3).dtype == torch.bfloat16  # type: ignore[call-overload]
    assert torch.Tensor.new(cos, 3).shape == (3,)  # type: ignore[call-overload]


@pytest.mark.parametrize("spec", ["", ".3f", ".7f", ">12.2e"])
def test_a_number_of_a_table_is_formatted_as_in_stock(spec: str) -> None:
    x = torch.zeros(LENGTH, DIM, dtype=torch.bfloat16)
    cos, _ = model(torch.bfloat16, "guard")(x)
    true, _ = Rotary()(x.float())
    assert format(cos.min(), spec) == format(true.bfloat16().min(), spec)
