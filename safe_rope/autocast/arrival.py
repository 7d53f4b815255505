"""Which gradients the ranks send at ZeRO 1 and 2: the same ones in the same order, or the step is refused.

Each rank packs those that it has one after the other, and DeepSpeed adds up what lies in the same place,
whatever parameter it is of. ZeRO 2, and ZeRO 1 with overlap_comm, send while the backward goes on.
"""

from __future__ import annotations

import array
import hashlib
import itertools
from typing import Any

import torch

from safe_rope.autocast import _deepspeed
from safe_rope.errors import ConfigError

_FILLS = "get_gradient_for_reduction", "_fill_param_grad_accum_attribute", "bit16_groups"
_NEEDS = "reduce_ipg_grads", "ipg_buckets", "bit16_groups", "dp_process_group", "get_param_id"
_BYTES = 7  # of the digest, so that it and its negative are int64


def send_all(optimizer: Any) -> None:
    """Let a ZeRO 1 ``optimizer`` send what it has not yet, at the end of a step's last backward.

    That is zeros for parameters that this rank has not used, which others may have. With overlap_comm it is
    the gradients, too, of those that only earlier micro-batches have used: DeepSpeed forgets them.
    """
    needs = "reduce_gradients", "params_already_reduced"
    if any(not hasattr(optimizer, name) for name in (*needs, *_FILLS, *_NEEDS)):
        return

    def reduce_gradients(original: Any, *args: Any, **kwargs: Any) -> Any:
        boundary = optimizer.is_gradient_accumulation_boundary  # a method from 0.19 on
        if boundary() if callable(boundary) else boundary:
            packed = {number for bucket in optimizer.ipg_buckets.values() for *_, number in bucket.params}
            for index, group in enumerate(optimizer.bit16_groups):
                for parameter in (p for p in group if p.requires_grad):
                    number = optimizer.get_param_id(parameter)
                    if number not in packed and not optimizer.params_already_reduced[number]:
                        _send(optimizer, parameter, index)
        return original(*args, **kwargs)

    _deepspeed.around(optimizer, "reduce_gradients", reduce_gradients)


def send_all_coalesced(engine: Any) -> None:
    """Let a ZeRO 1 or 2 ``engine`` send zeros, too, at the end of its ``coalesce_grad_reduction``.

    It sends in one order, past ``reduce_gradients``, what then has a gradient on this rank.
    """
    name, optimizer = "_flush_coalesced_reduction_zero12", engine.optimizer
    if not hasattr(engine, name) or any(not hasattr(optimizer, needed) for needed in _FILLS):
        return

    def flush(original: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in (p for group in optimizer.bit16_groups for p in group if p.requires_grad):
            _fill(optimizer, parameter)
        return original(*args, **kwargs)

    _deepspeed.around(engine, name, flush)


def _fill(optimizer: Any, parameter: torch.nn.Parameter) -> None:
    """Give ``parameter`` a gradient, if it has none."""
    if optimizer.get_gradient_for_reduction(parameter) is None:
        parameter.grad = torch.zeros_like(parameter)
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(parameter)


def _send(optimizer: Any, parameter: torch.nn.Parameter, group: int) -> None:
    """Give ``parameter`` a gradient, if it has none, and send it, if the optimizer does not later."""
    _fill(optimizer, parameter)
    if optimizer.overlap_comm:
        optimizer.setup_buckets()
        optimizer.reduce_ready_partitions_and_remove_grads(parameter, group)


def compare_before_steps(optimizer: Any) -> None:
    """Let each step of ``optimizer`` begin with a comparison of what the ranks have sent since the last one.

    Every rank takes part in a step, and waits in it for the others, so that one more message fits there.
    """
    group = getattr(optimizer, "dp_process_group", None)
    lacks = any(not hasattr(optimizer, name) for name in (*_NEEDS, "param_names", "step"))
    if lacks or torch.distributed.get_world_size(group) < 2:
        return
    sent: list[int] = []

    def reduce_ipg_grads(original: Any, comm_dtype: Any = None, **kwargs: Any) -> Any:
        buckets = optimizer.ipg_buckets
        for number, dtype in enumerate(sorted(buckets, key=str), 1):
            if comm_dtype in (None, dtype):
                for message in _messages(optimizer, buckets[dtype].params):
                    sent.extend((*message, -number))
        return original(**kwargs) if comm_dtype is None else original(comm_dtype=comm_dtype, **kwargs)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_same(sent, group):
            raise ConfigError(_difference(optimizer, sent, group))
        sent.clear()
        return original(*args, **kwargs)

    _deepspeed.around(optimizer, "reduce_ipg_grads", reduce_ipg_grads)
    _deepspeed.around(optimizer, "step", step)


def _messages(optimizer: Any, params: list[tuple[int, int, int]]) -> list[list[int]]:
    """The parameters, by their numbers, whose gradients a bucket packs into each message, in their order.

    Not those of experts in DeepSpeed's MoE layers: other ranks add those up, in other messages.
    """
    packed = [
        (group, number)
        for group, place, number in params
        if getattr(optimizer.bit16_groups[group][place], "allreduce", True)
    ]
    to_all = getattr(optimizer, "use_multi_rank_bucket_allreduce", True)
    if to_all or not (optimizer.contiguous_gradients and optimizer.reduce_scatter):
        return [[number for _, number in packed]] * bool(packed)
    by_owner: dict[int, list[int]] = {}
    for group, number in packed:
        for owner in optimizer.param_to_partition_ids[group][number]:
            by_owner.setdefault(owner, []).append(number)
    return list(by_owner.values())


def _is_same(numbers: list[int], group: Any) -> bool:
    """Whether each rank of ``group``, all of which have to call it, has the same numbers."""
    digest = hashlib.blake2b(array.array("q", numbers).tobytes(), digest_size=_BYTES).digest()
    own = int.from_bytes(digest, "big")
    comm, accelerator = _deepspeed.deepspeed().comm, _deepspeed.deepspeed().accelerator.get_accelerator()
    ends = torch.tensor([own, -own], device=accelerator.current_device_name())
    comm.all_reduce(ends, op=comm.ReduceOp.MAX, group=group)
    largest, negative = ends.tolist()
    return bool(largest == -negative)


def _difference(optimizer: Any, sent: list[int], group: Any) -> str:
    """Say what the ranks have sent first that is not the same; each has to call it."""
    ranks = torch.distributed.get_process_group_ranks(group)
    everywhere: list[Any] = [None] * len(ranks)
    torch.distributed.all_gather_object(everywhere, sent, group=group)
    first = next(seen for seen in itertools.zip_longest(*everywhere) if len(set(seen)) > 1)
    trained = [p for params in optimizer.bit16_groups for p in params]
    names = {optimizer.get_param_id(p): optimizer.param_names[p] for p in trained}
    said: dict[str, list[int]] = {}
    for rank, number in zip(ranks, first, strict=True):
        what = f"that of {names[number]}" if number in names else "nothing"
        said.setdefault(what, []).append(rank)
    listed = "; ".join(f"{what} (ranks {', '.join(map(str, who))})" for what, who in said.items())
    return (
        "at ZeRO 2 or with overlap_comm all ranks have to use the same parameters in one order, but they "
        f"have sent different gradients in the same place: {listed}. DeepSpeed adds them to each other. "
        "No weight has changed. Use ZeRO 1 without overlap_comm, where ranks may differ, or let every rank "
        "use all parameters in one order: an expert without tokens on a batch of none"
    )
