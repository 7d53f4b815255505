"""First, do no harm, on a CUDA device: every style is built there, moved there, cast and trained there.

Truth is what it is on a CPU: the style as plain torch builds it there in FP32, and its formula in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import harm_cells
import harm_paths
import pytest
import torch
from harm_paths import LoadPath, Make, alone, gathered
from harm_runs import run
from styles import STYLES
from support.devices import DEVICE, is_there
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_there(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deepspeed_group"),
]

SHARES = 8
"""Tests that share the styles of a load path."""
COMPUTE_THERE = ("QwenOne",)
"""What computes its frequencies in each forward, by the device's own arithmetic."""
COUNT = ("CountsBesideATable", "GrowsAndCounts", "RunningLevels", "DefaultsMoveOn")
"""What counts its calls: a graph is called before it is captured."""
REMEMBER = ("RememberingMethod",)
"""What remembers by a decorator, and counts on the CPU, which no graph takes from; it is asked anew."""


def moved(value: Any, device: str) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def there(load: Callable[[nn.Module], Callable[..., Any]], model: nn.Module) -> Callable[..., Any]:
    """Load a model and return it as what is called with tensors of the CPU, and returns such."""
    called = load(model)
    whole = gathered if called is model else lambda _: gathered(nn.Module())

    def call(*args: Any) -> Any:
        with whole(model):
            return moved(called(*moved(args, DEVICE)), "cpu")

    return call


def built_there(make: Make, build: Callable[[Make], nn.Module] = alone) -> nn.Module:
    with torch.device(DEVICE):
        return build(make)


def under_autocast(model: nn.Module) -> Callable[..., Any]:
    model = model.to(DEVICE)

    def call(*args: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16):
            return model(*args)

    return call


def compiled(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model.to(DEVICE, torch.bfloat16))


def graphed(model: nn.Module) -> Callable[..., Any]:
    """Return the model as a CUDA graph for each shape of its inputs."""
    model = model.to(DEVICE, torch.bfloat16)

    def call(*args: Any) -> Any:
        model(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(*args)
        graph.replay()
        torch.cuda.synchronize()
        return result

    return call


def path(
    name: str,
    dtype: torch.dtype,
    load: Callable[[nn.Module], Callable[..., Any]],
    build: Callable[[Make], nn.Module] = alone,
    **more: Any,
) -> LoadPath:
    return LoadPath(f"CUDA, {name}", dtype, build, functools.partial(there, load), **more)


LOW = torch.bfloat16
PATHS = (
    path("moved", torch.float32, lambda model: model.to(DEVICE)),
    path("moved and cast", LOW, lambda model: model.to(DEVICE, LOW)),
    path("cast, then moved", LOW, lambda model: model.to(LOW).to(DEVICE)),
    path("moved, then cast to FP16", torch.float16, lambda model: model.to(DEVICE).half()),
    path("built there, then cast", LOW, lambda model: model.to(LOW), built_there),
    path(
        "built there under a low default dtype",
        LOW,
        harm_paths.as_it_is,
        functools.partial(built_there, build=harm_paths.under_low_default),
    ),
    path("meta", torch.float32, harm_paths.as_it_is, functools.partial(harm_paths.on_meta, device=DEVICE)),
    path("zero.Init", LOW, harm_paths.as_it_is, harm_paths.inside_zero_init),
    path("ZeRO-2", LOW, functools.partial(harm_paths.initialized, stage=2), held=True),
    path(
        "ZeRO-3",
        LOW,
        functools.partial(harm_paths.initialized, stage=3),
        harm_paths.inside_zero_init,
        held=True,
    ),
    path("autocast", torch.float32, under_autocast, computes=LOW),
    path("compiled", LOW, compiled),
    path("graph", LOW, graphed),
)
SAMPLED = {"CUDA, compiled": 24}
"""Paths that take long, and every how manieth style goes through them."""
WITHOUT_A_GPU = {
    "CUDA, moved and cast": 0,
    "CUDA, built there, then cast": 1,
    "CUDA, autocast": 2,
    "CUDA, meta": 3,
}
"""Paths for the second device, and which of four styles goes through each."""


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(
    "path",
    PATHS,
    ids=lambda path: path.name.removeprefix("CUDA, ").replace(",", "").replace(" ", "-"),
)
def test_no_style_comes_to_harm_on_cuda(path: LoadPath, share: int) -> None:
    from deepspeed.accelerator import get_accelerator

    if "zero" in path.name.lower() and get_accelerator().device_name() != DEVICE:
        pytest.skip("DeepSpeed runs on the CPU here (DS_ACCELERATOR)")
    every, first = SAMPLED.get(path.name, 1), 0
    if DEVICE != "cuda":
        every, first = len(WITHOUT_A_GPU), WITHOUT_A_GPU[path.name]
    bad = []
    for name in list(STYLES)[share * every + first :: SHARES * every]:
        style = STYLES[name]
        left_out = {path.name.removeprefix("CUDA, "), "to(bfloat16)"} & set(style.not_on)
        if left_out or name in COMPUTE_THERE or (path.name == "CUDA, graph" and name in COUNT + REMEMBER):
            continue
        stock = run(style, path)
        # The device's own cos and sin are off by more than half a unit in the last place of FP32.
        tables = "exact" if path.dtype in harm_cells.LOW else "of the device"
        for how in ("guard", "protect"):
            kind, reason = harm_cells.judge(style, path, stock, run(style, path, how), tables)
            if kind in harm_cells.BAD:
                bad.append(f"{name}, {how}: {kind}: {reason}")
    assert not bad, "\n".join(["", *bad])
