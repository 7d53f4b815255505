"""The arithmetic of rotary position embedding on q and k, in five implementations that agree bit for bit.

For each pair (x1, x2) of elements and its angle, in FP32:

    out1 = x1 * cos - x2 * sin
    out2 = x2 * cos + x1 * sin

Every product and every sum is a separate IEEE operation; a fused multiply-add would give other bits on
another device. out1 and out2 are rounded once to x's dtype. The gradient is the rotation of the output's
gradient by the negative angle, in the same arithmetic.

* ``_few``: plain torch, as few operations as it takes. Few tokens on CPU, as in decoding.
* ``_eager``: plain torch, in blocks that stay in the cache. Any device.
* ``_compiled``: one inductor kernel on CPU, floating-point contraction switched off.
* ``_fused``: not called, but made a part of inductor's own loops. Few tokens on CPU in a graph.
* ``_triton``: one Triton kernel on CUDA for q and k, compiled with ``enable_fp_fusion=False``.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
"""

from safe_rope.rotation.kernels._form import Form
from safe_rope.rotation.kernels._operator import rotate, rotate_

__all__ = ["Form", "rotate", "rotate_"]
