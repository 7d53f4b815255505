"""Attention that holds its application function is copied with that of the guard in place, and gone."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import inspect
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from held_model import SOURCE
from support import written_modules
from support.covering import in_turn

import safe_rope

NAME = "modeling_held"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The model file, imported, with nothing of it protected."""
    (module,) = written_modules.write(tmp_path, monkeypatch, **{NAME: SOURCE})
    stock = module.apply_rotary_pos_emb
    yield module
    gc.collect()
    assert inspect.unwrap(module.apply_rotary_pos_emb) is stock


# ---- which model ---------------------------------------------------------------------------------------


def guarded(held: Any, dtype: torch.dtype, rotary_first: bool = True) -> Any:
    with safe_rope.guard():
        model = held.HeldModel(rotary_first)
    return model.to(dtype)


def protected(held: Any, dtype: torch.dtype) -> Any:
    model = held.HeldModel().to(dtype)
    safe_rope.protect(model)
    return model


def stock(held: Any, dtype: torch.dtype) -> Any:
    return held.HeldModel().to(dtype)


def another(held: Any, dtype: torch.dtype) -> list[Any]:
    """A protected model of the same family, which keeps the guard's function in place while it lives."""
    return [guarded(held, dtype)]


SUBJECTS: dict[str, Callable[[Any, torch.dtype], Any]] = {
    "guarded": guarded,
    "guarded, attention first": lambda held, dtype: guarded(held, dtype, rotary_first=False),
    "protected": protected,
    "built before the guard": stock,
    "built while another is protected": stock,
}
PROTECTED = ("guarded", "guarded, attention first", "protected")


def subject(name: str, held: Any, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """The model, and who else lives that is protected."""
    if name == "built while another is protected":
        others = another(held, dtype)
        return SUBJECTS[name](held, dtype), others
    model = SUBJECTS[name](held, dtype)
    return model, another(held, dtype)


# ---- which copy ----------------------------------------------------------------------------------------


def saved(model: Any) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch.save": (saved, loaded),
    "deepcopy": (lambda model: model, copy.deepcopy),
    "deepcopy of a copy": (copy.deepcopy, copy.deepcopy),
}


def assert_importable(held: Any, model: Any) -> None:
    """What the attention holds is the function of the model file, as it stands there or as it was written."""
    function = held.held(model)
    current = held.apply_rotary_pos_emb
    assert function is current or inspect.unwrap(function) is inspect.unwrap(current)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_copies_work_while_the_guards_function_is_in_place(
    name: str, way: str, dtype: str, held: ModuleType
) -> None:
    model, others = subject(name, held, DTYPES[dtype])
    expected = held.output(model)
    pack, unpack = WAYS[way]
    twin = unpack(pack(model))
    assert_importable(held, twin)
    assert torch.equal(held.output(twin), expected)
    assert torch.equal(held.output(model), expected)
    del others


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in PROTECTED])
def test_copies_of_a_stock_model_work_when_the_guards_function_is_gone(
    name: str, way: str, dtype: str, held: ModuleType
) -> None:
    function = held.apply_rotary_pos_emb
    true = held.output(stock(held, DTYPES[dtype]))
    model, others = subject(name, held, DTYPES[dtype])
    others.clear()
    gc.collect()
    assert held.apply_rotary_pos_emb is function
    pack, unpack = WAYS[way]
    twin = unpack(pack(model))
    for each in (twin, model):
        assert_importable(held, each)
        assert torch.equal(held.output(each), true), "a stock model's bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_was_packed_in_place_is_unpacked_when_it_is_gone(
    name: str, way: str, dtype: str, held: ModuleType
) -> None:
    function = held.apply_rotary_pos_emb
    model, others = subject(name, held, DTYPES[dtype])
    expected = held.output(model)
    pack, unpack = WAYS[way]
    data = pack(model)
    del model
    others.clear()
    gc.collect()
    assert held.apply_rotary_pos_emb is function
    twin = unpack(data)
    assert_importable(held, twin)
    assert torch.equal(held.output(twin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_it_runs_as_the_stock_model(name: str, dtype: str, held: ModuleType) -> None:
    true = held.output(stock(held, torch.float32))
    expected = held.output(stock(held, DTYPES[dtype]))
    model, others = subject(name, held, DTYPES[dtype])
    got = held.output(model)
    assert got.dtype == expected.dtype
    assert type(got) is torch.Tensor
    if name in PROTECTED:
        assert (got - true).abs().max() <= 1.1 * (expected - true).abs().max() + 1e-5
    else:
        assert torch.equal(got, expected), "a stock model's bits"
    del others


# ---- other processes -----------------------------------------------------------------------------------


def run_there(model: Any) -> torch.Tensor:
    module = sys.modules[type(model).__module__]
    assert inspect.unwrap(module.held(model)) is inspect.unwrap(module.apply_rotary_pos_emb)
    result: torch.Tensor = module.output(model)
    return result


@pytest.fixture
def one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """A model file for each of the subjects, so that none meets what another has left."""
    names = {f"{NAME}_{index}": SOURCE for index, _ in enumerate(SUBJECTS)}
    return dict(zip(SUBJECTS, written_modules.write(tmp_path, monkeypatch, **names), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"])
def test_a_spawned_process_takes_them(dtype: str, one_each: dict[str, ModuleType]) -> None:
    context = multiprocessing.get_context("spawn")
    alive = {name: subject(name, module, DTYPES[dtype]) for name, module in one_each.items()}
    failed = []
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        results = {name: pool.submit(run_there, model) for name, (model, _) in alive.items()}
        for name, (model, _) in alive.items():
            try:
                got = results[name].result(timeout=120)
                assert torch.equal(got, one_each[name].output(model))
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert failed == []


ELSEWHERE = """
import inspect
import sys

import torch

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
for name in names:
    try:
        model = torch.load(f"{folder}/{name}.pt", weights_only=False)
        module = sys.modules[type(model).__module__]
        held = inspect.unwrap(model.attention.rotary_fn)
        assert held is inspect.unwrap(module.apply_rotary_pos_emb)
        torch.save(module.output(model), f"{folder}/{name}.out")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "dtype"), in_turn([("in place",), ("gone",)], list(DTYPES)))
def test_a_process_without_a_guard_loads_them(
    dtype: str, when: str, one_each: dict[str, ModuleType], tmp_path: Path
) -> None:
    expected: dict[str, torch.Tensor] = {}
    failed: list[str] = []
    for index, (name, module) in enumerate(one_each.items()):
        model, others = subject(name, module, DTYPES[dtype])
        if when == "gone":
            others.clear()
            gc.collect()
        try:
            expected[str(index)] = module.output(model)
            torch.save(model, tmp_path / f"{index}.pt")
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert failed == []
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(tmp_path), *expected]
    child = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert child.stdout == ""
    for name, true in expected.items():
        assert torch.equal(torch.load(tmp_path / f"{name}.out"), true), list(SUBJECTS)[int(name)]
