"""A constructor that waits for a thread of its own, in which modules and tensors are made."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.default_dtype import default_dtype
from support.zero_init import zero_init
from torch import nn

import safe_rope
from safe_rope.constructors import ConstructorGuard, pristine
from safe_rope.constructors._default_dtype import default_dtype as needed

pytestmark = pytest.mark.usefixtures("deepspeed_group", "everything_is_put_back")
FP32, BF16 = torch.float32, torch.bfloat16
SECONDS = 60


class Rotary(nn.Module):
    """Position tables, as a model's own file writes them."""

    inv_freq: torch.Tensor

    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq
        phases = torch.cat((phases, phases), dim=-1)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class Waiting(Rotary):
    """Position tables whose constructor waits for a thread that does ``work``."""

    work: list[Callable[[], object]] = []

    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        in_thread(*self.work)


class Model(nn.Module):
    """A linear layer and a position module."""

    def __init__(self, rotary: type[nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.rotary = rotary()


def in_thread(*work: Callable[[], object]) -> None:
    """Do ``work`` in a new thread; raise what it raises, and AssertionError if it does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for one in work:
                one()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "waits for ever"
    if errors:
        raise errors[0]


def build_modules() -> None:
    nn.Linear(3, 3)
    Rotary()
    torch.ones(3)


def open_a_guard() -> None:
    with safe_rope.guard():
        model = Model(Rotary)
    assert model.rotary.inv_freq.dtype == FP32


def protect_a_model() -> None:
    safe_rope.protect(Model(Rotary))


def open_pristine_sections() -> None:
    with ConstructorGuard(), pristine():
        assert (torch.arange(3) / 2).dtype == FP32
        with pristine():
            assert torch.ones(3).dtype == FP32


WORK = [build_modules, open_a_guard, protect_a_model, open_pristine_sections]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_pristine_section_may_wait_for_a_thread(dtype: torch.dtype) -> None:
    def wait() -> None:
        with pristine():
            in_thread(*WORK)
        assert torch.get_default_dtype() == dtype

    with default_dtype(dtype):
        in_thread(wait)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("work", WORK)
def test_a_guarded_constructor_may_wait_for_a_thread(
    work: Callable[[], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Waiting, "work", [work])

    def build() -> None:
        with default_dtype(dtype), safe_rope.guard():
            model = Model(Waiting)
        safe_rope.protect(model)
        assert model.rotary.inv_freq.dtype == FP32

    in_thread(build)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_module_that_is_protected_afterwards_may_wait_for_a_thread(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Waiting, "work", WORK)

    def build() -> None:
        with default_dtype(dtype):
            safe_rope.protect(Model(Waiting))

    in_thread(build)


def test_a_constructor_inside_zero_init_may_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "work", [open_pristine_sections, build_modules])

    def build() -> None:
        with safe_rope.guard(), zero_init():
            Model(Waiting)

    in_thread(build)


def test_sections_that_need_different_default_dtypes_take_turns() -> None:
    turns = [0, 0, 0, 0]
    stop = threading.Event()

    def work(index: int, dtype: torch.dtype) -> None:
        while not stop.is_set():
            with needed(dtype), needed(FP32), needed(dtype):
                if any((torch.arange(3) / 2).dtype != dtype for _ in range(20)):
                    turns[index] = -1
                    return
            turns[index] += 1

    threads = [
        threading.Thread(target=work, args=(index, dtype), daemon=True)
        for index, dtype in enumerate((FP32, BF16, FP32, BF16))
    ]
    with default_dtype(torch.float64):
        for thread in threads:
            thread.start()
        stop.wait(2)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert min(turns) > 0, turns
        assert torch.get_default_dtype() == torch.float64
