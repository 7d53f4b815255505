"""Recognise an application function by what it computes: on sample inputs, forward and backward, to the bit.

A function that is recognised can be replaced by a kernel (`safe_rope.rotation.kernels`); every other one
runs as it is on inputs raised to FP32. The samples differ in every element, so that a function that pairs,
broadcasts, slices or scales otherwise gives other numbers. What no sample tells, its code does (`is_plain`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.functions import signature_of
from safe_rope._base.positions import must_stay_opaque
from safe_rope._base.torch_private import WithoutTorchFunction
from safe_rope.rotation._bodies import Body
from safe_rope.rotation._plain_code import is_plain
from safe_rope.rotation.kernels import Form
from safe_rope.rotation.kernels._form import PAIRS

_HEAD_DIM = 8
_FORMS = tuple(Form(*f) for f in itertools.product(PAIRS, PAIRS, ("half", "interleaved", "first", "shared")))


def can_sample() -> bool:
    """Whether a function can be tried at this moment: nobody records what happens."""
    return not must_stay_opaque(_numbers((1,), 0))


def recognise(stock: Callable[..., Any], *, trusted: bool = False) -> Body | None:
    """Return what ``stock`` computes, if one of our kernels can do it to the same bits; else None.

    Args:
        stock: any callable.
        trusted: whether its code is known to compute and no more.

    """
    if not (trusted or is_plain(stock)):
        return None
    try:
        given = signature_of(stock).parameters
    except (TypeError, ValueError):
        return None
    parameters = list(given.values())
    names = tuple(p.name for p in parameters)
    needed = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    if not {"cos", "sin"} <= set(needed) or any(p.kind != p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    states = min(names.index("cos"), names.index("sin"))
    if not 1 <= states <= 3 or set(needed) - set(names[:states]) - {"cos", "sin", "position_ids"}:
        return None
    default = given["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
    if default is not None and type(default) is not int:
        return None
    gathers = "position_ids" in needed
    with _undisturbed():
        for unsqueeze, form in itertools.product((1, -2, 2) if default is None else (default,), _FORMS):
            body = Body(names, states, form, None, unsqueeze, gathers, states > 1)
            if _agrees(stock, body, _HEAD_DIM):
                wider = (replace(body, rest=rest) for rest in ("last", "first"))
                return next((other for other in wider if _agrees(stock, other, 2 * _HEAD_DIM)), body)
    return None


def returns_low(stock: Callable[..., Any], body: Body) -> bool:
    """Whether a recognised function returns what it is given in 16 bits in 16 bits."""
    with _undisturbed(), torch.no_grad():
        shape, table, unsqueeze = next(_samples(body))
        arguments, states = _sample(body, _HEAD_DIM, shape, table, unsqueeze)
        low = {name: v.to(torch.bfloat16) if _is_real(v) else v for name, v in arguments.items()}
        results = stock(**low)
    results = results if isinstance(results, tuple) else (results,)
    return len(results) == len(states) and all(one.dtype == torch.bfloat16 for one in results)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    with (
        WithoutTorchFunction(),  # a torch.device context makes every call several times as dear
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=()),
    ):
        yield


def _agrees(stock: Callable[..., Any], body: Body, head_dim: int) -> bool:
    """Whether ``stock`` and ``body`` give the same bits, and the same gradients, for every sample."""
    return all(_agree_on(stock, body, head_dim, *sample) for sample in _samples(body))


def _samples(body: Body) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int | None]]:
    """Yield shapes of a state and of its tables, without the last dimension, and unsqueeze_dim."""
    if "unsqueeze_dim" in body.names:
        yield (2, 3, 5), (2, 5), None if body.unsqueeze == 1 else 1
        yield (2, 5, 3), (2, 5), 2
        yield (1, 3, 5), (1, 5), 1
    elif body.unsqueeze == 1:
        yield (2, 3, 5), (2, 5), None
        yield (1, 3, 5), (1, 5), None
    elif body.unsqueeze == -2:
        yield (5, 3), (5,), None
        yield (2, 5, 3), (2, 5), None
    else:
        yield (1, 5, 3), (1, 5), None
        yield (2, 5, 3), (2, 5), None


def _agree_on(
    stock: Callable[..., Any],
    body: Body,
    head_dim: int,
    shape: tuple[int, ...],
    table: tuple[int, ...],
    unsqueeze: int | None,
) -> bool:
    arguments, states = _sample(body, head_dim, shape, table, unsqueeze)
    try:
        result = stock(**arguments)
    except Exception:  # noqa: BLE001 - whatever it is, the function does not take such arguments
        return False
    expected = _results(result, body, states)
    got = _results(body.by_kernel(arguments), body, states)
    with torch.no_grad():
        few = _results(body.rotate((), arguments), body, states)
    if expected is None or got is None or few is None:
        return False
    if not (all(map(torch.equal, expected, got)) and all(map(torch.equal, expected, few))):
        return False
    weights = [_numbers(tuple(state.shape), 9) for state in states]
    try:
        gradients = torch.autograd.grad(expected, states, weights)
    except Exception:  # noqa: BLE001 - so may a backward of the function's own fail, or there is none
        return False
    return all(map(torch.equal, gradients, torch.autograd.grad(got, states, weights)))


def _sample(
    body: Body, head_dim: int, shape: tuple[int, ...], table: tuple[int, ...], unsqueeze: int | None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return arguments, and which of them are states: all different numbers, with fewer heads of k."""
    width = _HEAD_DIM if body.form.table != "shared" else _HEAD_DIM // 2
    heads = len(shape) - 1 if unsqueeze == 2 or body.unsqueeze in (-2, 2) else 1
    arguments: dict[str, Any] = {}
    for index, name in enumerate(body.names[: body.states]):
        own = list(shape)
        if index:  # fewer heads, as grouped keys have
            own[heads if heads < len(own) else -1] = 1
        arguments[name] = _numbers((*own, head_dim), 3 + index).requires_grad_()
    rows = (7,) if body.gathers else table
    arguments["cos"], arguments["sin"] = _numbers((*rows, width), 1), _numbers((*rows, width), 2)
    if "position_ids" in body.names:
        positions = [(5 * i + 2) % 7 for i in range(math.prod(table))]
        arguments["position_ids"] = originals.tensor(positions, dtype=torch.int64, device="cpu").view(table)
    if unsqueeze is not None:
        arguments["unsqueeze_dim"] = unsqueeze
    states = [arguments[name] for name in body.names[: body.states]]
    return arguments, states


def _results(result: Any, body: Body, states: list[Tensor]) -> list[Tensor] | None:
    """Return a tensor for each state, of its shape and dtype; None if ``result`` is anything else."""
    if isinstance(result, tuple) != body.is_tuple:
        return None
    results = list(result) if body.is_tuple else [result]
    if len(results) != len(states) or not all(isinstance(r, Tensor) for r in results):
        return None
    pairs = zip(results, states, strict=True)
    return results if all(r.shape == s.shape and r.dtype == s.dtype for r, s in pairs) else None


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """FP32 numbers between -1 and 1, all different, the same on every machine."""
    count = math.prod(shape)
    values = [math.sin(12.9898 * (i + 1) + 78.233 * seed) for i in range(count)]
    return originals.vector(values, torch.float32).view(shape)
