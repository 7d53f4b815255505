"""ZeRO 3: know which parameters were gathered in the autocast dtype, and gather the persistent ones so.

DeepSpeed gathers a marked parameter in the autocast dtype wherever a forward or backward needs it, and most
are given up after that. Those that stay are the persistent ones (at most stage3_param_persistence_threshold
elements) and what is soon used again. GatheredParameters, which may write back what it finds, and a forward
outside of autocast find them; they get FP32 values then, gathered again from the partitions, which always
are FP32.

Persistent parameters are gathered after the step, which DeepSpeed does in FP32. Of a safe parameter the
forward uses nothing but a cast to the autocast dtype, so the cast may come before that gather too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from safe_rope.autocast import _deepspeed


class LowPrecisionFetches:
    """The gathers of one ZeRO 3 engine's safe parameters in the autocast dtype.

    Args:
        engine: of ZeRO 3; what it gathers is watched from now on.
        safe: the marked parameters.
        after_step: gather its persistent parameters in the autocast dtype after the step.

    """

    def __init__(self, engine: Any, safe: Iterable[nn.Parameter], after_step: bool) -> None:
        self._safe = {id(p): p for p in safe if _deepspeed.can_gather_again(p)}
        self._low: dict[int, nn.Parameter] = {}  # those whose last gather was in the autocast dtype
        for parameter in engine.module.parameters():  # any of them may be asked to gather others
            _deepspeed.before_gathers(parameter, self._before_all_gather, self._before_fetch)
        self._persistent = [
            p for p in _deepspeed.persistent_parameters(engine.optimizer) if id(p) in self._safe
        ]
        if after_step and self._persistent:
            _deepspeed.around(engine.optimizer, "_post_step", self._after_step)

    @property
    def rounded(self) -> bool:
        """Whether a parameter is there in full and holds values of the autocast dtype."""
        return any(_deepspeed.is_gathered(parameter) for parameter in self._low.values())

    def restore(self) -> None:
        """Give FP32 values to what is rounded. Every rank has to call it."""
        self._before_all_gather(list(self._low.values()))

    @property
    def process_groups(self) -> list[Any]:
        """The groups of ranks that parameters which are rounded now are partitioned over."""
        low: list[Any] = list(self._low.values())
        return [parameter.ds_process_group for parameter in low]

    def _after_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _deepspeed.fetch(self._persistent)
        low = {id(p): p for p in self._persistent if self._low.pop(id(p), None) is not None}
        result = original(*args, **kwargs)  # gathers what is still missing
        self._low |= low
        return result

    def _before_fetch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self._low.pop(id(parameter), None)
            if id(parameter) in self._safe and _deepspeed.is_marked(parameter):
                self._low[id(parameter)] = parameter

    def _before_all_gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """What is partitioned will be gathered in FP32; give those values to what is not."""
        low = [p for p in parameters if self._low.pop(id(p), None) is not None]
        _deepspeed.gather_in_place([p for p in low if _deepspeed.is_gathered(p)])
