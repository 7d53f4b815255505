"""A model file whose attention keeps the application function as an attribute, as some releases write it."""

SOURCE = '''
import torch
import torch.nn.functional as F
from torch import nn


class HeldRotary(nn.Module):
    def __init__(self, dim=16, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        phase = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.cat((phase, phase), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class HeldAttention(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.rotary_fn = apply_rotary_pos_emb
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, cos, sin):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        q, k = self.rotary_fn(q, k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class HeldModel(nn.Module):
    def __init__(self, rotary_first=True):
        super().__init__()
        if rotary_first:
            self.rotary = HeldRotary()
        self.attention = HeldAttention()
        if not rotary_first:
            self.rotary = HeldRotary()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(values.bfloat16())

    def forward(self, x):
        cos, sin = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(x, cos, sin)


def states(model):
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    return x.to(model.attention.qkv.weight.dtype)


def output(model):
    with torch.no_grad():
        return model(states(model))


def held(model):
    """The function that the attention holds."""
    return model.attention.rotary_fn
'''
