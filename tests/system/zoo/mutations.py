"""Damage every position table of a model by hand, in six ways; the tables are told without the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from laboratory.zoo.tables import is_computed, position_tables
from torch import nn

import safe_rope

Build = Callable[[int], nn.Module]
"""Makes a model, with a seed for whatever is random in it."""
Answers = Callable[[nn.Module], list[torch.Tensor]]
Damage = Callable[[torch.Tensor], torch.Tensor]
RELATIVE = 2.0**-20
"""What the audit tolerates, of each value or of a sine's phase."""


class Cell(NamedTuple):
    """One damaged table of one model, or the model as it is: what the audit says, and whether that is right.

    ``said`` is a verdict, "put back" or "not read"; ``wrong`` is empty where that is right.
    """

    where: str
    said: str
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.said} {self.wrong}".strip()


def cast_and_back(table: torch.Tensor) -> torch.Tensor:
    if table.is_complex():
        return torch.view_as_complex(cast_and_back(torch.view_as_real(table)))
    return table.to(torch.bfloat16).to(table.dtype)


def one_element(table: torch.Tensor) -> torch.Tensor:
    table.view(-1)[table.numel() // 3] += 1e-3
    return table


def rows_swapped(table: torch.Tensor) -> torch.Tensor:
    dims = (d for d in (-2, -1, 0) if table.dim() >= -d and table.shape[d] > 2)
    dim = next(dims, max(range(table.dim()), key=lambda d: table.shape[d]))
    rows = table.movedim(dim, 0)
    rows[[-2, -1]] = rows[[-1, -2]]
    return table


def repeated(table: torch.Tensor) -> torch.Tensor:
    columns = table.movedim(-1 if table.shape[-1] > 1 else 0, 0)
    columns[1] = columns[0]
    return table


def no_number(table: torch.Tensor) -> torch.Tensor:
    table.view(-1)[table.numel() // 2] = torch.nan
    return table


def scaled(table: torch.Tensor) -> torch.Tensor:
    return table * (1 + 1e-4)


DAMAGES: dict[str, Damage] = {
    "cast to BF16 and back": cast_and_back,
    "one element off by 1e-3": one_element,
    "two rows swapped": rows_swapped,
    "a frequency repeated": repeated,
    "not a number": no_number,
    "scaled by 1 + 1e-4": scaled,
}


def cells(build: Build, answers: Answers) -> Iterator[Cell]:
    """Yield what the audit says of each damage to each table of a stock and of a protected model.

    Args:
        build: makes the model.
        answers: what the model computes; a table may be called right where that does not depend on it.

    """
    tables = _tables(build)
    for protected in (False, True):
        how = "protected" if protected else "stock"
        model = _built(build, protected)
        untouched = safe_rope.audit(model).verdict
        yield Cell(f"{how}, undamaged", untouched, "is right" if untouched == "damaged" else "")
        for path, name in tables:
            for damage_name, damage in DAMAGES.items():
                table = _held(model, path, name)
                if table is None:
                    break  # a patch has made something else of it
                kept = table.detach().clone()
                damaged = damage(kept.clone())
                if not _differs(damaged, kept):
                    continue
                _write(table, damaged)
                said: str = safe_rope.audit(model).verdict
                now = _held(model, path, name)
                if now is not None and not _differs(now.detach(), kept):
                    said = "put back"
                elif said == "ok" and _same_answers(model, table, damaged, kept, answers):
                    said = "not read"
                where = f"{how}, {path}.{name}, {damage_name}"
                yield Cell(where, said, "is damaged" if said == "ok" else "")
                _write(table, kept)
            if safe_rope.audit(model).verdict != untouched:  # what is protected has learned from it
                model = _built(build, protected)


@torch.no_grad()
def _same_answers(
    model: nn.Module, table: torch.Tensor, damaged: torch.Tensor, kept: torch.Tensor, answers: Answers
) -> bool:
    _write(table, damaged)
    with_damage = answers(model)
    _write(table, kept)
    return all(map(torch.equal, with_damage, answers(model)))


@torch.no_grad()
def _write(table: torch.Tensor, values: torch.Tensor) -> None:
    table.copy_(values)


def _built(build: Build, protected: bool) -> nn.Module:
    model = build(0)
    if protected:
        safe_rope.protect(model)
    return model


def _tables(build: Build) -> list[tuple[str, str]]:
    model, again = build(0), build(1)
    found = [_apart(path) for path in position_tables(model, again)]
    others = dict(again.named_parameters())
    frozen = [
        _apart(name)
        for name, value in model.named_parameters()
        if not value.requires_grad and is_computed(value, others[name])
    ]
    return [*found, *frozen]


def _apart(path: str) -> tuple[str, str]:
    """Return the path of a module and what its table is called there; a key may have a dot."""
    whole, bracket, key = path.partition("[")
    owner, _, name = whole.rpartition(".")
    return owner, name + bracket + key


def _held(model: nn.Module, path: str, name: str) -> Any:
    module = model.get_submodule(path)
    name, _, key = name.partition("[")
    value: Any = vars(module).get(name, module._buffers.get(name, module._parameters.get(name)))
    if key and dataclasses.is_dataclass(value):
        value = getattr(value, key[:-1])
    elif key:
        entries = enumerate(value) if isinstance(value, list | tuple) else value.items()
        value = {str(one): held for one, held in entries}[key[:-1]]
    return value if isinstance(value, torch.Tensor) else None


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tables differ by more than an audit tolerates."""
    off = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(nan=torch.inf)
    return bool((off > 2 * RELATIVE * other.abs().double().clamp(min=1e-30)).any())
