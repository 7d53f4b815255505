"""Arguments are certain until a constructor changes one: read from its code, on every Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn

from safe_rope._recognition.arguments import Arguments, arguments_in, has_moved

pytestmark = pytest.mark.contract


def seen(module: nn.Module) -> bool:
    found = arguments_in(module, sys._getframe(1))
    assert isinstance(found, Arguments)
    return found.certain


class Constructed(nn.Module):
    """Writes down whether its arguments are certain: before, and after what one of them may be changed by."""

    before: bool
    after: bool


class OnlyRead(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        own = dict(more)
        self.before = seen(self)
        self.dim = dim
        self.options = options or own
        self.size, own[name] = dim, 2 * dim
        speeds = [options["base"] ** (step / dim) for step in range(dim)]
        self.both = [dim for dim in (speeds[0], dim)], (0 < dim < 99)
        own["left"] = [step for step in self.both if (found := step)]
        own[name if dim > 4 else "right"] = found
        self.after = seen(self)


class Rebinds(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before, size = seen(self), dim // 2
        dim = size
        self.after = seen(self)


class WritesByAName(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        options[name] = 2 * dim
        self.after = seen(self)


class AddsByAName(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        options["a" if dim > 99 else "base"] += 2 * dim
        self.after = seen(self)


class DeletesByAName(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        del more[name]
        self.after = seen(self)


class WritesASlice(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        options["sections"][:1] = [dim]
        self.after = seen(self)


class Pops(Constructed):
    def __init__(self, dim: int, options: dict[str, Any], name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        self.base = dim, options.pop("base")
        self.after = seen(self)


class SetsAnAttribute(Constructed):
    def __init__(self, dim: int, options: Any, name: str, **more: Any) -> None:
        super().__init__()
        self.before = seen(self)
        more["config"].dim = dim
        more["config"].dim += dim
        self.after = seen(self)


def made(cls: Callable[..., Constructed]) -> Constructed:
    config = type("Config", (), {})()
    return cls(8, {"base": 1e4, "sections": [1, 2]}, "base", base=1, config=config)


def test_what_is_only_read_stays_certain() -> None:
    module = made(OnlyRead)
    assert module.before
    assert module.after


@pytest.mark.parametrize(
    "cls", [Rebinds, WritesByAName, AddsByAName, DeletesByAName, WritesASlice, Pops, SetsAnAttribute]
)
def test_what_changes_an_argument_makes_all_uncertain(cls: Callable[..., Constructed]) -> None:
    module = made(cls)
    assert module.before
    assert not module.after


class _Base(nn.Module):
    moved: bool

    def __init__(self, *given: Any) -> None:
        nn.Module.__init__(self)
        self.moved = has_moved(self, sys._getframe(1))


class _BeginsAtOnce(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.number = len(repr(self))


class _NamesItsBase(_Base):
    def __init__(self) -> None:
        super(_NamesItsBase, self).__init__()  # noqa: UP008 - an older way


class _Calculates(_Base):
    def __init__(self, size: int = 2) -> None:
        double = size * 2
        super().__init__(double)


class _Calls(_Base):
    def __init__(self) -> None:
        number = len("text")
        super().__init__()
        self.number = number


class _CallsForAnArgument(_Base):
    def __init__(self) -> None:
        super().__init__(len("text"))


class _Assigns(_Base):
    count = 0

    def __init__(self) -> None:
        _Assigns.count += 1
        super().__init__()


class _Puts(_Base):
    counts: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        _Puts.counts["all"] = 1
        super().__init__()


@pytest.mark.parametrize("cls", [_BeginsAtOnce, _NamesItsBase, _Calculates])
def test_nothing_has_moved_before_a_base_begins(cls: type[_Base]) -> None:
    assert not cls().moved


@pytest.mark.parametrize("cls", [_Calls, _CallsForAnArgument, _Assigns, _Puts])
def test_what_is_done_before_a_base_begins_may_have_moved_anything(cls: type[_Base]) -> None:
    assert cls().moved
