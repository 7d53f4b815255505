"""Damage every position table of a model by hand, in six ways; the tables are told without the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from laboratory.zoo.tables import is_computed, position_tables
from torch import nn

import safe_rope

Damage = Callable[[torch.Tensor], torch.Tensor]
RELATIVE = 2.0**-20
"""What the audit tolerates, of each value or of a sine's phase."""


def cast_and_back(table: torch.Tensor) -> torch.Tensor:
    if table.is_complex():
        return torch.view_as_complex(cast_and_back(torch.view_as_real(table)))
    return table.to(torch.bfloat16).to(table.dtype)


def one_element(table: torch.Tensor) -> torch.Tensor:
    table.view(-1)[table.numel() // 3] += 1e-3
    return table


def rows_swapped(table: torch.Tensor) -> torch.Tensor:
    dim = next((d for d in (-2, -1, 0) if table.dim() >= -d and table.shape[d] > 2), -1)
    rows = table.movedim(dim, 0)
    rows[[-2, -1]] = rows[[-1, -2]]
    return table


def repeated(table: torch.Tensor) -> torch.Tensor:
    table[..., 1] = table[..., 0]
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


def survivors(build: Callable[[], nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield for each cell what the audit of a model that ``build`` makes says, and what of it is wrong."""
    tables = _tables(build)
    for protected in (False, True):
        how = "protected" if protected else "stock"
        model = _built(build, protected)
        untouched = safe_rope.audit(model).verdict
        yield f"undamaged: {untouched}", f"{how}, undamaged: damaged" if untouched == "damaged" else ""
        for path, name in tables:
            for damage_name, damage in DAMAGES.items():
                table = _held(model, path, name)
                if table is None:
                    break  # a patch has made something else of it
                kept = table.detach().clone()
                damaged = damage(kept.clone())
                if not _differs(damaged, kept):
                    continue
                with torch.no_grad():
                    table.copy_(damaged)
                verdict = safe_rope.audit(model).verdict
                now = _held(model, path, name)
                put_back = now is not None and not _differs(now.detach(), kept)
                where = f"{how}, {path}.{name}, {damage_name}: not found"
                yield "put back" if put_back else verdict, where if verdict == "ok" and not put_back else ""
                with torch.no_grad():
                    table.copy_(kept)
            if safe_rope.audit(model).verdict != untouched:  # what is protected has learned from it
                model = _built(build, protected)


def _built(build: Callable[[], nn.Module], protected: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    if protected:
        safe_rope.protect(model)
    return model


def _tables(build: Callable[[], nn.Module]) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(1)
    again = build()
    found = [path.rpartition(".") for path in position_tables(model, again)]
    others = dict(again.named_parameters())
    frozen = [
        name.rpartition(".")
        for name, value in model.named_parameters()
        if not value.requires_grad and is_computed(value, others[name])
    ]
    return [(path, name) for path, _, name in (*found, *frozen)]


def _held(model: nn.Module, path: str, name: str) -> Any:
    module = model.get_submodule(path)
    name, _, key = name.partition("[")
    value: Any = vars(module).get(name, module._buffers.get(name, module._parameters.get(name)))
    if key:
        value = value[int(key[:-1]) if isinstance(value, list | tuple) else key[:-1]]
    return value if isinstance(value, torch.Tensor) else None


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tables differ by more than an audit tolerates."""
    off = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(nan=torch.inf)
    return bool((off > 2 * RELATIVE * other.abs().double().clamp(min=1e-30)).any())
