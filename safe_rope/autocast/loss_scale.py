"""The loss scale of float16: one for the engine, agreed on by all ranks, updated once for each step.

DeepSpeed gives each ZeRO optimizer a torch GradScaler, and steps it once for each parameter group, after the
norm and the clipping. Here the optimizer's own loss scaler does the work, as it does for the fp16 section:
it unscales before the norm and the clipping, and all ranks decide together whether a step is skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from safe_rope.autocast import _deepspeed

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000  # steps without an overflow; both are torch.amp.GradScaler's
MINIMUM = 2.0**-14

CLIENT_STATE = "safe_rope_loss_scale"


@functools.cache
def _scaler_class() -> type[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    class StepLossScaler(DynamicLossScaler):  # type: ignore[misc]
        """A dynamic loss scale that grows between two steps.

        ZeRO updates the scale before it unscales the gradients, which would then be divided by a scale that
        their loss was never multiplied with: a larger one waits for the next loss.
        """

        cur_scale: float
        _next: float | None = None

        def update_scale(self, overflow: bool) -> None:
            before = self.cur_scale
            super().update_scale(overflow)
            if not overflow and self.cur_scale != before:
                self._next, self.cur_scale = self.cur_scale, before

        def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
            if self._next is not None:
                self.cur_scale, self._next = self._next, None
            return loss * self.cur_scale

        def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
            torch.autograd.backward(self.scale_loss(loss), retain_graph=retain_graph)

        def __reduce__(self) -> Any:
            # A checkpoint holds DeepSpeed's own class, so that it loads where safe_rope is not installed.
            state = {name: value for name, value in vars(self).items() if name != "_next"}
            if self._next is not None:
                state["cur_scale"] = self._next
            return _plain_scaler, (state,)

    return StepLossScaler


def _plain_scaler(state: dict[str, Any]) -> Any:
    return _fill(_base_class(), state)


def _base_class() -> type[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler  # type: ignore[no-any-return]


def _fill(cls: type[Any], state: dict[str, Any]) -> Any:
    scaler: Any = object.__new__(cls)
    vars(scaler).update(state)
    return scaler


def new_scaler() -> Any:
    """A loss scale that starts, halves and doubles as torch.amp.GradScaler's does."""
    return _scaler_class()(
        init_scale=INITIAL_SCALE,
        scale_window=GROWTH_INTERVAL,
        min_scale=MINIMUM,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )


def install(engine: Any, stage: int) -> None:
    """Give ``engine``, which autocasts to float16, a loss scale that is right."""
    if stage == 0:
        _without_zero(engine)
    else:
        _with_zero(engine.optimizer, stage)


def _with_zero(optimizer: Any, stage: int) -> None:
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = new_scaler()
    optimizer.dynamic_loss_scale = True
    optimizer.check_grad_overflow = True
    if stage == 3:
        _check_at_stage_3(optimizer)
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        scaler = optimizer.loss_scaler
        if not isinstance(
            scaler, _base_class()
        ):  # of an engine in another dtype, whose scale means nothing here
            optimizer.loss_scaler = new_scaler()
        elif not isinstance(scaler, _scaler_class()):
            optimizer.loss_scaler = _fill(_scaler_class(), dict(vars(scaler)))
        optimizer.dynamic_loss_scale = True
        return result

    optimizer.load_state_dict = load_state_dict


def _check_at_stage_3(optimizer: Any) -> None:
    """ZeRO 3 looks for an overflow where its parameters are float16, and these are FP32."""
    check = optimizer._overflow_check_and_loss_scale_update

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> Any:
        dtype, optimizer.dtype = optimizer.dtype, torch.float16
        try:
            return check(*args, **kwargs)
        finally:
            optimizer.dtype = dtype

    optimizer._overflow_check_and_loss_scale_update = checked


def _without_zero(engine: Any) -> None:
    """At ZeRO 0 the engine uses a GradScaler; its state goes into checkpoints, and a skip is counted."""
    scaler = torch.amp.GradScaler(
        device=_deepspeed.device_type(), init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL
    )
    engine.torch_autocast_z0_gradscaler = scaler
    update = scaler.update

    @functools.wraps(update)
    def counted(*args: Any, **kwargs: Any) -> None:
        before = scaler.get_scale()
        update(*args, **kwargs)
        engine.optimizer.overflow = scaler.get_scale() < before

    scaler.update = counted  # type: ignore[method-assign]
    _keep_in_checkpoints(engine, scaler)


def _keep_in_checkpoints(engine: Any, scaler: Any) -> None:
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, client_state: Any = None, **kwargs: Any) -> Any:
        client_state = {**(client_state or {}), CLIENT_STATE: scaler.state_dict()}
        return save(save_dir, tag=tag, client_state=client_state, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load(*args, **kwargs)
        state = (client_state or {}).pop(CLIENT_STATE, None)
        if state is not None:
            scaler.load_state_dict(state)
        return path, client_state

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint
