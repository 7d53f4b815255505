"""What stands beside a class in its file and is not its business is not asked: an answer may run anything."""

import collections
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope._base.containers import held_in, length_of
from safe_rope._recognition.holdings import entries, nested
from safe_rope._recognition.leads_back import Back, leads_back
from safe_rope._recognition.untouched import Untouched

ASKED: list[str] = []


def told(name: str) -> Callable[..., Any]:
    """A method that notes that it was called, and fails."""

    def method(*_: Any) -> Any:
        ASKED.append(name)
        raise ValueError(name)

    return method


def answering(*names: str) -> dict[str, Any]:
    return {name: told(name) for name in names}


READING = answering("__iter__", "__len__", "__bool__", "__contains__", "keys", "items", "values", "copy")
STANDING = answering("__getattr__")
KINDS = (dict, collections.OrderedDict, list, tuple, set, frozenset, collections.deque)
FOREIGN = {
    "lazy mapping": type("Lazy", (collections.OrderedDict,), READING)(),
    "lazy dict": type("LazyDict", (dict,), READING)(),
    "lazy list": type("LazyList", (list,), READING)(),
    "lazy tuple": type("LazyTuple", (tuple,), READING)(),
    "lazy deque": type("LazyDeque", (collections.deque,), READING)(),
    "stand-in": type("StandIn", (), {**STANDING, "__class__": property(told("class"))})(),
    "lazy module": type("LazyModule", (types.ModuleType,), STANDING)("lazy"),
    "iterator": type("Loader", (), answering("__next__", "__iter__", "__copy__", "__reduce_ex__"))(),
}


class Rotary(nn.Module):
    """A rotary module of this file, in whose globals the foreign objects are."""

    inv_freq: torch.Tensor

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        inv_freq = 1e4 ** (-torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class Counting(nn.Module):
    """Takes sines of what it counts, which the audit asks for."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.dim, self.mlp = dim, nn.Linear(dim, dim)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(self.dim // 2, device=t.device) / 8.0)
        phases = t[:, None].float() * frequencies[None]
        made: torch.Tensor = self.mlp(torch.cat([phases.cos(), phases.sin()], -1).to(self.mlp.weight.dtype))
        return made


@pytest.fixture(params=FOREIGN, ids=str)
def foreign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One of them, a global of this file meanwhile; nobody asks it anything."""
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", FOREIGN[request.param], raising=False)
    ASKED.clear()
    yield FOREIGN[request.param]
    assert ASKED == []
    assert vars(sys.modules[__name__])["GLOBAL"] is FOREIGN[request.param]


def test_no_foreign_global_is_asked_by_guard(foreign: Any) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(Rotary()).to(torch.bfloat16)
    assert [entry.path for entry in session.report.protected] == ["0"]
    assert safe_rope.audit(model).ok


def test_no_foreign_global_is_asked_by_the_audit(foreign: Any) -> None:
    assert safe_rope.audit(nn.Sequential(Rotary())).ok
    damaged = safe_rope.audit(nn.Sequential(Rotary()).to(torch.bfloat16))
    assert {finding.severity for finding in damaged.findings} == {"damaged"}
    assert safe_rope.audit(nn.Sequential(Counting()).to(torch.bfloat16)).ok


@pytest.mark.parametrize("name", [name for name in FOREIGN if "lazy" in name and "module" not in name])
def test_a_container_that_a_module_keeps_is_looked_into_as_it_is(name: str) -> None:
    module = Rotary()
    vars(module)["kept"] = FOREIGN[name]
    ASKED.clear()
    assert [held for held, _ in (*entries(module), *nested(module))] == ["inv_freq"]
    assert leads_back(module) is Back.NOT
    assert ASKED == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_container_holds_is_found_past_its_own_methods(kind: Any) -> None:
    filled = type("Filled", (kind,), READING)({1: 2} if issubclass(kind, dict) else (2,))
    ASKED.clear()
    assert (held_in(filled), length_of(filled)) == ([2], 1)
    assert ASKED == []


def test_what_is_no_container_holds_nothing() -> None:
    for other in (3, "text", None, FOREIGN["stand-in"]):
        assert (held_in(other), length_of(other)) == ([], 0)


def test_a_container_in_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    around: Any = (kept := [])
    kept.append((around, kept))
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", around, raising=False)
    with Untouched(Rotary, anew=True) as untouched:
        kept.append(torch.ones(2))
    assert untouched.changed is True
    assert len(kept) == 1
