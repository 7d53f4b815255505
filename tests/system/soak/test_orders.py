"""Guards, zero.Init, foreign replacements and models in any order: what is global is what it must be.

`tools/lab soak --only orders` draws more of them.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.zero_init import assert_plain, assert_stock, assert_truthful, replaceable, zero_init
from torch import nn
from torch.utils._device import DeviceContext

import safe_rope

SEQUENCES = 100
METHODS = ("__init__", "__call__", "_apply", "train", "load_state_dict")
LENGTH, DIM = 300, 16
PATIENCE = 60
"""Seconds that a child has."""
EXACT = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.timeout(7200), pytest.mark.slow]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 1e4 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        t = torch.arange(length, dtype=torch.float32)
        return torch.outer(t, self.inv_freq.float()).cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rotary()

    def forward(self, length: int) -> torch.Tensor:
        result: torch.Tensor = self.rope(length)
        return result


class SomebodysError(Exception):
    pass


class Orders(RuleBasedStateMachine):
    """What the tests of the guard do one after the other, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.before = everything()
        self.guards: list[Any] = []
        self.inits: list[Any] = []
        self.foreign: dict[str, Any] = {}
        self.models: list[Any] = []
        self.unfinished: list[Any] = []
        self.device_modes: tuple[Any, ...] = ()

    # ---- guards ------------------------------------------------------------------------------------

    @rule(tables=st.sampled_from(["exact", "fp32"]))
    def open(self, tables: Any) -> None:
        self.guards.append(safe_rope.guard(tables=tables))
        self.guards[-1].start()

    @precondition(lambda self: self.guards)
    @rule(data=st.data())
    def close_any(self, data: Any) -> None:
        self.guards.pop(data.draw(st.integers(0, len(self.guards) - 1))).stop()

    @rule()
    def body_raises(self) -> None:
        @safe_rope.guard()
        def body() -> None:
            Model()
            raise SomebodysError

        with pytest.raises(SomebodysError):
            body()

    @rule()
    def decorated(self) -> None:
        model = safe_rope.guard()(Model)()
        self.check(model.to(torch.bfloat16))

    @rule()
    def generator_left_unfinished(self) -> None:
        def steps() -> Iterator[nn.Module]:
            with safe_rope.guard():
                yield Model()
                raise AssertionError("nobody asks for more")

        running = steps()
        next(running)
        running.close()

    @rule()
    def in_a_task(self) -> None:
        async def build() -> nn.Module:
            with safe_rope.guard():
                model = Model()
                await asyncio.sleep(0)
            return model

        self.check(asyncio.run(build()).to(torch.bfloat16))

    # ---- others ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.inits) < 2)
    @rule()
    def enter_zero_init(self) -> None:
        self.inits.append(zero_init())
        self.inits[-1].__enter__()

    @precondition(lambda self: self.inits)
    @rule()
    def exit_zero_init(self) -> None:
        self.inits.pop().__exit__(None, None, None)

    @precondition(lambda self: not self.inits)
    @rule(name=st.sampled_from(METHODS))
    def somebody_replaces_a_method(self, name: str) -> None:
        """For good, around what stands there; zero.Init keeps an ``__init__`` of its own aside."""
        if name not in self.foreign:
            inner = vars(nn.Module)[name]

            def foreign(*args: Any, **kwargs: Any) -> Any:
                return inner(*args, **kwargs)

            self.foreign[name] = foreign
            setattr(nn.Module, name, foreign)

    @precondition(lambda self: self.inits)
    @rule()
    def zero_init_is_shut_down_and_restored(self) -> None:
        """As deepspeed.initialize does it inside zero.Init."""
        from deepspeed.runtime.zero import partition_parameters

        partition_parameters.shutdown_init_context()
        assert_plain()
        partition_parameters.restore_init_context()

    @precondition(lambda self: not self.inits)
    @rule(device=st.sampled_from([None, "cpu"]))
    def set_default_device(self, device: Any) -> None:
        torch.set_default_device(device)
        self.device_modes = tuple(mode for mode in function_modes() if type(mode) is DeviceContext)

    @rule()
    def fork(self) -> None:
        """A child can open a guard, build and close, whatever is open here."""
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(PATIENCE)
                self.decorated()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    # ---- models ------------------------------------------------------------------------------------

    @precondition(lambda self: self.guards and not self.inits)
    @rule(kind=st.sampled_from([Model, Rotary]), low=st.booleans())
    def build(self, kind: Callable[[], nn.Module], low: bool) -> None:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16 if low else before)
            self.models.append(kind())
        finally:
            torch.set_default_dtype(before)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), how=st.sampled_from(["call", "cast", "copy", "drop", "eval"]))
    def use(self, data: Any, how: str) -> None:
        index = data.draw(st.integers(0, len(self.models) - 1))
        model = self.models[index]
        if how == "drop":
            del self.models[index], model
            gc.collect(1)
            return
        if how == "copy":
            model = copy.deepcopy(model.eval())
        if how == "cast":
            model.to(torch.bfloat16)
        self.check(model.eval() if how == "eval" else model)

    def check(self, model: Any) -> None:
        got = model(LENGTH)
        true = torch.outer(torch.arange(LENGTH, dtype=torch.float64), EXACT).cos()
        assert (got.double() - true).abs().max() < 1e-4

    # ---- what must be true -------------------------------------------------------------------------

    @invariant()
    def constructors_do_what_they_must(self) -> None:
        if not self.inits:
            assert_plain()
        elif self.guards:
            assert_truthful()
        else:
            assert_stock()

    @invariant()
    def nothing_is_left(self) -> None:
        if not self.guards and not self.inits:
            self.assert_put_back()

    def assert_put_back(self) -> None:
        after = everything()
        wanted = {**self.before, **{f"Module.{name}": value for name, value in self.foreign.items()}}
        wanted["modes"] = (*self.before["modes"], *self.device_modes)
        changed = [
            name
            for name, value in wanted.items()
            if after[name] is not value and not (name == "modes" and after[name] == value)
        ]
        assert not changed, f"not what stood there: {changed}"

    def teardown(self) -> None:
        while self.inits:
            self.inits.pop().__exit__(None, None, None)
        while self.guards:
            self.guards.pop().stop()
        try:
            self.assert_put_back()
        finally:
            torch.set_default_device(None)
            for name in self.foreign:
                setattr(nn.Module, name, self.before[f"Module.{name}"])


def function_modes() -> list[Any]:
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()
    return modes


def everything() -> dict[str, Any]:
    """Every global that a guard may replace, each as the object that stands there now."""
    return replaceable() | {f"Module.{name}": vars(nn.Module)[name] for name in METHODS}


def run_sequences(count: int) -> None:
    """Draw so many sequences; raise what the first one raises that finds something wrong."""
    with zero_init():
        pass  # DeepSpeed leaves an attribute behind on the first use
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=count,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a sequence is short enough to be read as it was drawn
        ),
    )


def test_any_order_leaves_every_global_what_it_must_be(deepspeed_group: None) -> None:
    run_sequences(SEQUENCES)
