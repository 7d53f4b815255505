"""A call of a pinned module, and how it runs in FP32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import are_leaves, arguments_flattened, arguments_mapped, flattened, mapped
from safe_rope._base.torch_private import FakeTensor, is_learned, is_only_faked, pytree, version_of
from safe_rope._protection.shown import seen
from safe_rope.rotation import without_autocast

MANY = 256
"""Positions that BF16 counts without rounding; a longer call is looked at anew."""


class Call:
    """A call of a pinned module: the stock ``forward`` to run, its arguments, and the module's state.

    ``watched`` says that nothing may be kept: a transformation or a tracer looks on. ``beside`` says that a
    method that takes sines is called past the module's forward. Dynamo traces this class: it is a plain one.
    """

    def __init__(
        self,
        module: nn.Module,
        state: Any,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        watched: bool,
        beside: bool = False,
    ) -> None:
        self.module = module
        self.state = state
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.watched = watched
        self.beside = beside
        self._leaves: list[torch.Tensor] | None = None

    def with_arguments(self, args: Any, kwargs: Any) -> Call:
        """Return the call with other arguments."""
        return Call(self.module, self.state, self.forward, args, kwargs, self.watched, self.beside)

    def on(self, module: nn.Module) -> Any:
        """Run the forward on ``module``."""
        return self.forward(module, *self.args, **self.kwargs)

    def in_fp32(self, module: nn.Module) -> Any:
        """Run the forward on ``module`` in FP32: its arguments, what it holds, dtypes, and no autocast."""
        if torch.compiler.is_dynamo_compiling():
            return self._in_fp32_in_graph(module)
        with _raised_inside(module, weights=self.state.how == "results"):
            return self._on_raised(module)

    def _on_raised(self, module: nn.Module) -> Any:
        raised: list[tuple[torch.Tensor, torch.Tensor, int]] = []

        def raise_(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype not in LOW:
                return tensor
            with torch.inference_mode(False):  # where no write is counted
                higher = tensor.float()
            raised.append((tensor, higher, version_of(higher)))
            return higher

        raised_arguments = arguments_mapped(raise_, self.args, self.kwargs)
        with raised_arguments as (args, kwargs), without_autocast(self.device), seen("exact"):
            kwargs = {n: _raised_dtype(one) for n, one in kwargs.items()}
            result = self.forward(module, *map(_raised_dtype, args), **kwargs)
        own_of = {id(higher): own for own, higher, _ in raised}
        kept = [(name, own_of[id(value)]) for name, value in vars(module).items() if id(value) in own_of]
        vars(module).update(kept)
        written = {
            id(higher): own.copy_(higher) for own, higher, version in raised if version_of(higher) > version
        }
        if not written:
            return result
        return mapped(lambda leaf: written.get(id(leaf), leaf), result)

    def _in_fp32_in_graph(self, module: nn.Module) -> Any:
        raised = [*map(_raised_in, self.args)], {name: _raised_in(one) for name, one in self.kwargs.items()}
        own, higher = pytree.tree_leaves((self.args, self.kwargs)), pytree.tree_leaves(raised)
        kwargs = {name: _raised_dtype(one) for name, one in raised[1].items()}
        with without_autocast(self.device):
            result = self.forward(module, *map(_raised_dtype, raised[0]), **kwargs)
        for one, other in zip(own, higher, strict=True):
            is_raised = isinstance(one, torch.Tensor) and one.dtype in LOW
            if is_raised and self.state.code.writes and _may_be_written_to(one):
                one.copy_(other)
        return result

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors among the arguments; they are looked for once."""
        if self._leaves is None:
            if torch.compiler.is_dynamo_compiling():
                leaves = pytree.tree_leaves((self.args, self.kwargs))
            else:
                leaves = arguments_flattened(self.args, self.kwargs)
            self._leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self._leaves

    @property
    def is_faked(self) -> bool:
        """Whether all tensors among the arguments are fake ones, which go where real ones would."""
        return self.watched and is_only_faked() and {type(leaf) for leaf in self.leaves} == {FakeTensor}

    @property
    def held_low(self) -> list[str]:
        """Names of what the module holds of low precision, dtypes too, and that is no table and no weight."""
        held = [*self.module._buffers.items()]
        if not torch.compiler.is_dynamo_compiling():  # before torch 2.8 it takes no items of a ``__dict__``
            held += self.module.__dict__.items()
        return [name for name, value in held if name not in self.state.pins and _is_low(value)]

    @property
    def device(self) -> str:
        """The type of the device of the first tensor."""
        return self.leaves[0].device.type if self.leaves else "cpu"

    @property
    def autocast(self) -> bool:
        """Whether torch.autocast is on where the arguments are."""
        return self.device != "meta" and torch.is_autocast_enabled(self.device)

    @property
    def has_low(self) -> bool:
        """Whether any tensor among the arguments is of low precision, or any argument is such a dtype."""
        return any(leaf.dtype in LOW for leaf in self.leaves) or any(
            _raised_dtype(one) is not one for one in (*self.args, *self.kwargs.values())
        )


def call_key(call: Call) -> tuple[Any, ...]:
    """Return what calls have in common for which the stock forward returns the same dtypes."""
    given: Any = (*call.args, *call.kwargs.values())
    structure: Any = len(call.args), *call.kwargs
    if not are_leaves(given):
        given, _ = flattened((call.args, call.kwargs))
        structure = str(pytree.tree_structure((call.args, call.kwargs)))
    dtypes = tuple(map(_kind, given))
    are_many = any([leaf.dtype in LOW and leaf.numel() > MANY for leaf in call.leaves])
    nominal, pins = tuple(call.state.nominal.values()), call.state.pins
    # A buffer that is no table may be there for its dtype.
    beside = tuple([b.dtype for n, b in call.module._buffers.items() if n not in pins and b is not None])
    return call.forward, dtypes, structure, nominal, beside, call.module.training, call.autocast, are_many


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return (argument,) if isinstance(argument, torch.dtype) else type(argument)


def _may_be_written_to(tensor: torch.Tensor) -> bool:
    """Whether autograd lets somebody write to a tensor; a forward that has written to it knows."""
    return not (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf)


@contextlib.contextmanager
def _raised_inside(module: nn.Module, *, weights: bool) -> Iterator[None]:
    """Have in FP32 what a module holds, which may be there for its dtype, or be a table; dtypes, too.

    ``weights``: its own ones too, with their gradients.
    """
    raised: list[tuple[dict[str, Any], str, Any, Any, int]] = []
    parameters: Any = module._parameters
    trained: dict[str, Any] = {}
    if weights and any(_is_of_low(weight) for weight in parameters.values()):
        trained = vars(module)["_parameters"] = dict(parameters)  # the module shares its own with a stand-in
    places: tuple[dict[str, Any], ...] = module._buffers, vars(module), trained
    for place in places:
        for name, own in list(place.items()):
            if not (_is_of_low(own) if place is trained else _is_low(own)):
                continue
            is_dtype = isinstance(own, torch.dtype)
            with torch.inference_mode(False):
                higher: Any = torch.float32 if is_dtype else own.float()
            place[name] = higher
            raised.append((place, name, own, higher, 0 if is_dtype else version_of(higher)))
    try:
        yield
    finally:
        for place, name, own, now, version in raised:
            if place.get(name) is not now:
                continue  # the forward has put something else there
            place[name] = own
            if isinstance(now, torch.Tensor) and version_of(now) > version:
                with torch.set_grad_enabled(torch.is_grad_enabled() and place is not trained):
                    own.copy_(now)
        if trained:
            parameters.update(trained)
            vars(module)["_parameters"] = parameters


def _is_of_low(weight: Any) -> bool:
    return weight is not None and weight.dtype in LOW


def _is_low(value: Any) -> bool:
    """Whether a value that a module holds is a low dtype, or a tensor of one and nothing that is trained."""
    if isinstance(value, torch.Tensor):
        return value.dtype in LOW and not is_learned(value)
    return isinstance(value, torch.dtype) and value in LOW


def _raised_dtype(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in LOW else argument


def _holds_low(argument: Any) -> bool:
    """Whether an argument is, or holds, a tensor of low precision: what holds one is not raised in place."""
    low = [one.dtype in LOW for one in pytree.tree_leaves(argument) if isinstance(one, torch.Tensor)]
    return any(low)


def _raised_in(argument: Any) -> Any:
    """Return an argument in FP32: itself where nothing in it is of low precision, else another container."""
    return pytree.tree_map_only(torch.Tensor, _raised, argument) if _holds_low(argument) else argument


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor
