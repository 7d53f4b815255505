"""A model that is its own root, used while the guard that watched it being built is still open."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.zero_init import zero_init
from torch import nn

import safe_rope
from safe_rope._protection import watch
from safe_rope._protection.wrapped_methods import _subclasses

pytestmark = pytest.mark.contract
LENGTH, DIM = 4096, 64


class Transformer(nn.Module):
    """Meta's style: the tables stand on the root, which makes them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        inv_freq = 1.0 / 1e4 ** (torch.arange(0, DIM, 2)[: DIM // 2].float() / DIM)
        t = torch.arange(LENGTH, dtype=inv_freq.dtype)
        self.register_buffer("cos", torch.outer(t, inv_freq).cos(), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return self.cos[:length]


class Rotary(nn.Module):
    """A root that makes its tables from frequencies, in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 1e4 ** (torch.arange(0, DIM, 2) / DIM), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length, device=self.inv_freq.device), self.inv_freq).cos()


def cast(model: Any) -> torch.Tensor:
    return model.to(torch.bfloat16)(LENGTH)


def cast_twice(model: Any) -> torch.Tensor:
    return model.half().float()(LENGTH)


def called(model: Any) -> torch.Tensor:
    return model(LENGTH)


def forward_after_eval(model: Any) -> torch.Tensor:
    return model.eval().forward(LENGTH)


def forward_after_loading(model: Any) -> torch.Tensor:
    model.load_state_dict({}, strict=False)
    return model.forward(LENGTH)


def as_a_child(model: Any) -> torch.Tensor:
    return nn.ModuleList([model]).to(torch.bfloat16)[0](LENGTH)


USES: list[Callable[[Any], torch.Tensor]] = [
    cast,
    cast_twice,
    called,
    forward_after_eval,
    forward_after_loading,
    as_a_child,
]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("style", [Transformer, Rotary])
def test_its_tables_are_right_at_the_first_use(
    style: type[nn.Module], use: Callable[[Any], torch.Tensor], default: torch.dtype
) -> None:
    exact = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    true = torch.outer(torch.arange(LENGTH, dtype=torch.float64), exact).cos()
    originals = {name: vars(nn.Module)[name] for name in ("__init__", "__call__", "_apply", "train")}
    with safe_rope.guard():
        got = use(style())
        assert vars(nn.Module)["__call__"] is originals["__call__"], "nothing is left to wait for"
    assert (torch.as_tensor(getattr(got, "table", got)).double() - true).abs().max() < 2**-8
    assert {name: vars(nn.Module)[name] for name in originals} == originals


def test_a_guard_inside_does_not_hide_what_was_built_before_it() -> None:
    exact = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    with safe_rope.guard():
        model = Rotary()
        with safe_rope.guard():
            torch.nn.Linear(1, 1)
            model.to(torch.bfloat16)
            assert (model.inv_freq.double() - exact).abs().max() < 1e-7


def test_what_outlives_its_model_keeps_its_path_in_the_report() -> None:
    with safe_rope.guard() as guard:
        layer = nn.Sequential(Rotary())
        model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([layer]))
        before = guard.report.protected
        del model
        gc.collect()
        assert [entry.path for entry in before] == ["1.0.0"]
        assert guard.report.protected == before
    assert guard.report.protected == before
    del layer


def test_what_another_thread_is_building_is_left_to_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Rotary):
        def __init__(self) -> None:
            super().__init__()
            begun.set()
            go_on.wait(20)
            self.inv_freq = self.inv_freq / 4.0

    models: list[Any] = []
    with safe_rope.guard():
        builder = threading.Thread(target=lambda: models.append(Slow()))
        builder.start()
        begun.wait(20)
        Rotary()(8)
        go_on.set()
        builder.join(20)
    (model,) = models
    exact = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM) / 4
    assert (model.to(torch.bfloat16).inv_freq.double() - exact).abs().max() < 1e-7


class Kept(nn.Module):
    """Has no constructor: zero.Init leaves in it the one that it inherits at that moment."""

    def keep(self, table: torch.Tensor) -> None:
        self.register_buffer("inv_freq", table, persistent=False)


class Made(Kept):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.keep(1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).cos()


@pytest.fixture
def left_by_zero_init(deepspeed_group: None) -> Iterator[Any]:
    """A constructor of modules that zero.Init has left in every class that has none."""
    stock = nn.Module.__init__

    def foreign(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)

    nn.Module.__init__ = foreign  # type: ignore[method-assign]
    try:
        with zero_init():
            pass
    finally:
        nn.Module.__init__ = stock  # type: ignore[method-assign]
    yield foreign
    for cls in _subclasses(nn.Module):
        for name in ("__init__", "_old_init"):
            if vars(cls).get(name) is foreign:
                setattr(cls, name, stock)


def test_a_constructor_that_somebody_replaced_while_zero_init_was_open_hides_nothing(
    left_by_zero_init: Any,
) -> None:
    assert nn.Module.__init__ is not left_by_zero_init
    # An earlier zero.Init may have left another one, and newer releases leave none.
    before = vars(nn.Sigmoid).get("__init__")
    with safe_rope.guard():
        module = Made(32)
    assert module.to(torch.bfloat16)._buffers["inv_freq"].dtype == torch.float32  # type: ignore[union-attr]
    assert vars(nn.Sigmoid).get("__init__") is before


def test_calls_are_wrapped_and_put_back_only_between_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo holds a lock from when it reads a method until its checks of it are written."""
    monkeypatch.setattr(watch, "_COMPILATION", 0.1)  # a compilation that outlasts the patience of a guard
    lock = pytest.importorskip("torch._dynamo.convert_frame").compile_lock
    stock = nn.Module.__call__

    def compiling(what: Callable[[], Any]) -> None:
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                assert go_on.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(60)
        try:
            what()
        finally:
            go_on.set()
            thread.join()

    def built_meanwhile() -> None:
        with safe_rope.guard():
            Rotary()
            assert nn.Module.__call__ is stock

    compiling(built_meanwhile)
    guard = safe_rope.guard()
    guard.__enter__()
    model = Rotary()
    assert nn.Module.__call__ is not stock
    compiling(lambda: guard.__exit__(None, None, None))
    assert nn.Module.__call__ is not stock
    assert model(4).shape == (4, DIM // 2)
    assert nn.Module.__call__ is stock


def test_a_guard_waits_for_a_compilation_of_another_thread() -> None:
    lock = pytest.importorskip("torch._dynamo.convert_frame").compile_lock
    held, compiled = threading.Event(), threading.Event()

    def compile_for_a_moment() -> None:
        with lock:
            held.set()
            compiled.wait(0.3)
            compiled.set()

    thread = threading.Thread(target=compile_for_a_moment)
    thread.start()
    assert held.wait(60)
    with safe_rope.guard():
        assert compiled.is_set()
    thread.join()


def test_a_loader_that_uses_each_module_by_itself_takes_time_for_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)

    looks = []
    concerns = watch.concerns
    monkeypatch.setattr(watch, "concerns", lambda module: looks.append(module) or concerns(module))
    count = 100
    with safe_rope.guard():
        model = nn.ModuleList(Expert() for _ in range(count))
        model.append(Rotary())
        for expert in model:
            expert.load_state_dict(expert.state_dict(), strict=False)
            expert.train()
        model.to(torch.bfloat16)
    assert len(looks) <= 6 * count
    assert model[-1].inv_freq.dtype == torch.float32


class MayHaveFrequencies(nn.Module):
    """Has a place for frequencies, and weights that it calls."""

    def __init__(self, use_rope: bool) -> None:
        super().__init__()
        self.use_rope, self.q = use_rope, nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0).reciprocal() if use_rope else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) if self.inv_freq is None else self.q(x) * self.inv_freq.repeat(2).cos()


class TriesItsModel(nn.Module):
    """Calls the model that it is given while its own constructor runs, as engines do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.model(torch.zeros(1, 3, 8))


def test_what_is_asked_for_its_frequencies_asks_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    forward = MayHaveFrequencies.forward

    def counted(self: MayHaveFrequencies, x: torch.Tensor) -> torch.Tensor:
        asked.append(self)
        if len(asked) > 500:
            pytest.fail("modules are asked while modules are asked")
        return forward(self, x)

    with safe_rope.guard():
        model = nn.Sequential(*(MayHaveFrequencies(use_rope=i % 2 == 0) for i in range(4)))
        monkeypatch.setattr(MayHaveFrequencies, "forward", counted)
        TriesItsModel(model)


class HoldsItsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(16.0) / 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).cos().to(x.dtype)


def test_a_copy_of_what_nobody_has_called_yet_is_protected_too() -> None:
    true = HoldsItsTable()(torch.zeros(1, 300, 4))
    before = nn.Module.__reduce_ex__
    with safe_rope.guard():
        duplicate = copy.deepcopy(HoldsItsTable())
        answer = duplicate.to(torch.bfloat16)(torch.zeros(1, 300, 4, dtype=torch.bfloat16))
    assert torch.equal(answer, true.bfloat16())
    assert nn.Module.__reduce_ex__ is before
    assert "__reduce_ex__" not in vars(nn.Module)


class FourierWaves(nn.Module):
    """Random frequencies, which no constructor gives again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(dim))
        self.register_buffer("phases", torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(2 * torch.pi * (x[..., None] * self.frequencies + self.phases))


class CastsWhatItBuilds(nn.Module):
    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.waves = FourierWaves(16).to(dtype=torch.float32) if casts else FourierWaves(16)


@pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")
def test_a_child_that_is_cast_before_it_is_registered_is_known_as_one_that_is_not() -> None:
    for casts in (False, True):
        with safe_rope.guard() as session:
            model = CastsWhatItBuilds(casts=casts)
        assert not session.report.unprotected, model


class Turns(nn.Module):
    """Is given its frequencies."""

    def __init__(self, speeds: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("speeds", speeds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(x.shape[1]).view(-1, 1) * self.speeds).cos().to(x.dtype)


def test_a_copy_of_a_whole_model_is_settled_and_named() -> None:
    """What fills it past its methods is seen at the end of the guard, before a cast past them."""
    speeds = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    with safe_rope.guard() as session:
        copied = copy.deepcopy(nn.Sequential(nn.Sequential(Turns(torch.ones(8)))))
        copied[0][0].speeds.copy_(speeds)
    for buffer in copied.buffers():
        buffer.data = buffer.data.to(torch.bfloat16)
    x = torch.zeros(1, 900, 8)
    assert [found.path for found in session.report.protected] == ["0.0"]
    assert (copied(x.bfloat16()).float() - Turns(speeds)(x)).abs().max() < 2**-8
