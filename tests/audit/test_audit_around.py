"""What stands around a forward is judged with it: hooks, what was put in its place, a wrapper module."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_models import build, first_rotary
from torch import Tensor, nn

import safe_rope

BF16, DIM = torch.bfloat16, 32
IDS, X = torch.arange(600)[None], torch.zeros(1, 600, DIM)


def inverse() -> Tensor:
    return 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM)


class Rotary(nn.Module):
    """A class of one's own: its constructor tells what it should answer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = (position_ids[..., None].float() * self.inv_freq.float()).repeat(1, 1, 2)
        return phases.cos(), phases.sin()


class OfAConfig(Rotary):
    """A formula tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.base, self.max_position_embeddings = DIM, 1e4, 2048


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.given = inner, given

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, self.given(position_ids))


def right(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    phases = (position_ids[..., None].float() * inverse()).repeat(1, 1, 2)
    return phases.cos(), phases.sin()


def rounds(module: nn.Module) -> None:
    stock = module.forward
    module.forward = lambda x, position_ids: stock(x, position_ids.to(BF16))


def own_method(module: nn.Module, dtype: torch.dtype = BF16) -> None:
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return type(self).forward(self, x, position_ids.to(dtype))

    module.forward = types.MethodType(forward, module)


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "right forward": lambda one: setattr(one, "forward", right),
    "rounding forward": rounds,
    "rounding method": own_method,
    "same method": lambda one: own_method(one, torch.int64),
    "repairing hook": lambda one: one.register_forward_pre_hook(
        lambda m, _: setattr(m, "inv_freq", inverse())
    ),
    "rounding pre-hook": lambda one: one.register_forward_pre_hook(lambda _, a: (a[0], a[1].to(BF16))),
    "rounding hook": lambda one: one.register_forward_hook(
        lambda *a: tuple(t.to(BF16).float() for t in a[2])
    ),
    "keywords": lambda one: one.register_forward_pre_hook(
        lambda _, a, k: ((a[0], a[1].to(BF16)), k), with_kwargs=True
    ),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("cls", [Rotary, OfAConfig])
def test_what_stands_around_a_forward_is_judged_with_it(
    cls: type[Rotary], dtype: torch.dtype, how: str
) -> None:
    model, used = (nn.Sequential(nn.Linear(4, 4), cls()).to(dtype) for _ in range(2))
    AROUND[how](model[1])
    AROUND[how](used[1])
    truth, answer = cls()(X, IDS), used[1](X, IDS)
    is_right = torch.allclose(truth[0], answer[0].float(), atol=1e-5)
    assert safe_rope.audit(model).ok == is_right
    assert model[1].inv_freq.dtype == dtype, "the audit has run the hook on a copy"


class HasItsOwnHook(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _, args, answer: (-answer[0], answer[1]))


class FillsBefore(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(FillsBefore.fill)

    def fill(self, args: Any) -> None:
        self.now = right(*args)

    def forward(self, x: Tensor) -> Tensor:
        return self.now[0] * self.inv_freq


@pytest.mark.parametrize("cls", [HasItsOwnHook, FillsBefore])
def test_a_hook_that_a_class_registers_is_a_part_of_it(cls: type[Rotary]) -> None:
    assert safe_rope.audit(nn.Sequential(cls())).ok
    assert safe_rope.audit(nn.Sequential(nn.Linear(4, 4), cls()).to(BF16)).verdict == "damaged"


class Logger:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, module: nn.Module, args: Any) -> None:
        self.seen.append(args)

    def look_at_its_table(self, module: nn.Module, args: Any) -> None:
        self.scale = module.inv_freq.dtype.itemsize

    def change(self, module: nn.Module, args: Any) -> Any:
        return (args[0], args[1] * self.scale)

    scale = 1


@pytest.mark.parametrize("cls", [Rotary, OfAConfig])
def test_what_only_looks_leaves_a_verdict(cls: type[Rotary]) -> None:
    model, logger, seen = nn.Sequential(cls()), Logger(), []
    model[0].register_forward_pre_hook(logger.look)
    model[0].register_forward_hook(lambda *given: seen.append(given))
    assert safe_rope.audit(model).ok
    assert not logger.seen, "the audit is no call"
    assert not seen
    model[0].register_forward_pre_hook(logger.look_at_its_table)
    assert safe_rope.audit(model).ok
    model[0].register_forward_pre_hook(logger.change)
    assert safe_rope.audit(model).verdict == "unknown"


def test_librarys_wrappers_change_nothing() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(OfAConfig(), OfAConfig())
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook("cpu"))
    model[1].forward = torch.compile(model[1].forward, backend="eager")
    assert safe_rope.audit(model).ok
    assert not safe_rope.audit(model.to(BF16)).ok
    rounding = nn.Sequential(OfAConfig())
    rounds(rounding[0])
    hooks.add_hook_to_module(rounding[0], hooks.AlignDevicesHook("cpu"))
    assert not safe_rope.audit(rounding).ok


def closure(forward: Any) -> Any:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("rotary"):
            return forward(*args, **kwargs)

    return recorded


def default(forward: Any) -> Any:
    @functools.wraps(forward)
    def called(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
        return _forward(*args, **kwargs)

    return called


def method(forward: Any) -> Any:
    stock = forward.__func__

    def called(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return stock(self, x, position_ids)

    return types.MethodType(called, forward.__self__)


def accelerated(forward: Any) -> Any:
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.add_hook_to_module(forward.__self__, hooks.AlignDevicesHook("cpu")).forward


WRAPPERS: list[Callable[[Any], Any]] = [
    *(closure, default, method, accelerated),
    *(torch._dynamo.disable, torch.no_grad(), torch.autocast("cpu", BF16)),
    functools.partial(functools.partial, lambda forward, *args, **kwargs: forward(*args, **kwargs)),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda one: getattr(one, "__name__", type(one).__name__))
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", ["stock", "guarded", "protected later"])
def test_a_forward_that_libraries_have_decorated_is_asked_in_its_wrappers(
    kind: str, low: bool, wrap: Any
) -> None:
    model = build().to(BF16 if low else torch.float32)
    rotary = first_rotary(model)
    if kind == "guarded":
        safe_rope.protect(model)
    ids, true = torch.arange(4000, 4008)[None], first_rotary(build())
    x = torch.zeros(1, 8, 8)
    rotary.forward = wrap(rotary.forward)
    if kind == "protected later":
        safe_rope.protect(model)
    off = max(float((a - b).abs().max()) for a, b in zip(true(x, ids), rotary(x, ids), strict=True))
    before = dict(vars(rotary))
    assert safe_rope.audit(model).verdict == ("damaged" if off > 1e-2 else "ok")
    assert vars(rotary) == before


def test_autocast_around_a_forward_is_a_part_of_it() -> None:
    class Multiplies(Rotary):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            phases = (position_ids[..., None].float() @ self.inv_freq[None]).repeat(1, 1, 2)
            return phases.cos(), phases.sin()

    model = nn.Sequential(nn.Linear(4, 4), Multiplies())
    assert safe_rope.audit(model).ok
    model[1].forward = torch.autocast("cpu", BF16)(model[1].forward)
    assert not torch.allclose(model[1](X, IDS)[0].float(), right(X, IDS)[0], atol=1e-2)
    assert not safe_rope.audit(model).ok


@pytest.mark.parametrize("cls", [Rotary, OfAConfig])
def test_a_hook_that_is_a_partial_function_runs_with_what_it_is_given(cls: type[Rotary]) -> None:
    seen: dict[str, int] = {}

    def count(name: str, module: nn.Module, args: Any, answer: Any) -> None:
        seen[name] = seen.get(name, 0) + 1

    def scale(dtype: torch.dtype, module: nn.Module, args: Any) -> Any:
        return args[0], args[1].to(dtype)

    model = nn.Sequential(cls())
    model[0].register_forward_hook(functools.partial(count, "rotary"))
    model[0].register_forward_pre_hook(functools.partial(scale, torch.int64))
    assert safe_rope.audit(model).ok
    assert not seen, "the audit is no call"
    model[0].register_forward_pre_hook(functools.partial(scale, BF16))
    assert not safe_rope.audit(model).ok


@pytest.mark.parametrize("cls", [OfAConfig])
def test_a_wrapper_that_rounds_is_damaged(cls: type[Rotary]) -> None:
    assert safe_rope.audit(nn.Sequential(Wrapper(cls(), lambda ids: ids.to(BF16)))).verdict == "damaged"
    assert safe_rope.audit(nn.Sequential(Wrapper(cls(), lambda ids: ids))).ok
    assert safe_rope.audit(nn.Sequential(Wrapper(cls(), lambda ids: ids * 0.25))).ok


class RepairsIfLow(Rotary):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = inverse()
        return super().forward(x, position_ids)


class WidensWhatIsLow(RepairsIfLow):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.inv_freq = self.inv_freq.float()
        return super().forward(x, position_ids)


def test_a_forward_that_repairs_its_table_is_ok() -> None:
    assert safe_rope.audit(nn.Sequential(nn.Linear(4, 4), RepairsIfLow()).to(BF16)).ok
    assert not safe_rope.audit(nn.Sequential(nn.Linear(4, 4), WidensWhatIsLow()).to(BF16)).ok


class Phases(Rotary):
    """Hands out phases, which others take sines of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts_in = torch.float32

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        return position_ids[..., None].to(self.counts_in).float() * self.inv_freq.float()


def low_counts(module: nn.Module) -> None:
    module.counts_in = BF16  # type: ignore[assignment]


def low_phases(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, phases: phases.to(BF16).float())


@pytest.mark.parametrize(("spoil", "verdict"), [(low_counts, "damaged"), (low_phases, "unknown")])
def test_phases_that_are_rounded_on_their_way_out_are_not_ok(
    spoil: Callable[[nn.Module], None], verdict: str
) -> None:
    true, module = Phases(), Phases()
    assert safe_rope.audit(module).ok
    spoil(module)
    off = (true(X, 8 * IDS) - module(X, 8 * IDS)).abs().max()
    assert off > 1, "radians"
    assert safe_rope.audit(module).verdict == verdict
