"""Compare the cos and sin tables of two sides: in ulps, in radians, and from which position on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safe_rope._audit.command.dump import environment, load
from safe_rope._audit.command.job import Job
from safe_rope._audit.command.pairs import paired
from safe_rope._audit.command.skeleton import Skeleton
from safe_rope._audit.layers import add_layers
from safe_rope._audit.model import audit
from safe_rope._audit.reference import TOLERANCE, angle_between, first_of, sizes
from safe_rope._audit.report import Tables
from safe_rope._protection import protect
from safe_rope.errors import ConfigError, UnsupportedModelError

_SHOWN = 24


class _NothingInCommonError(ConfigError):
    """Two tables have no position in common, or none of those asked for."""


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
    contents = [
        content or ({"": _tables(side, request, held)}, environment(_name_of(side["model"])))
        for side, content in zip(sides, loaded, strict=True)
    ]
    (first, one), (second, other) = contents
    modules, left = [], _left_over(first, second, sides)
    for group, tables, others in _matched(first, second, sides):
        pairs, untold = paired(tables, others, (side["name"] for side in sides))
        left += untold
        for name, a, b in pairs:
            title = " ".join(filter(None, (group, name)))
            try:
                modules.append({"name": title, **_difference(a, b, request, title)})
            except _NothingInCommonError as error:
                left.append(str(error))
    if left and not modules:
        raise ConfigError("; ".join(left))
    return {"modules": modules, "not_compared": [*dict.fromkeys(left)], "environments": [one, other]}


def _name_of(model: dict[str, Any]) -> str:
    return str(model.get("_name_or_path") or model["model_type"])


def _left_over(first: dict[str, Tables], second: dict[str, Tables], sides: list[dict[str, Any]]) -> list[str]:
    """What only one of two sides with several groups has."""
    if len(first) == 1 or len(second) == 1:
        return []
    return [
        f"{name} is in {side['name']} only"
        for mine, others, side in ((first, second, sides[0]), (second, first, sides[1]))
        for name in mine
        if name not in others
    ]


def _positions_of(groups: dict[str, Tables]) -> list[int]:
    tables = next(iter(groups.values()), {})
    table = next(iter(tables.values()), None)
    return [] if table is None else [int(position) for position in table["positions"]]


def _tables(side: dict[str, Any], request: dict[str, Any], held: list[list[int]]) -> Tables:
    skeleton = Skeleton(side["model"])
    job = Job(side["name"], {}, None, "float32", request["positions"], request["longest"])
    asked = (held[0] if held else []) or job.dumped(skeleton.announced)
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
    tables = audit(model, asked).tables
    if not tables:
        raise UnsupportedModelError(f"{side['name']} has no module whose cos and sin can be read")
    add_layers(tables, skeleton.whole)
    return tables


def _matched(
    first: dict[str, Tables], second: dict[str, Tables], sides: list[dict[str, Any]]
) -> list[tuple[str, Tables, Tables]]:
    """Groups of the same name; where a side has one only, that with each of the other side."""
    if len(first) == 1 or len(second) == 1:
        pairs = itertools.product(first, second)
        return [(" / ".join(dict.fromkeys(filter(None, (a, b)))), first[a], second[b]) for a, b in pairs]
    common = [name for name in first if name in second]
    if not common:
        raise ConfigError(
            f"{sides[0]['name']} and {sides[1]['name']} hold tables of different load paths: "
            f"{', '.join(first)}; {', '.join(second)}"
        )
    return [(name, first[name], second[name]) for name in common]


def _difference(
    one: dict[str, Tensor], other: dict[str, Tensor], request: dict[str, Any], title: str
) -> dict[str, Any]:
    pairs = one["cos"].shape[-1]
    if other["cos"].shape[-1] != pairs:
        raise ConfigError(
            f"{title}: rotary_dim {2 * pairs} on one side, {2 * other['cos'].shape[-1]} on the other; "
            "compare embeddings of one dimension"
        )
    common = one["positions"][torch.isin(one["positions"], other["positions"])]
    if not len(common):
        raise _NothingInCommonError(f"{title}: the two sides have no position in common")
    if request["positions"]:
        common = common[torch.isin(common, torch.tensor(request["positions"]))]
    elif request["longest"]:
        common = common[common < request["longest"]]
    if not len(common):
        raise _NothingInCommonError(f"{title}: the two sides have none of the positions asked for in common")
    in_one, in_other = (torch.isin(side["positions"], common) for side in (one, other))
    cos, sin = one["cos"][in_one], one["sin"][in_one]
    other_cos, other_sin = other["cos"][in_other], other["sin"][in_other]
    turned = angle_between(other_cos.double(), other_sin.double(), cos.double(), sin.double())
    angles = turned.abs().nan_to_num(nan=torch.pi)  # what is no number counts as pi
    off = angles.amax(dim=-1)
    steps = torch.maximum(_ulps(cos, other_cos), _ulps(sin, other_sin))
    allowed = TOLERANCE * common.double().clamp(min=1.0)
    each = TOLERANCE * torch.maximum(_phases(one, common), _phases(other, common)).clamp(min=1.0)
    if request["tolerance"] is not None:
        allowed, each = (torch.full_like(bound, request["tolerance"]) for bound in (allowed, each))
    # The angle alone is blind to what both are multiplied by, as attention scaling is.
    beyond = (angles > each).any(dim=-1) | (_scaled(cos, sin, other_cos, other_sin, common) > allowed)
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
        "first_difference": first_of(common, steps > 0),
        "first_beyond": first_of(common, beyond),
        "rows": [
            {"position": int(common[i]), "radians": float(off[i]), "ulp": float(steps[i])} for i in shown
        ],
    }


def _phases(side: dict[str, Tensor], positions: Tensor) -> Tensor:
    """How far each pair has turned at positions, as position 1 says it, at most; float64 ``[n, pairs]``.

    Where it tells no frequencies, each is 1: none that falls from there is a frequency less whole turns.
    """
    first = side["positions"] == 1
    slopes = torch.atan2(side["sin"][first].double(), side["cos"][first].double())[:1]
    is_told = len(slopes) > 0 and bool((slopes >= 0).all() and (slopes.diff() <= 0).all())
    slopes = slopes.clamp(max=1.0) if is_told else torch.ones(1, side["cos"].shape[-1], dtype=torch.float64)
    return positions.double()[:, None] * slopes


def _scaled(cos: Tensor, sin: Tensor, other_cos: Tensor, other_sin: Tensor, positions: Tensor) -> Tensor:
    """The largest difference of each row between the lengths of its pairs, relative to how long they are."""
    one, other = (torch.hypot(c.double(), s.double()) for c, s in ((cos, sin), (other_cos, other_sin)))
    larger = torch.maximum(*(length.nan_to_num(nan=0.0, posinf=0.0) for length in (one, other)))
    off = (one - other).abs().nan_to_num(nan=torch.inf).amax(dim=-1)
    return off / sizes(larger.amax(dim=-1), positions)


def _ulps(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference of each row, in units in the last place of the larger FP32 value."""
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=torch.finfo(torch.float32).tiny)
    exponent = torch.frexp(larger.double()).exponent.double() - 24
    return ((one.double() - other.double()).abs() / 2.0**exponent).nan_to_num(nan=2.0**31).amax(dim=-1)
