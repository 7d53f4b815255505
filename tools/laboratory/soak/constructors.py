"""Drawn calls of what zero.Init replaces, under a guard, beside plain torch or zero.Init alone.

With an explicit dtype, that of an ``out`` included, a call gives what plain torch gives. Without one it gives
what zero.Init alone gives. A wrong call raises the same type.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

from laboratory.soak.trial import Trial
from safe_rope.constructors import CONSTRUCTORS, ConstructorGuard

zero_init: Any = importlib.import_module("support.zero_init")

CALLS = 100_000
BATCH = 250
LOW = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATING, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, float, int, bool)
ERRORS = (RuntimeError, TypeError, ValueError, OverflowError, IndexError, NotImplementedError)
UNKNOWN = ("empty", "Tensor", "__new__")
"""Whose values are whatever was in memory."""


class Sub(torch.Tensor):
    """A subclass without anything of its own."""


class Call:
    """A constructor's name and arguments; those that a call changes are made anew for each."""

    def __init__(self, draw: random.Random) -> None:
        self.name = draw.choice((*CONSTRUCTORS, "Tensor", "Sub"))
        self.args: tuple[Any, ...] = arguments(draw, self.name)
        self.options: dict[str, Any] = {}
        self.out: torch.dtype | None = None
        self.seed: int | None = None
        if self.name in ("Tensor", "Sub"):
            return
        self.options = options(draw, self.name)
        if self.name not in ("tensor",) and draw.random() < 0.15:
            self.out = draw.choice((*FLOATING, torch.int64))
            self.options.pop("requires_grad", None)
        if self.name == "randn" and draw.random() < 0.3:
            self.seed = draw.randrange(100)
        if draw.random() < 0.03:
            self.options[draw.choice(("dtyp", "shape", "fill"))] = 3

    def __repr__(self) -> str:
        more = {"out": self.out, "seed": self.seed}
        given = self.options | {key: value for key, value in more.items() if value is not None}
        return f"{self.name}{self.args!r} {given!r}"

    @property
    def kind(self) -> str:
        if self.out is not None:
            return "into an out"
        dtype = self.options.get("dtype")
        return "with a dtype" if dtype is not None else "without a dtype"

    def run(self) -> Any:
        torch.default_generator.manual_seed(7)
        given = dict(self.options)
        if self.out is not None:
            given["out"] = torch.empty_strided((0,), (1,), dtype=torch.float64).to(self.out)
        if self.seed is not None:
            given["generator"] = torch.Generator().manual_seed(self.seed)
        function: Callable[..., Any] = Sub if self.name == "Sub" else getattr(torch, self.name)
        try:
            result = function(*self.args, **given)
        except ERRORS as error:
            return type(error)
        if self.out is not None and result is not given["out"]:
            return "not its out"
        return result


def arguments(draw: random.Random, name: str) -> tuple[Any, ...]:
    sizes = [draw.randrange(5) for _ in range(draw.randrange(4))]
    if draw.random() < 0.04:
        return draw.choice(((), ("a",), (-1,), (None,), (3, "b"), ([1, [2]],), (object(),)))
    if name == "tensor":
        return (data(draw),)
    if name == "full":
        return (sizes, scalar(draw))
    if name == "arange":
        first, last = draw.randrange(6), draw.randrange(6, 300)
        step: Any = draw.choice((1, 2, 7, 0.5, 0.1, numpy.float32(0.25), numpy.int64(3)))
        huge = 2**53 + draw.randrange(9)
        return draw.choice(
            ((last,), (first, last), (first, last, step), (huge, huge + 5), (0.5, last), (numpy.int64(last),))
        )
    if name == "eye":
        # torch.eye(n, 0) ends the process in torch 2.12.
        return draw.choice(((draw.randrange(6),), (draw.randrange(6), draw.randrange(1, 6))))
    if name in ("Tensor", "Sub") and draw.random() < 0.4:
        return ([draw.uniform(-9, 9) for _ in range(draw.randrange(4))],)
    unpacked = draw.random() < 0.5
    if name in ("Tensor", "Sub"):
        return tuple(sizes)
    return tuple(sizes) if unpacked and sizes else (draw.choice((sizes, tuple(sizes), torch.Size(sizes))),)


def data(draw: random.Random) -> Any:
    kind = draw.randrange(8)
    if kind == 0:
        return scalar(draw)
    if kind == 1:
        return numpy.arange(draw.randrange(5), dtype=draw.choice(("f4", "f8", "i8", "f2")))
    if kind == 2:
        return torch.linspace(0, 1, draw.randrange(1, 5), dtype=draw.choice(FLOATING))
    if kind == 3:
        return [[scalar(draw) for _ in range(2)] for _ in range(draw.randrange(3))]
    if kind == 4:
        return range(draw.randrange(5))
    if kind == 5:
        return [2**53 + 1, 2**62 - 1]
    return [scalar(draw) for _ in range(draw.randrange(5))]


def scalar(draw: random.Random) -> Any:
    return draw.choice(
        (
            draw.uniform(-1e4, 1e4),
            draw.randrange(100),
            True,
            2**53 + 1,
            numpy.float32(0.1),
            numpy.float64(0.1),
            numpy.int64(2**53 + 1),
            float("nan"),
            1e39,
            1j,
        )
    )


def options(draw: random.Random, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if draw.random() < 0.75:
        found["dtype"] = draw.choice((*DTYPES, *FLOATING, *FLOATING, None))
    if draw.random() < 0.4:
        found["device"] = draw.choice((None, "cpu", torch.device("cpu"), "meta", "cpu:0", "nowhere"))
    if draw.random() < 0.3:
        found["requires_grad"] = draw.random() < 0.5
    if draw.random() < 0.1:
        found["pin_memory"] = False
    if name != "tensor" and draw.random() < 0.15:
        found["layout"] = draw.choice((torch.strided, torch.sparse_coo, None))
    if name == "empty" and draw.random() < 0.3:
        formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
        found["memory_format"] = draw.choice(formats)
    return found


def told(call: Call, result: Any) -> Any:
    """What must be the same of two results."""
    if not isinstance(result, torch.Tensor):
        return result
    found = [type(result), result.dtype, result.shape, result.device, result.layout]
    found += [result.requires_grad, result.is_leaf]
    if result.layout == torch.strided:
        found.append(result.stride())
    if call.name in UNKNOWN or call.name == "Sub" or result.is_meta or result.layout != torch.strided:
        return found
    values = result.detach()
    return [*found, values.view(torch.uint8).tolist() if values.numel() and values.dim() else values.tolist()]


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


def run(trial: Trial) -> None:
    torch.arange(3.0, device="meta").sum()  # torch imports its meta kernels now, not under zero.Init
    batches = trial.count(CALLS // BATCH)
    for number, low in zip(range(batches), itertools.cycle(LOW), strict=False):
        calls = [Call(trial.random) for _ in range(BATCH)]
        guard = ConstructorGuard()
        with zero_init.zero_init(low):
            stock = [told(call, call.run()) for call in calls]
            with zero_init.plain_torch():
                plain = [told(call, call.run()) for call in calls]
            with guard:
                got = [told(call, call.run()) for call in calls]
        for call, ours, theirs, pure in zip(calls, got, stock, plain, strict=True):
            asked = call.out if call.out in FLOATING else call.options.get("dtype")
            wanted = theirs if asked in (None, low) else pure
            trial.measured["calls whose result zero.Init alone changes"] = trial.measured.get(
                "calls whose result zero.Init alone changes", 0
            ) + (not same(theirs, wanted))
            with trial.of(call.kind, f"batch {number}, {low}, {call!r}"):
                assert same(ours, wanted), f"{ours} instead of {wanted}"
