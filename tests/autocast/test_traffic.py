"""Counting collectives: every one, once, whoever calls it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from safe_rope.autocast import traffic

pytestmark = pytest.mark.usefixtures("deepspeed_group")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


CALLS: dict[str, Any] = {
    "all_reduce": lambda: dist.all_reduce(ones(10)),
    "broadcast": lambda: dist.broadcast(ones(10), 0),
    "reduce": lambda: dist.reduce(ones(10), 0),
    "all_gather": lambda: dist.all_gather([ones(10)], ones(10)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(10), ones(10)),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(10), [ones(10)]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(10), ones(10)),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(10), ones(10)),
    "gather": lambda: dist.gather(ones(10), [ones(10)]),
    "scatter": lambda: dist.scatter(ones(10), [ones(10)]),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_collective_is_counted_once_under_its_own_name(op: str) -> None:
    with traffic() as seen:
        CALLS[op]()
    (row,) = seen.rows
    assert (row.op, row.dtype, row.calls, row.bytes) == (op, "float32", 1, 40)


DEEPSPEED: dict[str, Any] = {
    "all_reduce": lambda comm: comm.all_reduce(ones(10)),
    "broadcast": lambda comm: comm.broadcast(ones(10), 0),
    "reduce": lambda comm: comm.reduce(ones(10), 0),
    "all_gather": lambda comm: comm.all_gather([ones(10)], ones(10)),
    "all_gather_into_tensor": lambda comm: comm.all_gather_into_tensor(ones(10), ones(10)),
    "reduce_scatter_tensor": lambda comm: comm.reduce_scatter_tensor(ones(10), ones(10)),
}


@pytest.mark.parametrize("op", DEEPSPEED)
def test_deepspeeds_own_names_are_not_counted_twice(op: str) -> None:
    import deepspeed.comm as comm

    with traffic() as seen:
        DEEPSPEED[op](comm)
    (row,) = seen.rows
    assert (row.op, row.calls, row.bytes) == (op, 1, 40)


def test_a_coalesced_call_is_one_call_with_the_bytes_of_all() -> None:
    with traffic() as seen:
        dist.all_reduce_coalesced([ones(10), ones(6)])
    (row,) = seen.rows
    assert (row.calls, row.bytes) == (1, 64)
    from torch.distributed.distributed_c10d import _coalescing_manager

    with traffic() as seen, _coalescing_manager():
        dist.all_gather_into_tensor(ones(10), ones(10))
        dist.all_gather_into_tensor(ones(6), ones(6))
    assert sum(row.bytes for row in seen.rows) == 64


def test_an_asynchronous_call_is_counted_when_it_is_made() -> None:
    tensor = ones(10)
    with traffic() as seen:
        handle = dist.all_reduce(tensor, async_op=True)
        assert seen.bytes() == 40
    handle.wait()
    assert seen.bytes() == 40
    assert torch.equal(tensor, ones(10))


def test_functional_collectives_are_counted_with_the_size_of_their_output() -> None:
    from torch.distributed import _functional_collectives as functional

    with traffic() as seen:
        functional.all_reduce(ones(10), "sum", dist.group.WORLD).sum().item()
        functional.all_gather_tensor(ones(10), 0, dist.group.WORLD).sum().item()
    assert [(row.op, row.bytes) for row in seen.rows] == [("all_gather_into_tensor", 40), ("all_reduce", 40)]


def test_dtypes_are_told_apart_and_shares_add_up() -> None:
    with traffic() as seen:
        dist.all_reduce(ones(10))
        dist.all_reduce(ones(60, dtype=torch.bfloat16))
        dist.barrier()
    assert seen.bytes(torch.bfloat16) == 120
    assert seen.bytes(torch.float32, op="all_reduce") == 40
    assert seen.share(torch.float32) == 0.25
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["bytes"] == 160
    assert "all_reduce" in str(seen)
    assert "75.0%" in str(seen)


def test_open_ones_nest_and_nothing_is_counted_afterwards() -> None:
    function = dist.all_reduce
    with traffic() as outer:
        dist.all_reduce(ones(10))
        with traffic() as inner:
            dist.all_reduce(ones(5))
        dist.all_reduce(ones(1))
    dist.all_reduce(ones(100))
    assert inner.bytes() == 20
    assert outer.bytes() == 64
    assert dist.all_reduce is function
    with contextlib.suppress(ZeroDivisionError), traffic() as failed:
        dist.all_reduce(ones(10))
        raise ZeroDivisionError
    dist.all_reduce(ones(10))
    assert failed.bytes() == 40
    assert str(traffic_of_nothing()) == "no collective was called"


def traffic_of_nothing() -> Any:
    with traffic() as seen:
        ones(3).sum()
    return seen


def test_a_backward_of_ddp_is_counted() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with traffic() as seen:
        model(ones(2, 4)).sum().backward()
    assert seen.bytes(torch.float32, op="all_reduce") == 80
