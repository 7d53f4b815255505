"""Compare the cos and sin tables of two sides: in ulps, in radians, and from which position on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safe_rope._audit.command.dump import Tables, environment, gather, load
from safe_rope._audit.command.job import Job
from safe_rope._audit.command.skeleton import Skeleton
from safe_rope._audit.reference import TOLERANCE
from safe_rope._protection import protect
from safe_rope.errors import ConfigError, UnsupportedModelError

_ROWS = 8192
_SHOWN = 24


def compare_sides(request: dict[str, Any]) -> dict[str, Any]:
    """Return the differences between ``request["sides"]`` as plain data.

    Args:
        request: "sides" (two of `read_side`), "positions" and "longest" (as in `Job`), "tables" ("stock" or
            "exact"), "tolerance" (radians, or None) and "ulp" (or None).

    Raises:
        ConfigError: the sides cannot be compared: other modules, other dimensions, no position in common.
    """
    sides = request["sides"]
    loaded = [load(Path(side["dump"])) if "dump" in side else None for side in sides]
    held = [_positions_of(content[0]) for content in loaded if content is not None]
    groups, environments = [], []
    for side, content in zip(sides, loaded, strict=True):
        made = content or ({"": _tables(side, request, held)}, environment())
        groups.append(made[0])
        environments.append(made[1])
    modules = []
    for group, first, second in _matched(groups, sides):
        for name, one, other in _paired(first, second, sides):
            title = " ".join(filter(None, (group, name)))
            modules.append({"name": title, **_difference(one, other, request, title)})
    return {"modules": modules, "environments": environments}


def _positions_of(groups: dict[str, Tables]) -> list[int]:
    tables = next(iter(groups.values()), {})
    table = next(iter(tables.values()), None)
    return [] if table is None else [int(position) for position in table["positions"]]


def _tables(side: dict[str, Any], request: dict[str, Any], held: list[list[int]]) -> Tables:
    skeleton = Skeleton(side["model"])
    positions, longest = tuple(request["positions"]), request["longest"]
    job = Job(side["name"], {}, None, "float32", positions=positions, longest=longest)
    asked = held[0] if held else job.dumped(skeleton.announced)
    try:
        device = torch.device(side["device"])
        torch.empty(1, device=device)
    except Exception as error:  # each backend has its own way to be missing
        said = str(error).splitlines()[0]
        raise ConfigError(f"the device {side['device']} cannot be used here: {said}") from error
    model = skeleton.build()
    if request["tables"] == "exact":
        protect(model, strict=True)
    model = model.to(getattr(torch, side["dtype"])).to(device)
    tables = gather(model, asked)
    if not tables:
        raise UnsupportedModelError(f"{side['name']} has no rotary module whose tables can be read")
    return tables


def _matched(
    groups: list[dict[str, Tables]], sides: list[dict[str, Any]]
) -> list[tuple[str, Tables, Tables]]:
    """Groups of the same name; where a side has one only, that with each of the other side."""
    first, second = groups
    if len(first) == 1 or len(second) == 1:
        pairs = [((a, b), one, other) for a, one in first.items() for b, other in second.items()]
        return [(" / ".join(dict.fromkeys(filter(None, names))), one, other) for names, one, other in pairs]
    common = [name for name in first if name in second]
    if not common:
        raise ConfigError(
            f"{sides[0]['name']} and {sides[1]['name']} hold tables of different load paths: "
            f"{', '.join(first)}; {', '.join(second)}"
        )
    return [(name, first[name], second[name]) for name in common]


def _paired(
    first: Tables, second: Tables, sides: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    if first.keys() == second.keys():
        return [(name, first[name], second[name]) for name in first]
    if len(first) != len(second):
        raise ConfigError(
            f"{sides[0]['name']} has {len(first)} rotary embedding(s), {sides[1]['name']} has {len(second)}: "
            f"{', '.join(first)}; {', '.join(second)}; compare models of one layout"
        )
    return [(a if a == b else f"{a} / {b}", first[a], second[b]) for a, b in zip(first, second, strict=True)]


def _difference(
    one: dict[str, Tensor], other: dict[str, Tensor], request: dict[str, Any], title: str
) -> dict[str, Any]:
    pairs = one["cos"].shape[-1]
    if other["cos"].shape[-1] != pairs:
        raise ConfigError(
            f"{title}: rotary_dim {2 * pairs} on one side, {2 * other['cos'].shape[-1]} on the other; "
            "compare embeddings of one dimension"
        )
    common, in_one, in_other = _common(one["positions"], other["positions"])
    if not len(common):
        raise ConfigError(f"{title}: the two sides have no position in common")
    radians, ulps = [], []
    for start in range(0, len(common), _ROWS):
        a, b = in_one[start : start + _ROWS], in_other[start : start + _ROWS]
        rows = (one["cos"][a], one["sin"][a], other["cos"][b], other["sin"][b])
        radians.append(_angle(*(table.double() for table in rows)))
        ulps.append(torch.maximum(_ulps(rows[0], rows[2]), _ulps(rows[1], rows[3])))
    off, steps = torch.cat(radians), torch.cat(ulps)
    allowed = TOLERANCE * common.double().clamp(min=1.0)
    if request["tolerance"] is not None:
        allowed = torch.full_like(allowed, request["tolerance"])
    beyond = off > allowed
    if request["ulp"] is not None:
        beyond = steps > request["ulp"] if request["tolerance"] is None else beyond | (steps > request["ulp"])
    worst = int(off.argmax())
    shown = torch.linspace(0, len(common) - 1, min(_SHOWN, len(common))).long()
    return {
        "rotary_dim": 2 * pairs,
        "positions": len(common),
        "max_ulp": float(steps.max()),
        "max_radians": float(off.max()),
        "at": int(common[worst]),
        "first_difference": _first(common, steps > 0),
        "first_beyond": _first(common, beyond),
        "rows": [
            {"position": int(common[i]), "radians": float(off[i]), "ulp": float(steps[i])} for i in shown
        ],
    }


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = {int(position): index for index, position in enumerate(other)}
    found = [(int(p), i, places[int(p)]) for i, p in enumerate(one) if int(p) in places]
    columns = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).unbind(dim=1)
    return columns[0], columns[1], columns[2]


def _angle(cos: Tensor, sin: Tensor, other_cos: Tensor, other_sin: Tensor) -> Tensor:
    """The largest angle between the pairs of each row, radians; what is no number counts as pi."""
    turned = torch.atan2(other_sin * cos - other_cos * sin, other_cos * cos + other_sin * sin).abs()
    return turned.nan_to_num(nan=torch.pi).amax(dim=-1)


def _ulps(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference of each row, in units in the last place of the larger FP32 value."""
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=torch.finfo(torch.float32).tiny)
    exponent = torch.frexp(larger.double()).exponent.double() - 24
    return ((one.double() - other.double()).abs() / 2.0**exponent).nan_to_num(nan=2.0**31).amax(dim=-1)


def _first(positions: Tensor, mask: Tensor) -> int | None:
    found = positions[mask]
    return int(found.min()) if found.numel() else None
