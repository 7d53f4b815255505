"""Tensor constructors that nobody has replaced.

``deepspeed.zero.Init`` puts wrappers in the place of ``torch.empty`` and its siblings. The functions below
are the C++ bindings that those names came from, so that they are the originals even when this module is first
imported while a wrapper stands in front of them. Call them with an explicit ``dtype`` and ``device``: then
neither the default dtype nor a ``torch.device`` context has a say.
"""

from __future__ import annotations

import torch

arange = torch._C._VariableFunctions.arange
empty = torch._C._VariableFunctions.empty
tensor = torch._C._VariableFunctions.tensor
