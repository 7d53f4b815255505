"""Contract 4: after any exit from the guard, every replaced global is the very object that it was."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from namespaces import APPLICATION, replaced, snapshot
from support import families
from support.load_paths import PATHS, zero_init
from support.true_tables import assert_true

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_state"), pytest.mark.contract, pytest.mark.fresh]


class UserError(Exception):
    """What a user's code may raise."""


def guard_outside(family: str) -> Any:
    with safe_rope.guard(), zero_init():
        return families.build(family)


def guard_inside(family: str) -> Any:
    with zero_init(), safe_rope.guard():
        return families.build(family)


def guard_between_two_inits(family: str) -> Any:
    with zero_init():
        with safe_rope.guard(), zero_init():
            model = families.build(family)
        families.build(family)
    return model


def guard_closed_before_init(family: str) -> Any:
    guard = safe_rope.guard().start()
    init = zero_init()
    init.__enter__()
    model = families.build(family)
    guard.stop()
    init.__exit__(None, None, None)
    return model


def nested_guards(family: str) -> Any:
    with safe_rope.guard(tables="fp32", apply="stock"), zero_init(), safe_rope.guard(tables="exact"):
        return families.build(family)


def one_guard_nested_in_itself(family: str) -> Any:
    guard = safe_rope.guard()
    with guard, zero_init(), guard:
        return families.build(family)


def one_guard_used_twice(family: str) -> Any:
    guard = safe_rope.guard()
    for _ in range(2):
        with guard, zero_init():
            model = families.build(family)
    return model


def decorator(family: str) -> Any:
    @safe_rope.guard()
    def load() -> Any:
        with zero_init():
            return families.build(family)

    load()
    return load()


def another_thread_builds(family: str) -> Any:
    built: list[Any] = []

    def load() -> None:
        built.append(families.build(family))

    with safe_rope.guard(), zero_init():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    return built[0]


def another_thread_guards(family: str) -> Any:
    built: list[Any] = []

    def load() -> None:
        with safe_rope.guard(), zero_init():
            built.append(families.build(family))

    with safe_rope.guard():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    return built[0]


def exception_after_the_model(family: str) -> Any:
    built: list[Any] = []
    with pytest.raises(UserError), safe_rope.guard(), zero_init():
        build_and_raise(family, built)
    return built[0]


def exception_through_nested_guards(family: str) -> Any:
    built: list[Any] = []
    with pytest.raises(UserError), safe_rope.guard(tables="fp32"), zero_init(), safe_rope.guard():
        build_and_raise(family, built)
    return built[0]


def build_and_raise(family: str, built: list[Any]) -> None:
    built.append(families.build(family))
    raise UserError


ORDERS = (
    guard_outside,
    guard_inside,
    guard_between_two_inits,
    guard_closed_before_init,
    nested_guards,
    one_guard_nested_in_itself,
    one_guard_used_twice,
    decorator,
    another_thread_builds,
    another_thread_guards,
    exception_after_the_model,
    exception_through_nested_guards,
)


def settle(family: str) -> dict[str, Any]:
    # DeepSpeed's own zero.Init leaves traces (_old_init, Tensor.__old_new__): have them there first.
    with zero_init():
        families.build(family)
    gc.collect()
    return snapshot()


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_every_order_gives_true_tables_and_leaves_no_trace(order: Callable[[str], Any], family: str) -> None:
    before = settle(family)
    function = before[f"transformers.models.{family}.modeling_{family}.{APPLICATION}"]
    is_needed = inspect.unwrap(function) is not function  # torch keeps what FSDP has wrapped in another test
    model = order(family)
    assert not replaced(before)
    # The application function stays the object that it is, and runs other code as long as a model needs it.
    assert inspect.unwrap(function) is not function
    assert_true(model, family, "exact")
    del model
    gc.collect()
    assert not replaced(before)
    assert (inspect.unwrap(function) is not function) == is_needed


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_exception_inside_a_rotary_constructor_leaves_no_trace(family: str) -> None:
    before = settle(family)
    config = families.config(family)
    rotary = type(next(iter(families.rotary_modules(families.build(family)).values())))
    before = snapshot()
    with pytest.raises(TypeError, match="no_such_argument"), safe_rope.guard(), zero_init():
        rotary(config, no_such_argument=families)
    gc.collect()
    assert not replaced(before)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("path", ["HF ZeRO-3", "from_config bf16", "meta + to_empty", "default dtype bf16"])
def test_loading_under_the_guard_leaves_no_trace(
    path: str, family: str, checkpoints: dict[str, Path]
) -> None:
    PATHS[path](family, checkpoints[family])
    before = settle(family)
    with safe_rope.guard():
        model = PATHS[path](family, checkpoints[family])
    assert not replaced(before, but=APPLICATION)
    del model
    gc.collect()
    assert not replaced(before)


def test_the_settings_of_the_innermost_guard_apply() -> None:
    with safe_rope.guard(tables="fp32") as outer:
        first = families.build("llama")
        with safe_rope.guard(tables="exact") as inner:
            second = families.build("llama")
        third = families.build("llama")
    assert_true(first, "llama", "fp32")
    assert_true(second, "llama", "exact")
    assert_true(third, "llama", "fp32")
    assert inner.report.tables == "exact"
    assert outer.report.tables == "fp32"


@pytest.mark.parametrize("order", [guard_outside, guard_inside], ids=lambda order: order.__name__)
def test_torch_device_contexts_work_as_before_afterwards(order: Callable[[str], Any]) -> None:
    # torch asks once in a process which functions such a context redirects; here it asks during zero.Init.
    torch.utils._device._device_constructors.cache_clear()
    model = order("llama")
    with torch.device("meta"):
        made = [torch.empty(2), torch.arange(2), torch.tensor([1.0]), torch.zeros(2), torch.full((2,), 1.0)]
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert model is not None
