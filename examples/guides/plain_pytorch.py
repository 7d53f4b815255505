import torch
from torch import nn

import safe_rope


class Attention(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, q, k, positions):
        phase = positions[..., None] * self.inv_freq
        return safe_rope.rotation.apply_rotary(q, k, phase.cos(), phase.sin(), layout="half")


with safe_rope.guard(strict=True) as session:
    model = Attention()

print(session.report)
model.to(torch.bfloat16)  # inv_freq stays FP32
assert model.inv_freq.dtype == torch.float32
