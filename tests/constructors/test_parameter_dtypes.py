"""A parameter has the dtype that zero.Init gives it without the guard, whatever it was made from."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.covering import in_turn
from support.zero_init import zero_init
from torch import nn

from safe_rope.constructors import ConstructorGuard, pristine

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]
FP32 = torch.float32


def view_of_filled() -> torch.Tensor:
    table = torch.empty(4, 3, dtype=FP32)
    table.fill_(0.1)
    table[1:].mul_(3)
    return table.t()[1:].reshape(-1)


def masked() -> torch.Tensor:
    table = torch.arange(12, dtype=FP32) / 7
    return table[table > 0.5]  # its shape depends on data


def assigned() -> torch.Tensor:
    holder = torch.linspace(0, 1, 5)
    holder.data = torch.full((5,), 0.3, dtype=FP32)
    return holder


RECIPES: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(5, dtype=FP32),
    "zeros": lambda: torch.zeros(5, dtype=FP32),
    "full": lambda: torch.full((5,), 1 / 3, dtype=FP32),
    "tensor": lambda: torch.tensor([0.1, 0.7], dtype=FP32),
    "no dtype": lambda: torch.full((5,), 1 / 3),
    "float64": lambda: torch.full((5,), 1 / 3, dtype=torch.float64),
    "float16": lambda: torch.full((5,), 1 / 3, dtype=torch.float16),
    "bfloat16": lambda: torch.full((5,), 1 / 3, dtype=torch.bfloat16),
    "requires_grad": lambda: torch.ones(5, dtype=FP32, requires_grad=True),
    "arithmetic": lambda: 1 - 2 * torch.ones(5, dtype=FP32) / 3,
    "mamba A_log": lambda: torch.log(torch.arange(1, 17, dtype=FP32)[None].expand(4, -1).contiguous()),
    "cat": lambda: torch.cat([torch.ones(2, dtype=FP32), torch.full((3,), 0.1, dtype=FP32)]),
    "cat with linspace": lambda: torch.cat([torch.ones(2, dtype=FP32), torch.linspace(0, 1, 5)]),
    "stack": lambda: torch.stack([torch.full((3,), 0.1, dtype=FP32)] * 2),
    "view, in-place fill": view_of_filled,
    "split": lambda: torch.arange(10, dtype=FP32).div(3).split(4)[1],
    "max": lambda: torch.arange(12, dtype=FP32).view(3, 4).div(7).max(dim=1).values,
    "mask": masked,
    "data": lambda: torch.full((3,), 0.1, dtype=FP32).data,
    "detach, clone": lambda: torch.full((3,), 0.1, dtype=FP32).detach().clone(),
    "cpu": lambda: torch.full((3,), 0.1, dtype=FP32).cpu().to("cpu"),
    "zeros_like": lambda: torch.zeros_like(torch.ones(3, dtype=FP32)),
    "new_full": lambda: torch.ones(3, dtype=FP32).new_full((2,), 0.1),
    "assigned data": assigned,
    "explicit .to": lambda: torch.full((3,), 0.1, dtype=torch.bfloat16).to(FP32),
    ".float()": lambda: torch.arange(5, dtype=FP32).div(3).float(),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "integer division": lambda: torch.arange(0, 10) / 7,
    "times a scalar tensor": lambda: torch.full((3,), 0.1, dtype=FP32) * torch.linspace(2, 3, 1)[0],
    "scalar times linspace": lambda: torch.linspace(0, 1, 5) * torch.full((), 0.1, dtype=FP32),
    "times linspace": lambda: torch.linspace(0, 1, 5) * torch.full((5,), 0.1, dtype=FP32),
    "integers times": lambda: torch.arange(5) * torch.full((5,), 0.1, dtype=FP32),
    "integers times scalar": lambda: torch.arange(5) * torch.full((), 0.1, dtype=FP32),
    "to another": lambda: torch.linspace(0, 1, 5).to(torch.ones(1, dtype=FP32)),
    "type_as another": lambda: torch.ones(5, dtype=FP32).type_as(torch.linspace(0, 1, 5)),
    "expand_as": lambda: torch.ones(1, dtype=FP32).expand_as(torch.linspace(0, 1, 5)).contiguous(),
    "where": lambda: torch.where(torch.arange(5) > 2, torch.full((5,), 0.1, dtype=FP32), 0.0),
    "matmul": lambda: torch.eye(5, dtype=FP32) @ torch.full((5, 2), 0.1, dtype=FP32),
    "outer": lambda: torch.outer(torch.arange(3, dtype=FP32), torch.full((4,), 0.1, dtype=FP32)),
    "deepcopy": lambda: copy.deepcopy(torch.full((3,), 0.1, dtype=FP32)),
    "ones_like with dtype": lambda: torch.ones_like(torch.ones(3, dtype=FP32), dtype=torch.float64),
    "numpy": lambda: torch.from_numpy(np.linspace(0, 1, 5, dtype=np.float32)),
    "over NumPy's number": lambda: torch.arange(1, 6, dtype=FP32) / np.log2(8),
    "NumPy's number to the power": lambda: np.float32(0.5) ** torch.arange(1, 6, dtype=FP32),
    "uniform_": lambda: torch.empty(5, dtype=FP32).uniform_(),
}

MIXED: dict[str, Callable[[], torch.Tensor]] = {
    "matmul of a literal": lambda: torch.arange(3, dtype=FP32)[:, None] @ torch.tensor([[0.1, 0.7]]),
    "literal @": lambda: torch.tensor([[0.1], [0.7]]) @ torch.arange(1, 4, dtype=FP32)[None],
    "addmm_": lambda: torch.zeros(2, 2).addmm_(torch.eye(2, dtype=FP32), torch.full((2, 2), 0.1)),
    "addmm_ into another": lambda: torch.zeros(2, 2, dtype=FP32).addmm_(torch.eye(2), torch.eye(2)),
    "index_put": lambda: torch.zeros(4).index_put((torch.arange(2),), torch.full((2,), 0.1, dtype=FP32)),
    "meshgrid": lambda: torch.meshgrid(torch.ones(2, dtype=FP32), torch.ones(3), indexing="ij")[0].clone(),
}
"""What zero.Init makes of one dtype, and no operation takes in two."""


class Holder(nn.Module):
    """A parameter from ``recipe``, a buffer of each kind, and the dtypes seen in the constructor."""

    def __init__(self, recipe: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(recipe())
        self.keyword = nn.Parameter(data=recipe(), requires_grad=False)
        self.linear = nn.Linear(3, 3, dtype=FP32)
        self.replaced = nn.Parameter(torch.linspace(0, 1, 3))
        self.replaced.data = torch.ones(3, dtype=FP32)
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.value = self.weight.detach().clone()


class Outer(nn.Module):
    def __init__(self, recipe: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Holder(recipe)
        self.own = nn.Parameter(recipe())
        self.seen = {**self.inner.seen, "own": self.own.dtype}


def build(recipe: Callable[[], torch.Tensor], dtype: torch.dtype, *, guard: bool) -> Outer:
    torch.manual_seed(3)
    with ConstructorGuard() if guard else nullcontext(), zero_init(dtype):
        return Outer(recipe)


def partitions(model: nn.Module) -> dict[str, tuple[torch.dtype, ...]]:
    return {
        name: (p.dtype, p.ds_tensor.dtype) if hasattr(p, "ds_tensor") else (p.dtype,)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn([(name,) for name in RECIPES | MIXED], ["bfloat16", "float16"])
)
def test_a_parameter_has_the_dtype_it_has_without_the_guard(name: str, dtype: str) -> None:
    recipe = (RECIPES | MIXED)[name]
    stock, guarded = (build(recipe, getattr(torch, dtype), guard=guard) for guard in (False, True))
    assert guarded.seen == stock.seen
    assert partitions(guarded) == partitions(stock)
    assert guarded.inner.value.dtype == stock.inner.value.dtype


@pytest.mark.parametrize("name", ["ones", "full", "mamba A_log", "cat", "view, in-place fill", "mask"])
def test_the_values_are_the_fp32_computation_rounded_once(name: str) -> None:
    plain = RECIPES[name]()
    guarded = build(RECIPES[name], torch.bfloat16, guard=True)
    assert plain.dtype == FP32
    assert guarded.inner.value.dtype == torch.bfloat16
    assert torch.equal(guarded.inner.value, plain.to(torch.bfloat16))


def test_a_parameter_from_linspace_is_fp32_while_its_module_is_built() -> None:
    assert build(RECIPES["linspace"], torch.bfloat16, guard=True).seen["weight"] == FP32


def test_buffers_stay_what_they_were_asked_to_be() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            positions = torch.arange(0, 8, 2, dtype=FP32)
            self.register_buffer("inv_freq", 1.0 / 10000 ** (positions / 8))
            self.register_buffer("fp16", torch.ones(3, dtype=torch.float16))
            self.register_buffer("low", torch.ones(3))

    with ConstructorGuard(), zero_init():
        buffers = Buffers()
    assert (buffers.inv_freq.dtype, buffers.fp16.dtype, buffers.low.dtype) == (
        FP32,
        torch.float16,
        torch.bfloat16,
    )
    assert torch.equal(buffers.inv_freq, 1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=FP32) / 8))
    assert not vars(buffers.inv_freq)


def test_a_parameter_and_its_data_keep_sharing_storage() -> None:
    with ConstructorGuard(), zero_init():
        data = torch.ones(4, dtype=FP32)
        first, second = nn.Parameter(data), nn.Parameter(data)
        assert data.dtype == torch.bfloat16
        assert first.data_ptr() == second.data_ptr() == data.data_ptr()


def test_an_uninitialized_parameter_has_the_dtype_it_has_without_the_guard() -> None:
    def made() -> torch.dtype:
        parameter = nn.UninitializedParameter(dtype=FP32)
        parameter.materialize((2, 3))
        return parameter.dtype

    with zero_init():
        stock = made()
        with ConstructorGuard():
            assert made() == stock == torch.bfloat16


NOT_HERE = ["uniform_", "data", "assigned data"]
PRISTINE = [name for name in RECIPES if name not in NOT_HERE]


SURROUNDINGS = [
    ", ".join(filter(None, words))
    for words in itertools.product(("float32", "bfloat16"), ("", "Init"), ("", "guard"))
]


@pytest.mark.parametrize(("name", "surroundings"), in_turn([(name,) for name in PRISTINE], SURROUNDINGS))
def test_a_parameter_made_in_a_pristine_section_has_the_dtype_it_has_outside(
    name: str, surroundings: str
) -> None:
    recipe = RECIPES[name]
    default, *rest = surroundings.split(", ")

    def made(inside: bool) -> nn.Parameter:
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(getattr(torch, default))
            if "Init" in rest:
                stack.enter_context(zero_init(torch.float16))
            if inside:
                if "guard" in rest:
                    stack.enter_context(ConstructorGuard())
                stack.enter_context(pristine())
            return nn.Parameter(recipe())

    outside, inside = made(False), made(True)
    assert inside.dtype == outside.dtype
    assert torch.equal(inside, recipe().to(inside.dtype))
    assert torch.get_default_dtype() == FP32


def test_code_of_deepspeed_itself_gets_what_it_gets_without_the_guard() -> None:
    # It partitions a parameter with torch.empty(n, dtype=param.dtype), and zero.Init lowers that too.
    def final(guard: bool) -> torch.dtype:
        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.linspace(0, 1, 5))

        with ConstructorGuard() if guard else nullcontext(), zero_init():
            dtype: torch.dtype = Module().weight.ds_tensor.dtype
        return dtype

    assert final(True) == final(False)


def _set(table: torch.Tensor, values: torch.Tensor) -> None:
    table.set_(values)


def _swap(table: torch.Tensor, values: torch.Tensor) -> None:
    torch.utils.swap_tensors(table, values)


@pytest.mark.parametrize("guard", [nullcontext, ConstructorGuard])
@pytest.mark.parametrize("put", [_set, _swap])
def test_what_is_set_or_swapped_under_zero_init_is_so_under_a_guard(
    put: Callable[..., None], guard: Callable[..., Any]
) -> None:
    tenths = torch.arange(7) / 10
    with zero_init(), guard():
        table, wide = torch.zeros(7), torch.zeros(7, dtype=FP32)
        put(table, torch.tensor(tenths.tolist(), dtype=FP32))
        put(wide, torch.full((7,), 0.3))
        seen = table.dtype
        parameter = nn.Parameter(table)
    assert seen == (torch.bfloat16 if guard is nullcontext else FP32)
    assert torch.equal(parameter, tenths.bfloat16())
    assert torch.equal(wide, torch.full((7,), 0.3, dtype=torch.bfloat16))
