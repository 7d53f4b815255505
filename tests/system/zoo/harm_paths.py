"""The ways that a model is loaded: what is done while it is built, and what afterwards."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.default_dtype import default_dtype
from torch import nn

Make = Callable[[], nn.Module]

# Buckets of the default size are a gigabyte for each engine.
SMALL = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}


class Held(nn.Module):
    """A model with something to train, for styles that have no weights."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.held = make()
        self.trained = nn.Linear(4, 4)

    def forward(self, *args: Any) -> Any:
        return self.held(*args)


def alone(make: Make) -> nn.Module:
    """Build the model."""
    return make()


def as_it_is(model: nn.Module) -> nn.Module:
    """Leave the model as it was built."""
    return model


@dataclass(frozen=True)
class LoadPath:
    """A load path.

    Attributes:
        name: what tables of cells call it.
        dtype: what the inputs have afterwards.
        build: builds the model; a guard is open meanwhile.
        load: what happens afterwards; returns what is called.
        held: whether the model is built inside `Held`.
        computes: what the model computes in, where that is not ``dtype``.

    """

    name: str
    dtype: torch.dtype
    build: Callable[[Make], nn.Module] = alone
    load: Callable[[nn.Module], Callable[..., Any]] = as_it_is
    held: bool = False
    computes: torch.dtype | None = None

    @property
    def lowest(self) -> torch.dtype:
        """The dtype that outputs are rounded to."""
        return self.computes or self.dtype


def zero_init() -> Any:
    """Return the context in which parameters are partitioned as they are made."""
    import deepspeed

    return deepspeed.zero.Init(config_dict_or_path=CONFIG | {"zero_optimization": {"stage": 3, **SMALL}})


def inside_zero_init(make: Make) -> nn.Module:
    """Build the model inside of zero.Init."""
    with zero_init():
        return make()


def under_low_default(make: Make) -> nn.Module:
    """Build the model where what has no dtype is BF16."""
    with default_dtype(torch.bfloat16):
        return make()


def on_meta(make: Make, device: str = "cpu") -> nn.Module:
    """Build the model on meta and give it memory, which holds anything: here NaN."""
    with torch.device("meta"):
        model = make()
    with filled_memory():
        return model.to_empty(device=device)


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Have memory that nobody has written to hold NaN, and not what was there before."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def initialized(model: nn.Module, stage: int) -> Callable[..., Any]:
    """Return the DeepSpeed engine of the model."""
    import deepspeed

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = CONFIG | {"zero_optimization": {"stage": stage, **SMALL}}
    # Stage 3 looks for garbage in the whole process, which takes ten times as long as all the rest.
    with unittest.mock.patch("gc.collect", return_value=0):
        engine: Callable[..., Any] = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine


def autocast(model: nn.Module) -> Callable[..., Any]:
    """Return the model, called under torch.autocast."""

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*args)

    return call


def assigned(model: nn.Module) -> nn.Module:
    """Have the model take the tensors of a BF16 checkpoint for its own."""
    state = {
        name: value.bfloat16() if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model


def through_data(model: nn.Module) -> nn.Module:
    """Cast every tensor by itself, past the methods of the model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16()
    return model


def over_samples(model: nn.Module) -> Callable[..., Any]:
    """Return the model in BF16, called under vmap for two samples that are alike."""
    model = model.to(torch.bfloat16)

    def call(*args: Any) -> Any:
        floating = [
            i for i, one in enumerate(args) if isinstance(one, torch.Tensor) and one.is_floating_point()
        ]

        def one(*samples: torch.Tensor) -> Any:
            own = dict(zip(floating, samples, strict=True))
            return model(*(own.get(i, arg) for i, arg in enumerate(args)))

        pairs = (torch.stack([args[i], args[i]]) for i in floating)
        results = torch.vmap(one, randomness="same")(*pairs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda result: result[0], results)

    return call


def wrapped(model: nn.Module) -> nn.Module:
    """Put the forward of every module of the model in BF16 into a function, as hooks and patches do."""
    for module in model.to(torch.bfloat16).modules():
        if not isinstance(module, nn.Linear):
            module.forward = functools.partial(lambda inner, *args: inner(*args), module.forward)
    return model


def inference(model: nn.Module) -> Callable[..., Any]:
    """Return the model in BF16, called in inference mode."""
    return torch.inference_mode()(model.to(torch.bfloat16))


PLAIN = LoadPath("plain", torch.float32)
ZERO_INIT = LoadPath("zero.Init", torch.bfloat16, build=inside_zero_init)
CAST = LoadPath("to(bfloat16)", torch.bfloat16, load=lambda model: model.to(torch.bfloat16))
DEFAULT_DTYPE = LoadPath("default dtype", torch.bfloat16, build=under_low_default)
HALF_AND_BACK = LoadPath("half and back", torch.float32, load=lambda model: model.half().float())
META = LoadPath("meta", torch.float32, build=on_meta)
ZERO_2 = LoadPath("ZeRO-2", torch.bfloat16, load=functools.partial(initialized, stage=2), held=True)
ZERO_3 = LoadPath(
    "ZeRO-3", torch.bfloat16, inside_zero_init, functools.partial(initialized, stage=3), held=True
)
AUTOCAST = LoadPath("autocast", torch.float32, load=autocast, computes=torch.bfloat16)
ASSIGNED = LoadPath("assigned", torch.bfloat16, load=assigned)
INFERENCE = LoadPath("inference mode", torch.bfloat16, load=inference)
THROUGH_DATA = LoadPath("through .data", torch.bfloat16, load=through_data)
PATHS = (PLAIN, ZERO_INIT, CAST, DEFAULT_DTYPE, HALF_AND_BACK, META, ZERO_2, ZERO_3)
OVER_SAMPLES = LoadPath("vmap", torch.bfloat16, load=over_samples)
WRAPPED = LoadPath("wrapped", torch.bfloat16, load=wrapped)
HELD_UNDER_AUTOCAST = LoadPath(
    "autocast, held", torch.float32, load=autocast, computes=torch.bfloat16, held=True
)
MORE = (AUTOCAST, ASSIGNED, INFERENCE, THROUGH_DATA, OVER_SAMPLES, WRAPPED, HELD_UNDER_AUTOCAST)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have every partitioned parameter whole; what is written to it stays."""
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
        yield


@contextlib.contextmanager
def functions_put_back() -> Iterator[None]:
    """Put back the ``linear`` that zero.Init leaves replaced: it rounds differently in FP32."""
    linear = nn.functional.linear
    try:
        yield
    finally:
        nn.functional.linear = linear
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def set_weights(model: nn.Module) -> None:
    """Give every trainable parameter values that follow from its name, exact in BF16 and FP16."""
    with gathered(model):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_meta:
                generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix("held.").encode()))
                values = torch.randint(-16, 17, parameter.shape, generator=generator, dtype=torch.int64)
                parameter.copy_(values.float() / 64)
