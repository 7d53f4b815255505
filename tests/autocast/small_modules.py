"""Small modules, each with one way of using its parameters, and which of these are safe to round."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZE = 8


class FusedLinear(nn.Module):
    """Slices, transposes and joins of weights before the product; one stacked weight per expert."""

    safe = {"qkv", "first", "second", "experts", "stacked"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * SIZE, SIZE))
        self.first = nn.Parameter(torch.randn(SIZE, SIZE))
        self.second = nn.Parameter(torch.randn(SIZE, SIZE))
        self.experts = nn.Parameter(torch.randn(4, SIZE, SIZE))
        self.stacked = nn.Parameter(torch.randn(4, SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv.chunk(3)
        x = F.linear(F.linear(F.linear(x, q), k.contiguous()), v.t().clone().t())
        x = x @ torch.cat([self.first, self.second])[: 2 * SIZE].unflatten(0, (2, SIZE))[1]
        x = x @ self.experts[torch.tensor([1, 3])][0] + F.linear(x, self.first)
        return torch.einsum("...i,ij->...j", x, self.stacked.unbind()[2].flip(0))


class EmbeddingIntoLinear(nn.Module):
    """Rows of a table that are cast before anything is computed from them."""

    safe = {"table.weight", "linear.weight", "linear.bias"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, SIZE)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0], device=x.device) % 5
        return self.linear(self.table(ids)) + x


class AutocastOff(nn.Module):
    """A product that the model does in FP32 on purpose."""

    safe = {"low.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(SIZE, SIZE, bias=False)
        self.router = nn.Linear(SIZE, SIZE, bias=False)
        self.mixed = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            gate = self.mixed(self.router(x.float()))
        return self.mixed(self.low(x)) * gate


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(torch.get_autocast_dtype(x.device.type)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.t(), x.t() @ gradient.to(x.dtype)


class CustomBackward(nn.Module):
    """A function that casts in the forward and reads FP32 in the backward."""

    safe = {"before.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(SIZE, SIZE, bias=False)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _ReadsInBackward.apply(self.before(x).float(), self.weight)
        return result


class Checkpointed(nn.Module):
    """The forward is done twice; both ways of torch."""

    safe = {"first.weight", "first.bias", "second.weight", "second.bias"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=True)


class DropConnect(nn.Module):
    """A weight that is read in FP32 in train mode only."""

    safe: set[str] = set()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dropout(self.weight))


class Aliased(nn.Module):
    """Two parameter objects on one memory, one of which is read in FP32; and one cut from another."""

    safe = {"fused", "part"}

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(SIZE, SIZE))
        self.other = nn.Parameter(self.one.detach())
        self.fused = nn.Parameter(torch.randn(2 * SIZE, SIZE))
        self.part = nn.Parameter(self.fused.detach()[SIZE:])

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.linear(x, self.one) * self.other.sum()
            + F.linear(F.linear(x, self.part), self.fused)[..., :SIZE]
        )


class Hidden(nn.Module):
    """A parameter that is reached past the module too: in a list, by a closure."""

    safe = {"plain"}

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.randn(SIZE, SIZE))
        self.plain = nn.Parameter(torch.randn(SIZE, SIZE))
        self.kept = [self.seen]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.seen), self.plain) * self.kept[0].mean()


class OtherCasts(nn.Module):
    """A detour through float64 loses nothing, one through another low dtype does; a copy can cast."""

    safe = {"wide", "copied"}

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(SIZE, SIZE))
        self.narrow = nn.Parameter(torch.randn(SIZE, SIZE))
        self.copied = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.get_autocast_dtype(x.device.type)
        other = torch.float16 if low == torch.bfloat16 else torch.bfloat16
        x = F.linear(x, self.wide.double().to(low)) @ self.narrow.to(other).to(low)
        return x @ torch.empty(SIZE, SIZE, dtype=low, device=x.device).copy_(self.copied)


class Written(nn.Module):
    """A weight that the forward changes, a buffer that it counts in, and a parameter that nothing uses."""

    safe = {"linear.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)
        self.clamped = nn.Parameter(torch.randn(SIZE, SIZE))
        self.idle = nn.Parameter(torch.randn(SIZE))
        self.norm = nn.BatchNorm1d(SIZE)
        self.register_buffer("calls", torch.zeros(()))
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.clamped.clamp_(-0.5, 0.5)
        self.calls += 1
        self.last = x
        self.history.append(x)
        return self.norm(self.linear(F.linear(x, self.clamped)).float())


class PastOperators(nn.Module):
    """Weights whose numbers Python takes from their memory, by no operator."""

    safe = {"plain.weight", "plain.bias"}

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.array = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.listed = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.array.weight.detach().numpy().sum()) + self.listed.weight.detach().tolist()[0][0]
        return self.listed(self.array(self.plain(x))) * scale


class ReadInEval(nn.Module):
    """Weights that are read in FP32 in eval mode only."""

    safe: set[str] = {"low.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(SIZE, SIZE, bias=False)
        self.exact = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x).float()
        with torch.autocast(x.device.type, enabled=self.training):
            return self.exact(x)


class HigherOrder(nn.Module):
    """An operator that takes functions, which read what they close over, one name before it has a value."""

    safe = {"low.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(SIZE, SIZE, bias=False)
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.low(x).float(), self.scale

        def grown(y: Tensor) -> Tensor:
            return y * scale if y.dim() > 1 else added(y)

        result: Tensor = torch.cond(x.sum() > 0, grown, lambda y: y - scale, (x,))

        def added(y: Tensor) -> Tensor:
            return y + F.linear(x, scale.expand(SIZE, SIZE))

        return added(result)


@functools.cache
def distances(length: int) -> Tensor:
    positions = torch.arange(length)
    return torch.zeros(length, length).copy_(positions[:, None] - positions) + torch.tensor([1.0])


class State:
    """What is no module."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"queue": deque([None], 2), "mean": None}


class Stateful(nn.Module):
    """A table in a cache of a function, a state in objects of a module, and a generator."""

    safe = {"linear.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)
        self.state = State()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        held, x = self.state.inner, self.linear(x).float() * distances(SIZE)[0]
        mean = x.detach().mean()
        held["mean"] = mean if held["mean"] is None else (held["mean"] + mean) / 2
        held["queue"].append(mean)
        return x * held["mean"] + torch.rand(SIZE, generator=self.generator)


class Gathered(nn.Module):
    """A weight that is copied into a constant before it is read, and one before it is cast."""

    safe = {"low"}

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(SIZE, SIZE))
        self.exact = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        low, exact = torch.zeros(SIZE, SIZE), torch.zeros(2, SIZE, SIZE)
        low[:] = self.low
        exact[0].copy_(self.exact)
        return F.linear(F.linear(x, low), self.exact) * exact[0, 0]


class Routed(nn.Module):
    """Experts that are called only if a token wants them; the tokens here want one."""

    safe = {f"experts.{index}.0.weight" for index in range(3)} | {
        f"experts.{index}.0.bias" for index in range(3)
    }

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        wanted = (x.flatten()[:1] * 0).long()
        for index in wanted.tolist():
            x = self.experts[index](x)
        return x


MODULES = (
    FusedLinear,
    EmbeddingIntoLinear,
    AutocastOff,
    CustomBackward,
    Checkpointed,
    DropConnect,
    Aliased,
    Hidden,
    OtherCasts,
    Written,
    PastOperators,
    ReadInEval,
    HigherOrder,
    Stateful,
    Gathered,
    Routed,
)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def example() -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(5))
