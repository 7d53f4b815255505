"""What a slice is given: values as its annotations say, or of any kind that a model's code meets."""

from __future__ import annotations

import ast
import math
import random
import re
from typing import Any, ClassVar

import torch


def shaped(draw: random.Random) -> torch.Tensor:
    """Return a tensor of any rank and kind."""
    shape = [draw.choice((1, 2, 6)) for _ in range(draw.choice((1, 2, 3, 4, 5)))]
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
    return torch.arange(math.prod(shape)).view(shape).to(draw.choice(kinds))


class Anything:
    """An object whose attributes, items and results are generated; what it is called with is recorded."""

    holders: ClassVar[set[str]] = set()  # names of attributes that are such objects themselves

    def __init__(
        self, draw: random.Random, record: list[Any], known: dict[str, ast.expr | None] | None = None
    ) -> None:
        self.__dict__.update(_draw=draw, _record=record, _known=known or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        annotation = self._known.get(name)
        whole = annotation is not None and "int" in re.findall(r"\w+", ast.unparse(annotation))
        if name in self.holders and not whole and self._draw.random() < 0.5:
            value: Any = Anything(self._draw, self._record)
        elif name in self._known:
            value = annotated(name, self._known[name], self._draw, self._record)
        else:
            value = drawn(self._draw, self._record)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self._record.append((name, value))

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, f"item_{key}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._record.append((arguments, sorted(named.items())))
        return drawn(self._draw, self._record)


def drawn(draw: random.Random, record: list[Any]) -> Any:
    """Return a value of a random kind."""
    kinds = [
        lambda: draw.choice((1, 2, 6, 64, 300)),
        lambda: draw.choice((1, 2, 6, 64, 300)),
        lambda: draw.choice((0.5, 10.5, 1e4)),
        lambda: float(draw.choice((2, 12, 320))),
        lambda: complex(1, draw.choice((0.5, 2))),
        lambda: torch.linspace(-2, 3, 6).view(2, 3).to(draw.choice((torch.float32, torch.float64))),
        lambda: torch.rand(6, generator=torch.Generator().manual_seed(1)).to(
            draw.choice((torch.bfloat16, torch.float16, torch.float64, torch.complex64))
        ),
        lambda: torch.tensor(draw.choice((6.0, 7.5)), dtype=draw.choice((torch.float32, torch.float64))),
        lambda: torch.tensor([[1, 2, 3], [4, 5, 6]]),
        lambda: draw.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64)),
        lambda: (draw.choice((1, 2, 6, 14)), draw.choice((1, 3, 6))),
        lambda: torch.device("cpu"),
        lambda: None,
        lambda: Anything(draw, record),
    ]
    made: Any = draw.choice(kinds)()  # type: ignore[no-untyped-call]
    return made


def annotated(name: str, annotation: ast.expr | None, draw: random.Random, record: list[Any]) -> Any:
    """Return a value of the annotated type, or any; what is called a device or dtype is mostly one."""
    if draw.random() < 0.9 and name.endswith("device"):
        return draw.choice((torch.device("cpu"), None))
    if draw.random() < 0.9 and name.endswith("dtype"):
        return draw.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64, None))
    if draw.random() < 0.9 and name in ("self", "config", "cfg", "args"):
        return Anything(draw, record)
    text = "" if annotation is None else ast.unparse(annotation)
    if text == "shaped" and draw.random() < 0.7:
        return shaped(draw)
    if text == "never":
        raise NotImplementedError(name)
    words = set(text.replace("Optional[", "").replace("]", "").replace(" ", "").split("|")) - {"None"}
    if words == {"int"}:
        return draw.choice((1, 2, 6, 64, 300, 4097))
    parts = set(re.findall(r"\w+", text)) - {"Optional", "None"}
    if "int" in parts and parts <= {"int", "list", "tuple", "List", "Tuple", "Sequence"}:
        size = (
            text.count("int")
            if "..." not in text and text.lower().startswith("tuple")
            else draw.choice((2, 3))
        )
        return tuple(draw.choice((1, 2, 6, 14)) for _ in range(size))
    if words == {"float"}:
        return draw.choice((0.5, 1e4, 2.0, 2, 10000))  # an int is a float to a type checker
    if words == {"bool"}:
        return draw.random() < 0.5
    if words and words <= {"Tensor", "torch.Tensor"}:
        return shaped(draw)
    return drawn(draw, record)
