"""What few people write, and some do: other ways to register, to build, to call, and to keep a table."""

from __future__ import annotations

import collections
import functools
import io
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.registry import DIM, LONGEST, style


def frequencies(dim: int = DIM, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


def tables(dim: int = DIM, length: int = LONGEST) -> Pair:
    phase = torch.outer(torch.arange(length).float(), frequencies(dim))
    return phase.cos(), phase.sin()


@style("unusual", "buffer", inv_freq="inv_freq", exact=half_width)
class FlashRotary(nn.Module):
    """flash-attn's: a cache in the dtype of x, from frequencies that are made anew if they are not FP32."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.register_buffer("inv_freq", self._compute(), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None

    def _compute(self, device: Any = None) -> torch.Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / (self.base ** (steps / self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        if x.shape[1] > self._seq_len_cached or self._cos_cached.dtype != x.dtype:
            self._seq_len_cached = x.shape[1]
            t = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
            fp32 = self.inv_freq.dtype == torch.float32
            inv_freq = self.inv_freq if fp32 else self._compute(device=x.device)
            freqs = torch.outer(t, inv_freq)
            self._cos_cached, self._sin_cached = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
        return self._cos_cached[: x.shape[1]], self._sin_cached[: x.shape[1]]


@style("unusual", "buffer", inv_freq="inv_freq", exact=half_width)
class MadeInResetParameters(nn.Module):
    """A method that a trainer calls again fills the buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", torch.empty(dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(frequencies(self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "attribute")
class InAnOrderedDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: collections.OrderedDict[str, torch.Tensor] = collections.OrderedDict()
        self.cache["cos"], self.cache["sin"] = tables()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cache["cos"][: x.shape[1]].to(x.dtype), self.cache["sin"][: x.shape[1]].to(x.dtype)


@style("unusual", "attribute")
class InADeque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent = collections.deque([tables()], maxlen=2)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.recent[-1]
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


@style("unusual", "closure")
class InAPartial(nn.Module):
    """The tables are arguments of a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = functools.partial(self._rows, *tables())

    @staticmethod
    def _rows(cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor) -> Pair:
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rows(x)


@style("unusual", "closure")
class InADefaultArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cos, sin = tables()
        self.rows = lambda x, cos=cos, sin=sin: (cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype))

    def forward(self, x: torch.Tensor) -> Pair:
        rows: Pair = self.rows(x)
        return rows


@style("unusual", "buffer", inv_freq="rope.inv_freq", exact=half_width)
class ChildRegistersOnItsParent(nn.Module):
    """The parent's buffer is put there by its child."""

    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.register_buffer("inv_freq", frequencies(), persistent=False)
            phase = torch.outer(torch.arange(LONGEST).float(), self.inv_freq)
            parent.register_buffer("cos", phase.cos(), persistent=False)
            parent.register_buffer("sin", phase.sin(), persistent=False)

    def __init__(self) -> None:
        super().__init__()
        self.rope = ChildRegistersOnItsParent.Child(self)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("unusual", "attribute", inv_freq="inv_freq", exact=half_width)
class OwnSetattr(nn.Module):
    """Every tensor that is assigned becomes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = frequencies()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and name not in self._buffers:
            self.register_buffer(name, value, persistent=False)
        else:
            super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "buffer", inv_freq="theta", exact=half_width)
class FreqsUnderAProperty(nn.Module):
    """The buffer has another name than what everybody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_theta", frequencies(), persistent=False)

    @property
    def theta(self) -> torch.Tensor:
        return self._theta

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.theta.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "buffer", inv_freq="inv_freq", exact=half_width)
class ForwardIsAnotherMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def rotate(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

    forward = rotate


@style("unusual", "buffer", inv_freq="inv_freq", exact=half_width)
class OwnCall(nn.Module):
    """``__call__`` is overridden, and no hook of torch's runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def __call__(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "hook")
class ByAPreHook(nn.Module):
    """A hook fills in the tables before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_forward_pre_hook(ByAPreHook.fill)

    def fill(self, args: Any) -> None:
        phase = torch.outer(torch.arange(args[0].shape[1]).float(), self.inv_freq.float())
        self.now = phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.now[0].to(x.dtype), self.now[1].to(x.dtype)


@style("unusual", "buffer")
class FromAFile(nn.Module):
    """The constructor loads its table."""

    def __init__(self) -> None:
        super().__init__()
        file = io.BytesIO()
        torch.save(torch.stack(tables()), file)
        file.seek(0)
        self.register_buffer("table", torch.load(file), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[:, : x.shape[1]].to(x.dtype)


@style("unusual", "frozen", roundings=2)
class PretrainedEmbedding(nn.Module):
    """``Embedding.from_pretrained`` of sinusoids, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.cat(tables(), -1), freeze=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.arange(x.shape[1])).to(x.dtype)


@style("unusual", "thread", inv_freq="ropes.0.inv_freq")
class BuiltInThreads(nn.Module):
    """A pool builds the layers."""

    class Layer(nn.Module):
        def __init__(self, base: float) -> None:
            super().__init__()
            self.register_buffer("inv_freq", frequencies(base=base), persistent=False)

        def forward(self, x: torch.Tensor) -> Pair:
            phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
            return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        with ThreadPoolExecutor(2) as pool:
            self.ropes = nn.ModuleList(pool.map(BuiltInThreads.Layer, (1e4, 5e5)))

    def forward(self, x: torch.Tensor) -> tuple[Pair, ...]:
        return tuple(rope(x) for rope in self.ropes)


@style("unusual", "matrix")
class RotationMatrices(nn.Module):
    """One matrix [dim, dim] for each position."""

    def __init__(self, dim: int = 8, length: int = LONGEST) -> None:
        super().__init__()
        cos, sin = tables(dim, length)
        matrix = torch.zeros(length, dim, dim)
        for i in range(dim // 2):
            matrix[:, 2 * i, 2 * i], matrix[:, 2 * i, 2 * i + 1] = cos[:, i], -sin[:, i]
            matrix[:, 2 * i + 1, 2 * i], matrix[:, 2 * i + 1, 2 * i + 1] = sin[:, i], cos[:, i]
        self.register_buffer("R", matrix, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.R[: x.shape[1]].to(x.dtype)


@style("unusual", "formula", inv_freq="inv_freq", exact=half_width)
class ByLogspace(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.logspace(0, -4 * (dim - 2) / dim, dim // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "formula", inv_freq="bands", exact=half_width)
class ByARunningProduct(nn.Module):
    """Each frequency is the one before it times a constant."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratio = torch.full((dim // 2,), 10000.0 ** (-2 / dim))
        ratio[0] = 1.0
        self.register_buffer("bands", ratio.cumprod(0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.bands.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "formula", inv_freq="inv_freq", exact=half_width)
class ByExp2(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.register_buffer("inv_freq", torch.exp2(-steps * math.log2(1e4)).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "trained", "unharmed", inv_freq="inv_freq", roundings=2)
class TrainedFrequencies(nn.Module):
    """A parameter like any other: it has the dtype that the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Parameter(frequencies())

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "low on purpose")
class LowOnPurpose(nn.Module):
    """Its author rounds the finished table to BF16."""

    def __init__(self) -> None:
        super().__init__()
        cos, sin = tables()
        self.register_buffer("cos", cos.to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", sin.to(torch.bfloat16), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


_ALIVE: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


@style("unusual", "buffer", inv_freq="inv_freq", exact=half_width, reset=_ALIVE.clear)
class OnePerSize(nn.Module):
    """The same instance for the same size, as long as one lives."""

    def __new__(cls, dim: int = DIM) -> Any:
        return _ALIVE.get(dim) or super().__new__(cls)

    def __init__(self, dim: int = DIM) -> None:
        if dim in _ALIVE:
            return
        super().__init__()
        _ALIVE[dim] = self
        self.register_buffer("inv_freq", frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("unusual", "buffer", inv_freq="inv_freq", exact=twice)
class MadeAnewOnEveryMove(nn.Module):
    """``_apply`` makes the cache again from what the frequencies are by then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.fill()

    def fill(self) -> None:
        phase = torch.outer(torch.arange(LONGEST).float(), self.inv_freq.float()).repeat(1, 2)
        self.cos, self.sin = phase.cos(), phase.sin()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn)
        self.fill()
        return self

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("unusual", "buffer")
class PhasesInABuffer(nn.Module):
    """Kandinsky's: positions times frequencies, whose name says nothing; sines are taken of its rows."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer(
            "args", torch.outer(torch.arange(LONGEST).float(), frequencies(dim)), persistent=False
        )

    def forward(self, x: torch.Tensor) -> Pair:
        args = self.args[: x.shape[1]]
        return args.cos().to(x.dtype), args.sin().to(x.dtype)


@style("unusual", "parameters", inv_freq="inv_freq", exact=half_width)
class AsksItsParameters(nn.Module):
    """The table goes to the device that its weight is on; the weight is never used for it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("inv_freq", torch.empty(dim // 2), persistent=False)
        self.inv_freq.copy_(frequencies(dim).to(self.weight.device))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)
