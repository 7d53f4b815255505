"""What stands in for a model's tensors while a step is traced: fakes, or aliases of the real memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base.tensors import tensors
from safe_rope._base.torch_private import FakeTensor, FakeTensorMode, storage_key, undispatched
from safe_rope.autocast._operators import Operator, Watch, is_operator
from safe_rope.autocast.safety import moves
from safe_rope.autocast.safety.flow import Flow
from safe_rope.autocast.safety.parameters import Shared, WeakStorage, full_shape, is_partitioned, storage_of

_CONSTANT = 2.0**-10
"""What every element is of a parameter that is not here; small, so that no activation grows."""


class StandIns:
    """Parameters on the memory of the real ones, without their hooks and gradients; copies of buffers.

    A parameter that is not there as a whole (partitioned, on another device) becomes one number, seen in its
    full shape. ``flow`` follows each parameter of ``groups`` and its stand-in; the step runs on ``device``.
    """

    def __init__(self, groups: list[Shared], flow: Flow, device: torch.device) -> None:
        self.real_bytes = 0
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        for group in groups:
            for parameter in group.parameters:
                self._made[id(parameter)] = stand_in = self._make(parameter)
                flow.follow(parameter, group)
                flow.follow(stand_in, group)

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the stand-in of a parameter of the model; always the same."""
        return self._made.get(id(parameter), parameter)

    def trainable(self) -> list[nn.Parameter]:
        """Return the stand-ins that want gradients."""
        return [stand_in for stand_in in self._made.values() if stand_in.requires_grad]

    def value(self, tensor: Tensor, own: bool = False) -> Tensor:
        """Return what the step gets in place of a tensor; ``own`` memory where it may write to it."""
        if tensor.is_meta:
            return torch.zeros_like(tensor, device=self._device)
        # A tensor made in inference mode cannot take part in autograd; its copy can.
        value = tensor.detach() if own else tensor
        return value.to(self._place(tensor), copy=own or tensor.is_inference())

    def _place(self, tensor: Tensor) -> torch.device:
        # A model can be spread over several devices of the kind; one that is elsewhere will be moved there.
        return tensor.device if tensor.device.type == self._device.type else self._device

    def _make(self, parameter: nn.Parameter) -> nn.Parameter:
        if is_partitioned(parameter) or parameter.device.type != self._device.type:
            value = _CONSTANT if parameter.is_floating_point() or parameter.is_complex() else 0
            constant = torch.full((), value, dtype=parameter.dtype, device=self._device)
            return nn.Parameter(constant.expand(full_shape(parameter)), parameter.requires_grad)
        self.real_bytes += parameter.numel() * parameter.element_size()
        stand_in = nn.Parameter(parameter.detach(), parameter.requires_grad)
        if stand_in.requires_grad:
            hooked: Any = stand_in
            hooked.register_post_accumulate_grad_hook(_forget_gradient)
        return stand_in


class Constants:
    """What a traced step computes from constants alone, such as a mask of positions, computed for real.

    A model may keep such a tensor outside of itself for good, in a cache of a function, say.
    """

    def __init__(self) -> None:
        self._known: dict[int | None, Any] = {}  # storages, each held by a weak reference
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let new tensors be fake meanwhile."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def run(self, func: Operator, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator for real where all that it is given is known; else on fake tensors."""
        if not is_operator(func):
            return func(*args, **keywords)
        if self._paused or not self._is_known(func, args, keywords):
            for tensor in moves.written(func, args, keywords):
                self._known.pop(_key(tensor), None)
            return func(*args, **keywords)
        with undispatched():
            result = func(*args, **keywords)
        for tensor in tensors(result):
            self._known.setdefault(_key(tensor), WeakStorage(tensor.untyped_storage()))
        return result

    def _is_known(self, func: Operator, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        given = list(tensors((args, keywords)))
        if moves.lifts(func):
            return not any(isinstance(tensor, FakeTensor) for tensor in given)
        return str(keywords.get("device")) != "meta" and all(_key(tensor) in self._known for tensor in given)


def _key(tensor: Tensor) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage_key(storage)


@contextlib.contextmanager
def fake_tensors() -> Iterator[Constants]:
    """Let tensors hold no memory, but for constants; keep torch from logging what is tried for real next."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    torch_logger.addFilter(_nothing)
    constants = Constants()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Watch(constants.run, higher_order=True):
            yield constants
    finally:
        torch_logger.removeFilter(_nothing)


class FakeStandIns(StandIns):
    """Tensors without memory; to be made and used inside `fake_tensors`."""

    def __init__(self, groups: list[Shared], flow: Flow, device: torch.device, constants: Constants) -> None:
        self._constants = constants
        super().__init__(groups, flow, device)

    def value(self, tensor: Tensor, own: bool = False) -> Tensor:
        """Return a fake tensor like the tensor, on the device of the step."""
        place = self._place(tensor)
        with self._constants.paused():
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
        return fake.requires_grad_(tensor.requires_grad)

    def _make(self, parameter: nn.Parameter) -> nn.Parameter:
        with self._constants.paused():
            fake = torch.empty(full_shape(parameter), dtype=parameter.dtype, device=self._place(parameter))
        return nn.Parameter(fake, parameter.requires_grad)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _forget_gradient(stand_in: Tensor) -> None:
    stand_in.grad = None
