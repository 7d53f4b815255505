"""Record how a running model applies its positions, and measure that against the same functions in float64.

What is recorded is every call of a function or method that rotates; a call's tables come from the clean FP32
model, its q and k from the model that is measured, and both go through the stock function in float64. What is
more than half a unit in the last place of the result's dtype away from that was not rounded once.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from laboratory.zoo.bodies import ROTATES

_TABLE = re.compile(
    r"^self$|^(cos|sin)|freqs_ci|^freqs$|^relative_position_embeddings$|ids$|^pos$|_dim$|mrope_section"
)


class Call(NamedTuple):
    """One application: the stock function, its arguments by name, and what came out."""

    stock: Callable[..., Any]
    arguments: dict[str, Any]
    results: list[torch.Tensor]


class Recorder:
    """While open, notes every outermost application in a model, and which functions take part."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.functions: set[Callable[..., Any]] = set()
        self._model = model
        self._inside = False
        self._covered: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Recorder:
        for owner, name, function in list(_applications(self._model)):
            self._covered.append((owner, name, vars(owner)[name]))
            setattr(owner, name, self._noting(function))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, before in self._covered:
            setattr(owner, name, before)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        stock = inspect.unwrap(function)

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.functions.add(stock)
            if self._inside:
                return function(*args, **kwargs)
            bound = inspect.signature(stock).bind(*args, **kwargs).arguments
            arguments = {name: _copy(value) for name, value in bound.items()}
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            self.calls.append(Call(stock, arguments, _tensors(result)))
            return result

        return noting


def _applications(model: nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    classes = {cls for cls in classes if cls.__module__.startswith("transformers.models.")}
    for name in sorted({cls.__module__ for cls in classes}):
        space = sys.modules[name]
        yield from (
            (space, n, f) for n, f in vars(space).items() if inspect.isfunction(f) and ROTATES.search(n)
        )
    for cls in classes:
        for name, method in vars(cls).items():
            rotates = ROTATES.search(name) or (name == "forward" and _takes_q_and_k(method))
            if inspect.isfunction(method) and rotates:
                yield cls, name, method


def _takes_q_and_k(method: Callable[..., Any]) -> bool:
    return list(inspect.signature(method).parameters) == ["self", "q", "k"]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _tensors(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, tuple | list) else (result,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def errors(clean: list[Call], calls: list[Call]) -> dict[Callable[..., Any], float]:
    """The largest error of each function's results, in units of the last place of their dtype.

    Args:
        clean: the calls of the clean FP32 model, for the tables.
        calls: the same calls of another model.
    """
    assert len(clean) == len(calls)
    found: dict[Callable[..., Any], float] = {}
    for true, call in zip(clean, calls, strict=True):
        assert _name(call.stock) == _name(true.stock)
        states = {name: v for name, v in call.arguments.items() if not _TABLE.search(name)}
        tables = {name: v for name, v in true.arguments.items() if _TABLE.search(name)}
        expected = _tensors(call.stock(**{name: _widened(v) for name, v in (states | tables).items()}))
        dtypes = {value.dtype for value in states.values() if isinstance(value, torch.Tensor)}
        assert {result.dtype for result in call.results} == dtypes, "the dtypes are the stock ones"
        worst = max(_error(*pair) for pair in zip(call.results, expected, strict=True))
        found[call.stock] = max(worst, found.get(call.stock, 0.0))
    return found


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = getattr(value, "table", value)
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    unit = torch.finfo(result.dtype).eps * 2.0 ** expected.abs().clamp_min(1e-30).log2().floor()
    # Where two products cancel, what FP32 itself rounds is more than the result's last place.
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, float(expected.abs().max()))
    return float((((result.double() - expected).abs() - slack).clamp_min(0) / unit).max())
