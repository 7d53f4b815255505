"""The rotation of q and k, against transformers and whatever else is installed.

Every round runs each implementation once, in turn, so that whatever else the machine does falls on all of
them; times are the best round of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from laboratory.bench.others import others
from laboratory.bench.timing import Row, best_times
from safe_rope.rotation import apply_rotary
from safe_rope.tables import RotaryTable

Run = Callable[[], Any]


class Shape(NamedTuple):
    """q and k [batch, heads, length, head_dim]; in a model they are transposed views."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    transposed: bool = False


SHAPES = (
    Shape("1x32x2048x128", 1, 32, 2048, 128),
    Shape("1x32x2048x128 as in a model", 1, 32, 2048, 128, transposed=True),
    Shape("4x8x8192x128", 4, 8, 8192, 128),
    Shape("1x32x1x128 (decoding)", 1, 32, 1, 128),
)
TARGETS = {
    ("eager", "forward"): 1.0,
    ("eager", "forward + backward"): 0.75,
    ("torch.compile", "forward"): 0.45,
    ("torch.compile", "forward + backward"): 0.45,
}
COPY_TARGET = 1.15
"""Of the Triton kernel, against a copy of the same bytes on the device."""


class Inputs:
    """q, k, their gradients, and the tables as each implementation wants them."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.q, self.k, self.grad_q, self.grad_k = (self._states() for _ in range(4))
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        positions = torch.arange(shape.length, device=device)[None]
        self.cos, self.sin = RotaryTable(1.0 / 500000.0**exponents).lookup(positions)
        self.wide = torch.cat((self.cos, self.cos), -1), torch.cat((self.sin, self.sin), -1)
        self.low = tuple(table.to(torch.bfloat16) for table in self.wide)

    def _states(self) -> Tensor:
        batch, heads, length, head_dim = self.shape[1:5]
        if self.shape.transposed:
            x = torch.randn(batch, length, heads, head_dim, device=self.device).transpose(1, 2)
        else:
            x = torch.randn(batch, heads, length, head_dim, device=self.device)
        return x.to(torch.bfloat16)


def implementations(inputs: Inputs) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Return every implementation as a function of q and k."""
    compiled, stock_compiled = torch.compile(apply_rotary), torch.compile(apply_rotary_pos_emb)
    tables = inputs.cos, inputs.sin

    def raised(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        rotated = apply_rotary_pos_emb(q.float(), k.float(), *inputs.wide)
        return tuple(x.to(q.dtype) for x in rotated)

    return {
        "transformers": lambda q, k: apply_rotary_pos_emb(q, k, *inputs.low),
        "eager": lambda q, k: apply_rotary(q, k, *tables),
        "torch.compile": lambda q, k: compiled(q, k, *tables),
        "transformers, compiled": lambda q, k: stock_compiled(q, k, *inputs.low),  # type: ignore[no-untyped-call]
        "transformers on q and k in FP32": raised,
        **others(inputs),
    }


def application(shape: Shape, device: str) -> list[Row]:
    """Measure forward, and forward with backward."""
    inputs = Inputs(shape, device)
    functions = implementations(inputs)
    q, k = inputs.q.clone().requires_grad_(), inputs.k.clone().requires_grad_()

    def forward(function: Callable[[Tensor, Tensor], Any]) -> Run:
        def run() -> Any:
            with torch.no_grad():
                return function(inputs.q, inputs.k)

        return run

    def both(function: Callable[[Tensor, Tensor], Any]) -> Run:
        def run() -> Any:
            outputs = function(q, k)
            return torch.autograd.grad(outputs, (q, k), (inputs.grad_q, inputs.grad_k))

        return run

    def in_place(q: Tensor, k: Tensor) -> Any:
        return apply_rotary(q, k, inputs.cos, inputs.sin, inplace=True)

    def copy() -> Any:
        return inputs.q.clone(), inputs.k.clone()

    rows = []
    for what, make in (("forward", forward), ("forward + backward", both)):
        runs = {name: make(function) for name, function in functions.items()}
        if what == "forward":
            runs["in place"] = forward(in_place)
            runs["copy"] = copy
        else:
            runs["copy"] = lambda: (copy(), copy())
        times = best_times(list(runs.values()), device, seconds=0, cold=True)
        by_name = dict(zip(runs, times, strict=True))
        rows += _rows(f"{shape.name}, {what}", what, by_name, shape, device)
    return rows


def _rows(label: str, what: str, times: dict[str, float], shape: Shape, device: str) -> list[Row]:
    base = times["transformers"]
    asked = TARGETS if shape.length > 1 and not device.startswith("cuda") else {}
    rows = [
        Row(f"{name}, {label}", "transformers", seconds, base, asked.get((name, what)))
        for name, seconds in times.items()
        if name != "transformers"
    ]
    if device.startswith("cuda"):
        target = COPY_TARGET if shape.length > 1 else None
        rows.append(Row(f"Triton, {label}", "a device copy", times["eager"], times["copy"], target))
        if "Liger-Kernel" in times:
            rows.append(Row(f"Triton, {label}", "Liger-Kernel", times["eager"], times["Liger-Kernel"], 1.0))
    else:
        rows.append(Row(f"torch.compile, {label}", "a copy", times["torch.compile"], times["copy"]))
    return rows


def measure(device: str, ending: str = "") -> list[Row]:
    """Return a row for each implementation, direction and shape whose name ends so."""
    rows = []
    for shape in (s for s in SHAPES if s.name.endswith(ending)):
        rows += application(shape, device)
        torch._dynamo.reset()
    return rows
