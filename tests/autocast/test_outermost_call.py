"""Which calls count as outside of the model's forward, where weights of the autocast dtype are refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from safe_rope.autocast import _deepspeed, gather12, reads
from safe_rope.errors import PrecisionError

X = torch.ones(2, 4)


class Threaded(nn.Module):
    """A forward that has a thread compute its second part, which is under no autocast there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(self.second, x).result()


class Island(nn.Module):
    """A forward that leaves autocast for a part, and calls what it is told to before that."""

    def __init__(self, between: Callable[[], Any] | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = None if between is None else torch.compiler.disable(between)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            if self.between is not None:
                self.between()
            return self.second(x.float())


class Rounded:
    """A gather that has left rounded weights."""

    rounded = True
    process_groups: tuple[Any, ...] = ()

    def restore(self) -> None:
        self.rounded = False


def watched(model: nn.Module) -> Rounded:
    """Let ``model`` be that of an engine whose weights are rounded; return the gather."""
    gather, engine = Rounded(), types.SimpleNamespace(module=model)
    reads.refuse_outside(engine, gather, torch.bfloat16)  # type: ignore[arg-type]
    reads.restore_first(engine, gather)  # type: ignore[arg-type]
    return gather


def low() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def assert_refused(call: Callable[[], Any], what: str = "without autocast") -> None:
    with pytest.raises(PrecisionError, match=what):
        call()


def test_what_a_forward_calls_in_a_thread_is_within_it() -> None:
    model = Threaded()
    with low():
        truth = model(X)
        watched(model)
        assert torch.equal(model(X), truth)
    for part in (model, model.second):
        assert_refused(lambda part=part: part(X))  # type: ignore[misc]


def test_another_thread_that_calls_the_model_is_outside() -> None:
    errors: list[Any] = []

    def elsewhere() -> None:
        if not errors:
            errors.append(None)  # the other thread's forward starts no third one
            with ThreadPoolExecutor(1) as threads:
                errors[0] = threads.submit(model, X).exception()

    model = Island(elsewhere)
    watched(model)
    with low():
        model(X)
    assert isinstance(errors[0], PrecisionError)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("compiled", ["no", "the model", "a part"])
def test_a_part_that_runs_outside_of_autocast_within_the_forward_is_not_refused(
    compiled: str, breaks: bool
) -> None:
    model = Island((lambda: None) if breaks else None)
    with low():
        truth = model(X)
        watched(model)
        if compiled != "no":
            (model if compiled == "the model" else model.second).compile(
                backend="eager", fullgraph=not breaks or compiled == "a part"
            )
        for _ in range(2):
            assert torch.equal(model(X), truth)


@pytest.mark.usefixtures("fresh_compiler")
def test_what_torch_compile_makes_of_a_model_is_called_as_the_model() -> None:
    model = Island(None)
    with low():
        truth = model(X)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    watched(compiled)
    for _ in range(2):
        with low():
            assert torch.equal(compiled(X), truth)
        assert_refused(lambda: compiled(X))
    assert_refused(lambda: model.second(X))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_whole_graph_of_a_part_with_exact_weights_is_called_outside_of_autocast() -> None:
    model = Island(None)
    truth = model.second(X)
    watched(model).restore()
    assert torch.equal(torch.compile(model.second, backend="eager", fullgraph=True)(X), truth)


@pytest.mark.contract
def test_torch_jit_script_of_a_part_says_what_to_do() -> None:
    model = Island(None)
    watched(model)
    with pytest.raises(AttributeError, match=r"low_precision_gather=False"):
        torch.jit.script(model.second)


@pytest.mark.parametrize("compiled", [False, True])
def test_after_an_interrupt_nothing_runs(compiled: bool) -> None:
    interrupted = [True]

    def stop() -> None:
        if interrupted.pop():
            raise KeyboardInterrupt

    model = Island(stop)
    watched(model)
    if compiled:
        model.compile(backend="eager")
    with low(), contextlib.suppress(KeyboardInterrupt):
        model(X)
    assert not interrupted
    for part in (model, model.first):
        assert_refused(lambda part=part: part(X))  # type: ignore[misc]


def test_a_copy_is_independent_of_the_engine_and_refused_while_weights_are_rounded() -> None:
    model = Threaded()
    gather = watched(model)
    gather.rounded = False
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    truth = model(X)
    gather.rounded = True
    for one in copies:
        assert torch.equal(one(X), truth)
        assert one.state_dict().keys() == dict(model.named_parameters()).keys()
    for part in (model, model.second, nn.ModuleList([model.first])):
        assert_refused(lambda part=part: copy.deepcopy(part), "copied")  # type: ignore[misc]
        assert_refused(lambda part=part: pickle.dumps(part), "copied")  # type: ignore[misc]


def test_a_copy_is_refused_at_zero_3_but_not_of_what_has_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    gather, engine = Rounded(), types.SimpleNamespace(module=model)
    reads.gather_in_fp32_outside(engine, [], torch.bfloat16, gather)  # type: ignore[arg-type]
    reads.restore_first(engine, gather)  # type: ignore[arg-type]
    for part in (model, model[0]):
        assert_refused(lambda part=part: copy.deepcopy(part), "copied")  # type: ignore[misc]
    copy.deepcopy(model[1])


def test_what_takes_the_address_of_a_part_that_is_gone_is_outside() -> None:
    model = Threaded()
    model.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watched(model)
    del model.extra
    for wrapper in [nn.Sequential(model) for _ in range(2000)]:  # they fill what was given up
        assert_refused(lambda wrapper=wrapper: wrapper(X))  # type: ignore[misc]


@pytest.mark.skipif(not _deepspeed.has_autocast(), reason="this DeepSpeed has no torch_autocast")
def test_a_step_after_an_interrupt_outside_finds_the_marks_of_zero_3() -> None:
    class Engine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with low():
                return self.module(x)

    interrupted = [True]

    def stop() -> None:
        seen.append(_deepspeed.is_marked(model.first.weight))
        if interrupted and interrupted.pop():
            raise KeyboardInterrupt

    seen: list[bool] = []
    model = Island(stop)
    engine = Engine(model)
    weights = [model.first.weight]
    _deepspeed.mark(weights, torch.bfloat16)
    reads.gather_in_fp32_outside(engine, weights, torch.bfloat16, Rounded())  # type: ignore[arg-type]
    with contextlib.suppress(KeyboardInterrupt):
        model(X)
    engine(X)
    model(X)
    engine(X)
    assert seen == [False, True, False, True]


def test_an_interrupt_among_the_broadcasts_of_a_gather_leaves_rounded_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [nn.Parameter(torch.randn(8)) for _ in range(2)]
    flat = torch.cat([weight.detach() for weight in weights])
    for index, weight in enumerate(weights):
        weight.data = flat[8 * index : 8 * index + 8]
    partitions = [list(flat.split(8))]
    optimizer = types.SimpleNamespace(
        step=lambda: None, bit16_groups=[weights], parallel_partitioned_bit16_groups=partitions
    )
    gather = gather12.LowPrecisionGather(optimizer, weights, torch.bfloat16)
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, *_: Any) -> None:
        if sent:
            raise KeyboardInterrupt
        sent.append(tensor)

    monkeypatch.setattr(_deepspeed, "broadcast", broadcast)
    monkeypatch.setattr(_deepspeed, "any_rank", lambda flag, *_: flag)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    arguments = {"groups_flat": [flat], "dp_process_group": [None], "allgather_bucket_size": 100}
    with pytest.raises(KeyboardInterrupt):
        gather._gather(lambda **_: None, **arguments)
    assert sent[0].dtype == torch.bfloat16
    assert gather.rounded
