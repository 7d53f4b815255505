"""Tables that are made, filled or moved where torch initialises, casts, loads, trains or unpickles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, style


@style("own _apply", inv_freq="inv_freq", exact=half_width)
class TakenAsideByItsApply(nn.Module):
    """Its table is in no dictionary while torch casts the rest."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        table = self._buffers.pop("inv_freq")
        super()._apply(fn, recurse)
        self._buffers["inv_freq"] = table
        return self

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("lazy", "__setstate__", inv_freq="inv_freq", exact=half_width)
class MadeInSetstate(nn.Module):
    """Makes its frequencies anew after unpickling; nobody unpickles it here."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["_buffers"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register_buffer("inv_freq", _frequencies(self.dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


class Initialised(nn.Module):
    """A base that calls ``post_init`` of its class, which initialises every part."""

    def post_init(self) -> None:
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        raise NotImplementedError


class BareRope(nn.Module):
    """Has room for frequencies."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", torch.empty(dim // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("filled later", inv_freq="rope.inv_freq", exact=half_width)
class FilledByInitWeights(Initialised):
    """Fills its child's frequencies where weights are initialised."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rope = BareRope(dim)
        self.mix = nn.Linear(dim, dim)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BareRope):
            module.inv_freq.copy_(_frequencies(module.dim))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


class Zeros(nn.Module):
    """Holds zeros, under a name that says nothing, until somebody fills them; takes no sines."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv", torch.zeros(dim // 2), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return torch.arange(length)[:, None] * self.inv


@style("filled later", inv_freq="phases.inv", exact=half_width)
class ZerosFilledLater(Initialised):
    """Fills its child's zeros where weights are initialised, and takes sines of what that returns."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.phases = Zeros(dim)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Zeros):
            module.inv.copy_(_frequencies(2 * len(module.inv)))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.phases(x.shape[1])
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("filled later", inv_freq="rope.inv_freq", exact=half_width)
class OnesFilledLater(nn.Module):
    """Overwrites the ones that its child holds as frequencies."""

    class Rope(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(dim // 2), persistent=False)

        def forward(self, x: torch.Tensor) -> Pair:
            phase = torch.arange(x.shape[1])[:, None] * self.inv_freq
            return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rope = OnesFilledLater.Rope(dim)
        with torch.no_grad():
            self.rope.inv_freq.copy_(_frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


class RopeFactory(nn.Module):
    """Is built by a class method."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @classmethod
    def from_dim(cls, dim: int, base: float = 10000.0) -> RopeFactory:
        return cls(base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("factory", inv_freq="rope.inv_freq", exact=half_width)
class FromAClassMethod(nn.Module):
    """Its parent builds it by a class method that computes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = RopeFactory.from_dim(DIM)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


@style("resets", inv_freq="inv_freq", exact=half_width)
class MadeAnewInTrain(nn.Module):
    """``train`` makes the table anew."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def train(self, mode: bool = True) -> MadeAnewInTrain:
        self.register_buffer("inv_freq", _frequencies(self.dim), persistent=False)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("state dict", inv_freq="inv_freq", exact=half_width)
class RenamesOnLoad(nn.Module):
    """A load hook renames an old key of its table."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "freqs" in state_dict:
            state_dict[prefix + "inv_freq"] = state_dict.pop(prefix + "freqs")

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)
