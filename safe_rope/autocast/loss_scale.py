"""The loss scale of float16: one for the engine, agreed on by all ranks, updated once for each step.

DeepSpeed gives each ZeRO optimizer a torch GradScaler, and steps it once for each parameter group, after the
norm and the clipping. Here the optimizer's loss scaler does the work, as it does for the fp16 section. It
unscales before the norm and the clipping, and all ranks decide together whether a step is skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from safe_rope.autocast import _deepspeed

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000  # steps without an overflow; both are torch.amp.GradScaler's
MINIMUM = 2.0**-14

CLIENT_STATE = "safe_rope_loss_scale"


class StepLossScaler(DynamicLossScaler):  # type: ignore[misc]
    """A loss scale that starts, halves and doubles as torch.amp.GradScaler's does, but grows between steps.

    ZeRO updates the scale before it unscales the gradients. They would then be divided by a scale that their
    loss was never multiplied with. A larger scale therefore waits for the next loss.
    """

    cur_scale: float
    _next: float | None = None

    def __init__(self) -> None:
        super().__init__(
            init_scale=INITIAL_SCALE,
            scale_window=GROWTH_INTERVAL,
            min_scale=MINIMUM,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
        )

    def update_scale(self, overflow: bool) -> None:
        before = self.cur_scale
        super().update_scale(overflow)
        if not overflow and self.cur_scale != before:
            self._next, self.cur_scale = self.cur_scale, before

    def scale_loss(self, loss: torch.Tensor) -> Any:
        if self._next is not None:
            self.cur_scale, self._next = self._next, None
        return loss * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        torch.autograd.backward(self.scale_loss(loss), retain_graph=retain_graph)

    def __reduce__(self) -> Any:
        # A checkpoint holds DeepSpeed's own class, so that it loads where safe_rope is not installed.
        plain = object.__new__(DynamicLossScaler)
        vars(plain).update(vars(self))
        waiting = vars(plain).pop("_next", None)
        plain.cur_scale = self.cur_scale if waiting is None else waiting
        return plain.__reduce__()


def install(engine: Any, stage: int) -> None:
    """Give ``engine``, which autocasts to float16, a loss scale that is right."""
    if stage == 0:
        _without_zero(engine)
    else:
        _with_zero(engine.optimizer, stage)


def _with_zero(optimizer: Any, stage: int) -> None:
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = StepLossScaler()
    optimizer.dynamic_loss_scale = True
    optimizer.check_grad_overflow = True

    def load_state_dict(load: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        if isinstance(optimizer.loss_scaler, DynamicLossScaler):
            optimizer.loss_scaler.__class__ = StepLossScaler
        else:  # of an engine in another dtype, whose scale means nothing here
            optimizer.loss_scaler = StepLossScaler()
        optimizer.dynamic_loss_scale = True
        return result

    def check_as_float16(check: Any, *args: Any, **kwargs: Any) -> Any:
        with _deepspeed.meanwhile(optimizer, dtype=torch.float16):
            return check(*args, **kwargs)

    _deepspeed.around(optimizer, "load_state_dict", load_state_dict)
    if stage == 3:  # which looks for an overflow where its parameters are float16, and these are FP32
        _deepspeed.around(optimizer, "_overflow_check_and_loss_scale_update", check_as_float16)


def _without_zero(engine: Any) -> None:
    """At ZeRO 0 the engine uses a GradScaler; its state goes into checkpoints, and a skip is counted."""
    scaler = torch.amp.GradScaler(
        device=_deepspeed.device_type(), init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL
    )
    engine.torch_autocast_z0_gradscaler = scaler

    def counted(update: Any, *args: Any, **kwargs: Any) -> None:
        before = scaler.get_scale()
        update(*args, **kwargs)
        engine.optimizer.overflow = scaler.get_scale() < before

    def save_checkpoint(
        save: Any, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        client_state = {**(client_state or {}), CLIENT_STATE: scaler.state_dict()}
        return save(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(load: Any, *args: Any, **kwargs: Any) -> Any:
        path, client_state = load(*args, **kwargs)
        state = (client_state or {}).pop(CLIENT_STATE, None)
        if state is not None:
            scaler.load_state_dict(state)
        return path, client_state

    _deepspeed.around(scaler, "update", counted)
    _deepspeed.around(engine, "save_checkpoint", save_checkpoint)
    _deepspeed.around(engine, "load_checkpoint", load_checkpoint)
