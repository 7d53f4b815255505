"""Recognise an application function by what it computes: on sample inputs, forward and backward, to the bit.

A function that is recognised can be replaced by a kernel (`safe_rope.rotation.kernels`); every other one
runs as it is on inputs raised to FP32. Names and source say nothing here: the samples differ in every
element, so that a function that pairs, broadcasts, slices or scales otherwise gives other numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.positions import must_stay_opaque
from safe_rope._base.torch_private import WithoutTorchFunction
from safe_rope.rotation._checks import fault_of_states, fault_of_tables
from safe_rope.rotation.kernels import Form, rotate
from safe_rope.rotation.kernels._form import PAIRS

_HEAD_DIM = 8
_FORMS = tuple(Form(*f) for f in itertools.product(PAIRS, PAIRS, ("half", "interleaved", "first", "shared")))


@dataclass(frozen=True)
class Body:
    """How a recognised function takes its arguments, and what it computes.

    Args:
        names: the function's parameters, in order.
        states: how many of the first parameters are rotated; the result is a tuple if it is a tuple for one.
        form: which elements and columns make pairs.
        partial: whether tables may be narrower than a head (the rest passes through).
        unsqueeze: where the heads' dimension goes into cos and sin, unless the call says it.
        gathers: whether cos and sin are whole tables, of which position_ids chooses the rows.
        is_tuple: whether the result is a tuple.
    """

    names: tuple[str, ...]
    states: int
    form: Form
    partial: bool
    unsqueeze: int
    gathers: bool
    is_tuple: bool

    def rotate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function would return for plain tensors; None if it has to be asked itself."""
        given = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or any(name in kwargs for name in given):
            return None
        given |= kwargs
        cos, sin = given.pop("cos", None), given.pop("sin", None)
        xs = tuple(given.pop(name, None) for name in self.names[: self.states])
        position_ids = given.pop("position_ids", None)
        unsqueeze = given.pop("unsqueeze_dim", self.unsqueeze)
        if type(unsqueeze) is not int or any(value is not None for value in given.values()):
            return None
        if not (_is_plain(cos) and _is_plain(sin) and all(map(_is_plain, xs))):
            return None
        if self.gathers:
            if not isinstance(position_ids, Tensor) or cos.dim() != 2 or sin.dim() != 2:
                return None
            cos, sin = cos[position_ids], sin[position_ids]
        if fault_of_tables(cos, sin, unsqueeze) is not None:
            return None
        cos, sin = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
        rotary_dim = self.form.rotary_dim(cos.shape[-1])
        for name, x in zip(self.names, xs, strict=False):
            if fault_of_states(name, x, cos, self.form) is not None:
                return None
            if rotary_dim != x.shape[-1] and not self.partial:
                return None
        results = rotate(xs, cos, sin, self.form)
        return results if self.is_tuple else results[0]


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor


def can_sample() -> bool:
    """Whether a function can be tried at this moment: nobody records what happens."""
    return not must_stay_opaque(_numbers((1,), 0))


def recognise(stock: Callable[..., Any]) -> Body | None:
    """Return what ``stock`` computes, if one of our kernels can do it to the same bits; else None."""
    try:
        given = inspect.signature(stock).parameters
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
        for unsqueeze, form in itertools.product((1, -2) if default is None else (default,), _FORMS):
            body = Body(names, states, form, False, unsqueeze, gathers, states > 1)
            if _agrees(stock, body, _HEAD_DIM):
                return replace(body, partial=_agrees(stock, replace(body, partial=True), 2 * _HEAD_DIM))
    return None


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
    else:
        yield (5, 3), (5,), None
        yield (2, 5, 3), (2, 5), None


def _agree_on(
    stock: Callable[..., Any],
    body: Body,
    head_dim: int,
    shape: tuple[int, ...],
    table: tuple[int, ...],
    unsqueeze: int | None,
) -> bool:
    width = _HEAD_DIM if body.form.table != "shared" else _HEAD_DIM // 2
    heads = len(shape) - 1 if unsqueeze == 2 or body.unsqueeze == -2 else 1
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
    try:
        result = stock(**arguments)
    except Exception:  # noqa: BLE001 - whatever it is, the function does not take such arguments
        return False
    expected = _results(result, body, states)
    got = _results(body.rotate((), arguments), body, states)
    if expected is None or got is None or not all(map(torch.equal, expected, got)):
        return False
    weights = [_numbers(tuple(state.shape), 9) for state in states]
    try:
        gradients = torch.autograd.grad(expected, states, weights)
    except Exception:  # noqa: BLE001 - so may a backward of the function's own fail, or there is none
        return False
    return all(map(torch.equal, gradients, torch.autograd.grad(got, states, weights)))


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
