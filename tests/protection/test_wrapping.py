"""Wrapped, exported, compiled, copied: a guarded model does what the stock one does, with the same dtypes."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from support import small_models
from support.covering import in_turn
from support.small_models import build, logits, tokens
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import safe_rope
from safe_rope._protection.rewrite import is_protected, state_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Results = list[torch.Tensor]


# ---- the ways ------------------------------------------------------------------------------------------


def eager(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits(model(tokens()))


def exported(model: Any, **options: Any) -> Results:
    with torch.no_grad():
        program = torch.export.export(model, (tokens(),), **options)
        return [logits(program.module()(tokens())), eager(model)]


def compiled(model: Any, **options: Any) -> Results:
    run = torch.compile(model, **options)
    with torch.no_grad():
        results = [logits(run(tokens())), eager(model), logits(run(tokens()))]
        if options.get("dynamic"):
            results.append(logits(run(tokens(24)))[:, :20])
        return results


def functional(model: Any) -> Results:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        return logits(functional_call(model, (parameters, buffers), (ids,))).float().square().mean()

    detached = {name: parameter.detach() for name, parameter in parameters.items()}
    gradients = torch.func.grad(loss)(detached, buffers, tokens())
    result = logits(functional_call(model, (parameters, buffers), (tokens(),))).detach()
    return [result, *gradients.values()]


def backward(model: Any) -> Results:
    logits(model(tokens())).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def checkpointed(model: Any, reentrant: bool) -> Results:
    """Recompute all that follows the embedding, where a cache has to grow."""
    embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    handle = embedding.register_forward_hook(lambda module, args, result: result.requires_grad_())

    def run(seed: torch.Tensor) -> torch.Tensor:
        return logits(model(tokens())) * seed

    try:
        result = checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
        result.float().square().mean().backward()
    finally:
        handle.remove()
    return [result.detach(), eager(model), *[p.grad for p in model.parameters() if p.grad is not None]]


def in_threads(model: Any) -> Results:
    results: list[Any] = [None] * 4
    start = threading.Barrier(4)

    def run(index: int) -> None:
        start.wait()
        try:
            for _ in range(20):
                results[index] = eager(model)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def saved(model: Any, **options: Any) -> Results:
    file = io.BytesIO()
    torch.save(model, file, **options)
    file.seek(0)
    return [eager(torch.load(file, weights_only=False)), eager(model)]


def replicated(model: Any) -> Results:
    """Replicate the model as torch.nn.parallel.replicate does for each device, which has to be a GPU."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, child and replicas[child])
        replica._former_parameters = {}
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.clone())
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else buffer.clone()
    for module, replica in replicas.items():
        assert not is_protected(module) or state_of(replica) is not state_of(module), "threads share a state"
    return [eager(replicas[model]), eager(model), eager(replicas[model])]


WAYS: dict[str, Callable[[Any], Results]] = {
    "export": exported,
    "export, strict": lambda m: exported(m, strict=True),
    "compile, eager": lambda m: compiled(m, backend="eager"),
    "compile, aot_eager": lambda m: compiled(m, backend="aot_eager"),
    "compile, one graph": lambda m: compiled(m, backend="aot_eager", fullgraph=True),
    "compile, one dynamic graph": lambda m: compiled(m, backend="eager", fullgraph=True, dynamic=True),
    "func.grad": functional,
    "backward": backward,
    "checkpoint, reentrant": lambda m: checkpointed(m, True),
    "checkpoint": lambda m: checkpointed(m, False),
    "threads": in_threads,
    "double": lambda m: [eager(m.double()), eager(m)],
    "double and back": lambda m: [eager(m.double().to(torch.float32)), eager(m.to(torch.bfloat16))],
    "deepcopy": lambda m: [eager(copy.deepcopy(m)), eager(m)],
    "deepcopy of a copy": lambda m: [eager(copy.deepcopy(copy.deepcopy(m)).to(torch.bfloat16)), eager(m)],
    "replica": replicated,
    "pickle": lambda m: [eager(pickle.loads(pickle.dumps(m))), eager(m)],
    "torch.save": saved,
    "torch.save, old format": lambda m: saved(m, _use_new_zipfile_serialization=False),
    "jit.trace": lambda m: [logits(torch.jit.trace(m, tokens(), strict=False)(tokens())), eager(m)],
}


COMPILED = [way for way in WAYS if way.startswith(("export", "compile", "jit"))]
"""What these give is what an eager forward gives."""


# ---- what must hold ------------------------------------------------------------------------------------


def outcome(way: str, model: Any) -> Results | Exception:
    torch._dynamo.reset()
    try:
        return WAYS[way](model)
    except Exception as error:
        return error


@functools.cache
def truth(kind: str, way: str) -> Results:
    """What the stock model gives in FP32."""
    model = build(kind)
    result = eager(model)  # what grows has grown
    return [result] * 4 if way in COMPILED else WAYS[way](model)


def assert_as_stock(got: Results, stock: Results, truth: Results) -> None:
    assert [result.dtype for result in got] == [result.dtype for result in stock]
    for result, expected, true in zip(got, stock, truth, strict=False):
        assert type(result) is torch.Tensor, type(result)
        scale = true.abs().max()
        # Before transformers 4.45 the logits of a BF16 model are in FP32.
        low = torch.equal(expected, expected.to(torch.bfloat16).to(expected.dtype))
        allowed = 2 * (expected - true).abs().max() + (2**-7 if low else 1e-4) * scale
        assert (result - true).abs().max() <= allowed


def check(kind: str, way: str, dtype: torch.dtype, *, run_before: bool) -> None:
    stock = build(kind).to(dtype)
    with safe_rope.guard():
        model = build(kind)
    model = model.to(dtype)
    if run_before:
        eager(stock), eager(model)
    expected = outcome(way, stock)
    if isinstance(expected, Exception):
        pytest.skip(f"the stock model does not run: {expected}"[:120])
    got = outcome(way, model)
    if isinstance(got, Exception):
        raise got
    assert_as_stock(got, expected, truth(kind, way))
    tensors = [*model.buffers(), *model.parameters()]
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors)


# What a compiler makes of dynamic NTK takes it most of a minute.
ALL = [(kind, way) for kind in small_models.KINDS for way in WAYS if kind != "dynamic" or way not in COMPILED]
# Threads that grow one cache at once disturb each other in the stock model too.
AT_ONCE = [case for case in ALL if case not in (("growing", "threads"), ("dynamic", "threads"))]
AFTERWARDS = ("export", "func.grad", "checkpoint", "threads", "double")
EAGER = [case for case in AT_ONCE if case[1] not in COMPILED]
GRAPHS = [case for case in AT_ONCE if case[1] in COMPILED]
# A graph of every model and by every way, each pair of them in one dtype of two and every other pair in none.
OFTEN = [
    pytest.param(*case.values, marks=[*case.marks, *([pytest.mark.exhaustive] if number // 2 % 2 else [])])
    for number, case in enumerate(in_turn(GRAPHS, list(DTYPES)))
]


@pytest.mark.parametrize(
    ("kind", "way", "dtype"), [*((*case, dtype) for case in EAGER for dtype in DTYPES), *OFTEN]
)
def test_a_guarded_model_does_as_the_stock_one(kind: str, way: str, dtype: str) -> None:
    check(kind, way, DTYPES[dtype], run_before=False)


@pytest.mark.parametrize(
    ("kind", "way", "dtype"), in_turn([case for case in ALL if case[1] in AFTERWARDS], list(DTYPES))
)
def test_after_a_forward_it_still_does(kind: str, way: str, dtype: str) -> None:
    check(kind, way, DTYPES[dtype], run_before=True)
