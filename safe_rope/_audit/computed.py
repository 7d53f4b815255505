"""Whether a forward computes positions in low precision: what a copy answers, beside the same copy in FP32.

Tables say nothing of that: a module may hold none, or some that 16 bits hold without a loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.forward import isolated
from safe_rope._base import bytecode, originals
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import in_real_numbers, tensors_in
from safe_rope._recognition.ask import UnansweredError, undisturbed
from safe_rope._recognition.holdings import attributes, entries, set_table
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.untouched import Untouched
from safe_rope.rotation import plain

_LONG, _SHORT, _SIDE, _WIDTH = 2048, 48, 41, 64
_LENGTHS = ("seq_len", "seqlen", "length", "n", "max_len")
_COUNTS = ("pos", "ids", "time", "index")
_ROUNDINGS = 1.5
"""In units of a 16-bit dtype at 1: what rounding sines, and rotating in that dtype, may add up to."""


def dtype_of(module: nn.Module, model_dtype: torch.dtype) -> torch.dtype | None:
    """The low dtype that a forward may compute in: the model's, or that of what its module holds; or None."""
    held = (value.dtype for _, value in entries(module) if isinstance(value, Tensor))
    return next((dtype for dtype in (model_dtype, *held) if dtype in LOW), None)


def may_be_asked(module: nn.Module) -> bool:
    """Whether a module only makes, or only applies, what it takes sines and cosines of."""
    stock: Any = stock_class(module)
    has_weights = next(module.parameters(), None) is not None
    return bytecode.facts(stock).turns and not (has_weights or bytecode.conduct(stock).attends)


def error_of(module: nn.Module, dtype: torch.dtype) -> float | None:
    """How far the answers of a module are off, relative to the largest; 0 where roundings explain it.

    None where it answers by chance.

    Raises:
        UnansweredError: nobody knows how to ask it.
    """
    problem = UnansweredError("its forward takes arguments that nobody knows")
    for arguments in _arguments(module, dtype):
        try:
            true = _answer(_in_fp32(isolated(module)), arguments(torch.float32), 0)
            low, again = (_answer(isolated(module), arguments(dtype), seed) for seed in (0, 1))
        except UnansweredError as error:
            problem = error
            continue
        if [one.shape for one in low] != [one.shape for one in true]:
            continue
        if not all(map(torch.equal, low, again)):
            return None
        off = [
            float((a - b).abs().max()) / (float(b.abs().max()) or 1.0) for a, b in zip(low, true, strict=True)
        ]
        worst = max(off, default=0.0)
        return worst if not worst <= _ROUNDINGS * torch.finfo(dtype).eps else 0.0
    raise problem


def _answer(module: nn.Module, arguments: dict[str, Any], seed: int) -> list[Tensor]:
    try:
        with undisturbed(), (untouched := Untouched(stock_class(module), attributes(module), anew=True)):
            torch.manual_seed(seed)
            answer = untouched.run(functools.partial(module.forward, **arguments))
            found = [
                one.detach().double() for one in map(_real, tensors_in(answer)) if one.is_floating_point()
            ]
    except OutOfReachError as error:
        raise UnansweredError(str(error)) from error
    except Exception as error:
        raise UnansweredError(f"forward raised {type(error).__name__}: {error}") from error
    if not any(one.numel() for one in found) or any(one.is_meta for one in found):
        raise UnansweredError("forward returned no numbers")
    return found


def _real(tensor: Tensor) -> Tensor:
    tensor = plain(tensor)
    return in_real_numbers(tensor) if tensor.is_complex() else tensor


def _in_fp32(module: nn.Module) -> nn.Module:
    for name, value in list(entries(module)):
        if isinstance(value, Tensor) and value.dtype in LOW:
            set_table(module, name, value.float())
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.dtype) and value in LOW:
            vars(module)[name] = torch.float32
    return module


def _arguments(module: nn.Module, dtype: torch.dtype) -> Iterator[Any]:
    """Yield the ways to call forward, each a function of the dtype to compute in; the likeliest first."""
    try:
        parameters = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):
        return
    names = [one.name for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    tables = [value for _, value in entries(module) if isinstance(value, Tensor)]
    device = next((table.device for table in tables if not table.is_meta), torch.device("cpu"))
    last = [table.shape[-1] for table in tables if table.dim()]
    for width in dict.fromkeys((_WIDTH, *(2 * n for n in last if n > 1), *(n for n in last if n > 1))):
        for count in (_LONG, _SHORT):
            shapes = ((1, count, width), (1, width, _SIDE, _SIDE), (1, 2, count, width), (1, count), (count,))
            for shape in shapes:
                yield functools.partial(_values, names, shape, count, device)


def _values(
    names: list[str], shape: tuple[int, ...], count: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    signs = originals.arange(int(torch.Size(shape).numel()), device=device) * 7 % 3 - 1
    made: dict[str, Any] = {}
    for name in names:
        if "dtype" in name:
            made[name] = dtype
        elif "device" in name:
            made[name] = device
        elif name in ("shape", "size"):
            made[name] = torch.Size(shape)
        elif name in _LENGTHS:
            made[name] = count
        elif "mask" in name:
            made[name] = originals.arange(_SIDE * _SIDE, device=device).view(1, _SIDE, _SIDE) >= 0
        elif name == "t" or any(part in name for part in _COUNTS):
            made[name] = originals.arange(count, device=device).view(shape if len(shape) < 2 else (1, count))
        else:
            made[name] = signs.view(shape).to(dtype)
    return made
