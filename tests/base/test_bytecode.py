"""What is told from a class's bytecode is told of its methods, whatever stands around them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zero_init import zero_init
from torch import nn
from torch.nn import functional as F

import safe_rope
from safe_rope._base.bytecode import conduct, counts_as_given, facts, only_hands_out
from safe_rope._base.changes import stores_when_called
from safe_rope._base.instructions import steps
from safe_rope.rotation._plain_code import is_plain

pytestmark = pytest.mark.usefixtures("deepspeed_group")


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.arange(4) @ torch.arange(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local: list[torch.Tensor] = []
        local.append(x.clone().mul_(2))
        return self.kept.clone().add_(1) + local[0]


class InPlace(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(1)
        return x


class InADictionary(Reads):
    def forward(self, x: Any) -> Any:
        self.seen["calls"] += 1  # type: ignore[operator,index]
        return x


class InAList(Reads):
    def forward(self, x: Any) -> Any:
        self.history.append(x)  # type: ignore[operator]
        return x


class ByName(Reads):
    def forward(self, x: Any) -> Any:
        setattr(self, "kept", x)  # noqa: B010
        return x


class InAMethod(Reads):
    def forward(self, x: Any) -> Any:
        return self._grown(x)

    def _grown(self, x: Any) -> Any:
        self.register_buffer("kept", x)
        return x


class ByAKeyOfItsArgument(Reads):
    def forward(self, x: Any) -> Any:
        self.seen[x.dtype] = x  # type: ignore[operator,index]
        return x


class ByAKeyThatIsChosen(Reads):
    def forward(self, x: Any) -> Any:
        self.seen["long" if len(x) > 4 else "short"] += x.sum()  # type: ignore[operator,index]
        return x


class InASlice(Reads):
    def forward(self, x: Any) -> Any:
        count = len(x)
        self.kept[:count] = x
        return x


class InAPartOfAPart(Reads):
    def forward(self, x: Any) -> Any:
        layer = 3
        self.seen["tables"][layer].add_(x)  # type: ignore[operator,index]
        return x


class InAComprehension(Reads):
    def forward(self, x: Any) -> Any:
        return [self.history.append(row) for row in x]  # type: ignore[operator]


class AfterAComprehension(Reads):
    def forward(self, x: Any) -> Any:
        rows = [self.kept + row for row in x]
        self.history.append(rows)  # type: ignore[operator]
        return rows


MEMORY: dict[Any, Any] = {}


class InAMemoryOfTheFile(Reads):
    def forward(self, x: Any) -> Any:
        MEMORY[self, x.dtype] = x
        return x


_NAMES = "; ".join(f"x.name_{number}" for number in range(300))
_MADE: dict[str, Any] = {"Reads": Reads}
exec(
    f"class AmongManyNames(Reads):\n    def forward(self, x):\n        {_NAMES}\n        self.last.add_(1)\n",
    _MADE,
)
AmongManyNames: type[nn.Module] = _MADE["AmongManyNames"]


class AfterEmptyArguments(Reads):
    def forward(self, x: Any, **options: Any) -> Any:
        return self.seen[self.name(**options)].update(x)  # type: ignore[operator,index]


class InItsResult(Reads):
    def forward(self, x: Any) -> Any:
        rows = [x.clone() for x in (x, x)]
        rows[0][: len(x)] += self.kept[: len(x)]
        rows[1][self.kept[0]] = self.kept[1]
        return [rows[len(self.kept) % 2].mul_(2) for _ in x]


STORING = [
    *(InPlace, InADictionary, InAList, ByName, InAMethod, ByAKeyOfItsArgument, ByAKeyThatIsChosen, InASlice),
    *(InAPartOfAPart, InAComprehension, AfterAComprehension, InAMemoryOfTheFile, AmongManyNames),
    AfterEmptyArguments,
]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("cls", "stores"), [(Reads, False), (InItsResult, False), *((cls, True) for cls in STORING)]
)
def test_what_changes_what_is_kept(cls: type[nn.Module], stores: bool) -> None:
    assert conduct(cls).stores == stores_when_called(cls) == stores
    assert not conduct(cls).multiplies


def test_only_what_a_forward_reaches_is_stored_when_called() -> None:
    class Resets(Reads):
        def reset(self) -> None:
            self.kept = torch.zeros(4)

    assert conduct(Resets).stores
    assert not stores_when_called(Resets)


def test_a_constructor_that_zero_init_has_replaced_is_no_method() -> None:
    class Product(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.other = self.kept @ self.kept

    with zero_init():
        pass
    assert not conduct(Product).stores
    assert not conduct(Product).multiplies

    with zero_init():

        class Inside(Product):
            def __init__(self) -> None:
                super().__init__()
                self.more = 1

        assert not conduct(Inside).stores


HELPERS = """
import torch
def rows(n): return torch.arange(n).cos()
class Tables:
    def __init__(self, n): self.cos = rows(n)
"""
MODEL = """
import odd_helpers
from torch import nn
class Asking(nn.Module):
    def forward(self, x): return x * odd_helpers.rows(len(x))
class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = odd_helpers.Tables(8)
    def forward(self, x): return x * self.tables.cos
"""


def test_files_in_one_folder_are_followed_as_the_files_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_helpers.py").write_text(HELPERS)
    (tmp_path / "odd_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("odd_model")
    try:
        assert facts(model.Asking).counts
        assert facts(model.Asking).makes_waves
        assert facts(model.Holding).makes_waves
        assert not facts(Reads).makes_waves, "what a library's module has is not followed"
    finally:
        for name in ("odd_helpers", "odd_model"):
            del sys.modules[name]


class Rows(nn.Module):
    def forward(self, x: Any, positions: Any) -> Any:
        shape = x.shape
        return F.embedding(positions, self.cos).view(shape), [
            row.to(x.dtype) for row in self.rows[: shape[0]]
        ]


class RowsTwice(Rows):
    def forward(self, x: Any, positions: Any) -> Any:
        return F.embedding(positions, self.cos), [2 * row for row in self.rows]


@pytest.mark.contract
def test_what_is_loaded_beside_an_argument_is_handed_out() -> None:
    assert only_hands_out(Rows)
    assert not only_hands_out(RowsTwice)


class AsksInAComprehension(Reads):
    def forward(self, x: Any) -> Any:
        return [row for row in x if type(row) is type(self)]


class AsksThroughAnAttribute(Reads):
    def forward(self, x: Any) -> Any:
        return [row for row in x if row.__class__.__name__ == "Tensor"]


@pytest.mark.contract
def test_a_class_is_asked_for_in_a_comprehension_too() -> None:
    assert conduct(AsksInAComprehension).asks_its_class
    assert conduct(AsksThroughAnAttribute).asks_its_class
    assert not conduct(InItsResult).asks_its_class


class CountsAsChosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x), dtype=torch.float32 if self.training else x.dtype)


class CountsAndCasts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x)).to(torch.float32 if self.training else x.dtype)


class CountsAsOther(nn.Module):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.arange(len(x), **options).type_as(x) * 2


class CountsWhole(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return torch.arange(len(x)) * 2, x.dtype


@pytest.mark.contract
@pytest.mark.parametrize("cls", [CountsAsChosen, CountsAndCasts, CountsAsOther, CountsWhole])
def test_a_count_is_as_given_whatever_is_chosen_in_a_call(cls: type[nn.Module]) -> None:
    assert counts_as_given(cls) == (cls is not CountsWhole)


def _in_a_tuple(xs: Any) -> Any:
    return tuple(x.mul(2) for x in xs)


def test_a_tuple_of_what_is_gone_through_decides_nothing() -> None:
    # CPython 3.14 asks there whether ``tuple`` is the builtin.
    done = steps(_in_a_tuple.__code__)
    assert not [one for one in done if one.goes_to is not None]
    assert len([one for one in done if one.loads == "tuple"]) == 1
    assert is_plain(_in_a_tuple)


@pytest.mark.contract
def test_what_makes_annotations_is_no_method() -> None:
    source = "class Typed(nn.Module):\n    dtype: torch.dtype\n    scale: float\n"
    made: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": __name__}
    exec(compile(source, "typed", "exec", dont_inherit=True), made)
    assert not conduct(made["Typed"]).asks_dtypes
    assert not conduct(made["Typed"]).asks_for_fp32


def _loop(q, k, cos):  # type: ignore[no-untyped-def]
    for x in (q, k):
        x.copy_(x * cos)


def _numbered(q, k):  # type: ignore[no-untyped-def]
    for index, x in enumerate([q, k]):
        x[..., index] = 0


def _paired(q, k, cos):  # type: ignore[no-untyped-def]
    for x, table in zip((q, k), cos, strict=True):
        x.mul_(table)


def _all_given(*states):  # type: ignore[no-untyped-def]
    for state in states:
        state.mul_(2)


def _halves(q, cos):  # type: ignore[no-untyped-def]
    first, second = q.chunk(2, -1)
    kept = first.clone()
    first.mul_(cos).sub_(second)
    return kept


def _halves_by_function(q):  # type: ignore[no-untyped-def]
    first, second = torch.chunk(q, 2, -1)
    first.add_(second)


def _part_of_a_view(q):  # type: ignore[no-untyped-def]
    part = q.view(2, -1).transpose(0, 1)[..., : q.shape[-1] // 2]
    part *= 2


def _product(q):  # type: ignore[no-untyped-def]
    product = q * 2
    product.mul_(2)
    return product


def _made_here(x, lengths):  # type: ignore[no-untyped-def]
    parts = []
    for length in lengths:
        row = torch.arange(length).float()
        row.mul_(2)
        parts.append(row)
    return torch.cat(parts).to(x.dtype)


def _size(x):  # type: ignore[no-untyped-def]
    size = x.shape[1]
    size += 1
    return torch.zeros_like(x).add_(size)


WRITING = (_loop, _numbered, _paired, _all_given, _halves, _halves_by_function, _part_of_a_view)


@pytest.mark.parametrize("forward", [*WRITING, _product, _made_here, _size])
def test_what_is_written_to_arguments(forward: Any) -> None:
    cls = type("Module", (nn.Module,), {"forward": forward})
    assert conduct(cls).writes == (forward in WRITING)


class _Missing:
    """What stands for an optional import, as MONAI has it: it says what is missing."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("no optional extension")


_extension = _Missing()


class AsksAnOptionalImport(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.inner is not None else _extension.sample(x)


def test_an_optional_import_that_is_missing_stays_unasked() -> None:
    with safe_rope.guard():
        model = nn.Sequential(AsksAnOptionalImport())
    assert not safe_rope.protect(model).unprotected
    assert safe_rope.audit(model).ok
