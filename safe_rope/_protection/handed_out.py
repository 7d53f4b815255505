"""What pinned modules have returned in FP32, where their parents keep it in buffers.

A cast of the model reaches those, too. Phases would be rounded there for good, where the module itself
returns exact ones from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import flattened
from safe_rope._protection.keeper import sent_by
from safe_rope._recognition.arguments import running
from safe_rope.rotation._cos_sin import CosSin, plain

_handed_out = ByIdentity[torch.Tensor, None]()


def note_handed_out(result: Any) -> None:
    """Remember the FP32 tensors that a module which makes only positions returns, as long as they live."""
    for leaf in flattened(result)[0]:
        if type(leaf) is torch.Tensor and leaf.dtype == torch.float32 and not leaf.requires_grad:
            _handed_out[leaf] = None


def note_copied(memo: dict[int, Any]) -> None:
    """Remember the copies of what was handed out; parents' buffers are copied before their parts."""
    for one in list(_handed_out):
        if type(copied := memo.get(id(one))) is torch.Tensor:
            _handed_out[copied] = None


def mark_above(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have what the modules that are cast by ``fn`` keep of it stay exact until it meets the model.

    Their parts are cast first.
    """
    for module in running("_apply", sys._getframe(2)):
        for name, buffer in list(module._buffers.items()):
            is_plain = type(buffer) is torch.Tensor and buffer in _handed_out
            if buffer is None or not (is_plain or _is_marked(buffer)):
                continue
            sent = sent_by(fn, torch.empty(1, device=buffer.device, dtype=buffer.dtype))
            dtype = sent.dtype
            if is_plain and dtype == buffer.dtype and sent.device != buffer.device:
                module._buffers[name] = own = fn(buffer)  # which stays when it is sent there again
                _handed_out[own] = None
            elif is_plain and dtype in LOW:
                with torch.inference_mode(False):
                    own = buffer.clone() if buffer.is_inference() else buffer
                    module._buffers[name] = CosSin(own, own.dtype, faced=True)
            elif not is_plain and dtype == torch.float32:
                module._buffers[name] = own = plain(buffer)
                _handed_out[own] = None  # for the next cast


def _is_marked(buffer: torch.Tensor) -> bool:
    return isinstance(buffer, CosSin) and buffer.table.dtype == torch.float32
