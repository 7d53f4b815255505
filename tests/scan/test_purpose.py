"""What reaches positions or frequencies of a model is an error or a warning; the same idiom elsewhere a note.

The verdicts are a reviewer's: each case is code as published packages have it, cut to what decides.
"""

from __future__ import annotations

import pytest

from safe_rope.scan.run.analyze import analyze

MODULE = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
NOT_POSITIONS = {
    "Gaussian window": """
        class Blur(nn.Module):
            def __init__(self, size, sigma):
                super().__init__()
                x = torch.arange(size, dtype=torch.float32) - size // 2
                kernel = torch.exp(-(x ** 2) / (2 * sigma ** 2))
                self.register_buffer("kernel", kernel / kernel.sum())
            def forward(self, x):
                return F.conv1d(x, self.kernel)""",
    "in-place Gaussian window": """
        class Loss(nn.Module):
            def window(self, size, dtype):
                coords = torch.arange(size, dtype=dtype)
                coords -= size // 2
                g = torch.exp(-(coords**2) / 2)
                return g / g.sum()""",
    "Hann window": """
        class Stft(nn.Module):
            def __init__(self, n):
                super().__init__()
                t = torch.arange(n, dtype=torch.float32)
                self.register_buffer("window", 0.5 - 0.5 * torch.cos(2 * math.pi * t / n))""",
    "DCT": """
        class Dct(nn.Module):
            def __init__(self, n_in, n_out):
                super().__init__()
                n = torch.arange(float(n_in))
                k = torch.arange(float(n_out)).unsqueeze(1)
                self.dct = torch.cos(math.pi / float(n_in) * (n + 0.5) * k)""",
    "deltas of a spectrogram": """
        class Deltas(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.register_buffer("kernel", torch.arange(-n, n + 1, dtype=torch.float32).repeat(80, 1, 1))
            def forward(self, x):
                return F.conv1d(x, self.kernel, groups=80)""",
    "sinc filters": """
        class SincConv(nn.Module):
            def __init__(self, n, rate):
                super().__init__()
                self.n_ = 2 * math.pi * torch.arange(-n, 0.0).view(1, -1) / rate
            def forward(self, low):
                return torch.sin(torch.matmul(low, self.n_)) / self.n_""",
    "mel filter bank": """
        class Mel(nn.Module):
            def __init__(self, low, high, n):
                super().__init__()
                mels = torch.linspace(low, high, n + 2)
                hertz = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
                self.register_buffer("centres", hertz)
            def forward(self, spectrogram):
                return torch.matmul(spectrogram, self.centres)""",
    "radial basis": """
        class Smearing(nn.Module):
            def __init__(self, start, stop, n):
                super().__init__()
                offset = torch.linspace(start, stop, n)
                self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
                self.register_buffer("offset", offset)
            def forward(self, dist):
                dist = dist.view(-1, 1) - self.offset.view(1, -1)
                return torch.exp(self.coeff * torch.pow(dist, 2))""",
    "spherical harmonics": """
        class Harmonics(nn.Module):
            def __init__(self, lmax):
                super().__init__()
                powers, scale = self.coefficients(lmax)
                self.register_buffer("powers", powers)
                self.register_buffer("scale", scale)
            def coefficients(self, lmax):
                m = torch.arange(1, lmax + 1, dtype=torch.float64)[:, None]
                p = torch.arange(0, lmax + 1, dtype=torch.float64)[None, :]
                return torch.stack([p.expand(4, 4), m - p]), torch.cos(0.5 * math.pi * (m - p))
            def forward(self, x: torch.Tensor):
                return torch.pow(x[..., None], self.powers) * self.scale""",
    "wave numbers": """
        class Ewald(nn.Module):
            def vectors(self):
                k = torch.arange(0, self.k_max + 1, dtype=self.alpha.dtype)
                k = torch.cat([k, -k[1:]])
                grid = torch.cartesian_prod(k, k, k)
                return grid[torch.sum(grid**2, dim=1) <= self.k_max]""",
    "pixels that an image is warped to": """
        def warp_grid(height, width, dtype):
            xs = torch.arange(width, dtype=dtype)
            ys = torch.arange(height, dtype=dtype)
            xs = (xs / (width - 1) - 0.5) * 2
            ys = (ys / (height - 1) - 0.5) * 2
            return torch.stack(torch.meshgrid([xs, ys]), dim=-1)""",
    "sampled by a grid": """
        class Warp(nn.Module):
            def forward(self, image, flow):
                xs = torch.arange(image.shape[-1], dtype=image.dtype)
                grid = xs[None] + flow
                return F.grid_sample(image, 2 * grid / image.shape[-1] - 1)""",
    "share of a blended tile": """
        class Vae(nn.Module):
            def blend(self, a, b, extent):
                positions = torch.arange(extent, dtype=b.dtype)
                return a * (1 - positions / extent) + b * (positions / extent)""",
    "mask of lengths": """
        class Attention(nn.Module):
            def forward(self, x, sizes):
                mask = torch.arange(x.shape[1], dtype=x.dtype)
                mask = mask >= sizes[:, None]
                return x.masked_fill(mask, 0)""",
    "discount": """
        class Returns(nn.Module):
            def __init__(self, gamma, n):
                super().__init__()
                self.discounts = gamma ** torch.arange(n, dtype=torch.float32)
            def forward(self, rewards):
                return (rewards * self.discounts).sum(-1)""",
    "noise schedule": """
        class Scheduler(Base):
            def __init__(self, n, low, high):
                ramp = torch.arange(n, dtype=torch.float32) / (n - 1)
                self.sigmas = (low + ramp * (high - low)) ** 7
            def timesteps(self, n, dtype):
                steps = torch.arange(n, dtype=dtype)
                ratio = self.low / self.high
                return self.high**2 * (ratio ** (steps / (n - 1)))""",
    "stochastic depth": """
        class Backbone(nn.Module):
            def __init__(self, depth, rate):
                super().__init__()
                self.rates = [x.item() for x in torch.linspace(0, rate, depth)]""",
    "bins of a default argument": """
        class Metric(nn.Module):
            def __init__(self, breaks=torch.arange(0, 31.5, 0.5)):
                super().__init__()
                self.register_buffer("breaks", breaks)""",
    "bins of a distribution": """
        class Integral(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.register_buffer("project", torch.linspace(0, n, n + 1))
            def forward(self, x):
                return F.linear(F.softmax(x, dim=1), self.project)""",
    "histogram": """
        class Histogram(nn.Module):
            def forward(self, x, bins):
                centres = torch.arange(bins, dtype=x.dtype) + 0.5
                return torch.exp(-0.5 * (x[..., None] - centres).pow(2)).sum(1)""",
    "discounted gain": """
        class Ndcg(Metric):
            def __init__(self, k):
                dtype = torch.get_default_dtype()
                discount = torch.arange(2, k + 2, dtype=dtype).log2()
                self.register_buffer("discount", 1.0 / discount)""",
    "average precision": """
        def average_precision(gts, n):
            positives = torch.zeros((n,), dtype=torch.float)
            return torch.cumsum(positives, dim=0)""",
    "state space": """
        class Mamba(nn.Module):
            def __init__(self, n):
                super().__init__()
                A = torch.arange(1, n + 1, dtype=torch.float32).repeat(4, 1)
                self.A_log = nn.Parameter(torch.log(A))""",
    "learned frequencies": """
        class Learned(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.freqs = nn.Parameter(100 ** torch.linspace(0, 1, n))
            def forward(self, t):
                return torch.cos(t[:, None] * self.freqs)""",
    "powers of two": """
        class Octaves(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.bands = 2.0 ** torch.arange(n, dtype=torch.float32)
            def forward(self, x):
                return torch.sin(x[..., None] * self.bands)""",
    "rotation matrices": """
        class Wigner(nn.Module):
            def __init__(self, n):
                super().__init__()
                orders = []
                for l in range(n):
                    orders.append(torch.arange(l, -l - 1, -1, dtype=torch.float32))
                self.register_buffer("orders", torch.cat(orders))""",
    "a warped frequency axis": """
        class InverseFrequencyTransform(nn.Module):
            def _precompute(self, n, alpha):
                k = torch.arange(n, dtype=torch.double)
                omega = self.warp(k * (2 * torch.pi / n), alpha)
                return torch.fft.ifft(torch.cos(omega)).real""",
    "samples of sines": """
        class Synthetic(Dataset):
            def sinusoids_with_varying_freq(self, n):
                c = torch.linspace(self.low, self.high, n).unsqueeze(1)
                return torch.sin(2 * math.pi * c * self.times)""",
    "an ordinal property": """
        class Property(nn.Module):
            def property_of(self, x, n):
                return torch.arange(n, dtype=x.dtype) * x""",
    "slots of a pointer": """
        def ptr2index(ptr):
            index = torch.arange(ptr.numel() - 1, dtype=ptr.dtype)
            return index.repeat_interleave(ptr.diff())""",
    "colour wheel": """
        def colours(n):
            wheel = torch.zeros((n, 3))
            wheel[0:n, 1] = torch.floor(255 * torch.arange(0, n) / n)
            return wheel""",
    "B-spline grid": """
        class Kan(nn.Module):
            def __init__(self, order, n, low, step):
                super().__init__()
                self.register_buffer("grid", torch.arange(-order, n + order + 1) * step + low)
            def forward(self, x):
                return ((x >= self.grid[:, :-1]) & (x < self.grid[:, 1:])).to(x.dtype)""",
}
POSITIONS = {
    "an attribute that setattr sets": """
        class Model(nn.Module):
            def __init__(self, d):
                super().__init__()
                setattr(self, "inv_freq", 1.0 / 1e4 ** (torch.arange(0, d, 2, dtype=torch.float32) / d))""",
    "an attribute that setattr names and forward turns": """
        class Model(nn.Module):
            def __init__(self, d):
                super().__init__()
                setattr(self, "w", 1.0 / 1e4 ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
            def forward(self, x):
                return torch.cos(x[..., None] * self.w)""",
    "buffers of numbered names": """
        class Model(nn.Module):
            def __init__(self, sizes):
                super().__init__()
                for i, d in enumerate(sizes):
                    self.register_buffer(f"pos_embed_{i}", torch.arange(d, dtype=torch.float32) / d)""",
    "an attribute of the class": """
        class Model(nn.Module):
            exponents = torch.arange(0, 64, 2, dtype=torch.float32) / 64
            def __init__(self):
                super().__init__()
                self.inv_freq = 1e4 ** -self.exponents""",
    "a tuple of a generator": """
        class Model(nn.Module):
            def __init__(self, dims):
                super().__init__()
                parts = tuple(1e4 ** -(torch.arange(0, d, 2, dtype=torch.float32) / d) for d in dims)
                self.inv_freq = torch.cat(parts)""",
    "rotary embedding": """
        class Rotary(nn.Module):
            def __init__(self, dim, base):
                super().__init__()
                freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
                self.register_buffer("freqs", freqs)
            def forward(self, x):
                t = torch.arange(x.shape[1], dtype=self.freqs.dtype)
                angles = torch.outer(t, self.freqs)
                return angles.cos(), angles.sin()""",
    "frequencies in a method that the constructor calls": """
        class Encoder(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.w = self.make(dim)
            def make(self, n):
                return 1e4 ** (-torch.arange(n, dtype=torch.float32) / n)
            def forward(self, x):
                return torch.sin(x[..., None] * self.w)""",
    "sinusoidal table": """
        class Encoding(nn.Module):
            def __init__(self, d, n):
                super().__init__()
                pe = torch.zeros(n, d)
                position = torch.arange(0, n, dtype=torch.float).unsqueeze(1)
                term = torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
                pe[:, 0::2] = torch.sin(position * term)
                self.register_buffer("pe", pe)""",
    "time embedding in the dtype of its input": """
        class Time(nn.Module):
            def forward(self, t):
                w = torch.exp(torch.arange(64, dtype=t.dtype) * -0.1)
                return torch.cat([(t[:, None] * w).sin(), (t[:, None] * w).cos()], -1)""",
    "axial sines and cosines": """
        class Backbone(nn.Module):
            def __init__(self, h, w, dim):
                super().__init__()
                gy, gx = torch.meshgrid(torch.arange(h, dtype=torch.float32),
                                        torch.arange(w, dtype=torch.float32))
                self.table = self.encode(gy, gx, dim)
            def encode(self, gy, gx, dim):
                omega = 1.0 / 10000 ** (torch.arange(dim) / dim)
                return torch.cat([torch.sin(gy.flatten()[:, None] * omega),
                                  torch.cos(gx.flatten()[:, None] * omega)])""",
    "positions that a module keeps": """
        class Model(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.register_buffer("steps", torch.arange(n, dtype=torch.float32))""",
    "positions that forward returns": """
        class Model(nn.Module):
            def forward(self, x):
                return torch.arange(x.shape[1], dtype=x.dtype)""",
    "positions given to an embedding": """
        class Model(nn.Module):
            def forward(self, x):
                t = torch.arange(x.shape[1], dtype=x.dtype)
                return self.rotary_emb(x, t)""",
    "relative coordinates": """
        class Window(nn.Module):
            def __init__(self, n):
                super().__init__()
                relative_coords_h = torch.arange(-(n - 1), n, dtype=torch.float32)
                self.table = torch.stack([relative_coords_h, relative_coords_h]) / (n - 1)""",
    "frequencies of an attribute that forward turns": """
        class Fourier(nn.Module):
            def __init__(self, base, n):
                super().__init__()
                self.register_buffer("bands", base ** torch.linspace(0, 1, n))
            def forward(self, x):
                angles = torch.einsum("bi,j->bij", x, self.bands)
                return torch.cat([angles.sin(), angles.cos()], -1)""",
    "counted pixels of a mask": """
        class Sine(nn.Module):
            def forward(self, mask, x):
                y = mask.to(x.dtype).cumsum(1)
                w = 10000 ** (torch.arange(64) / 64)
                return (y[..., None] / w).sin()""",
    "counts of a range in another tensor's dtype": """
        class Sine(nn.Module):
            def forward(self, x):
                positions = x.new_tensor(range(x.shape[1]))
                return self.positional_embedding(positions)""",
    "the base of frequencies in a tensor": """
        class Sine(nn.Module):
            def __init__(self, d):
                super().__init__()
                t = torch.arange(0, 9000).float()[:, None]
                w = torch.exp(torch.arange(0, d, 2).float() * -(torch.log(torch.tensor(10000.0)) / d))
                self.pe = torch.sin(t * w)""",
    "signs of a rotation by minus one": """
        class Rotary(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.signs = (-1) ** torch.arange(d, dtype=torch.float32)""",
    "slopes of a class that spells ALiBi as its paper does": """
        class ALiBi(nn.Module):
            def forward(self, q):
                pos = torch.arange(q.size(-2), device=q.device, dtype=q.dtype)
                return q @ q.mT + (pos[None] - pos[:, None]) * self.slopes""",
    "a period in a tensor": """
        def create_embedding(positions, dim: int, period: float, dtype: torch.dtype):
            adim = torch.arange(dim // 2, dtype=dtype)
            phase = positions / torch.full([], period, dtype=dtype) ** (adim / (dim // 2 - 1))
            return torch.cat([torch.cos(phase), torch.sin(phase)], dim=-1)""",
    "slopes of the default dtype": """
        class Attention(nn.Module):
            def __init__(self, heads: int, n: int):
                super().__init__()
                slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
                self.register_buffer("alibi", torch.arange(n)[None, None, :] * slopes[:, None, None])""",
}


EXACT = {
    "powers of two": """
        class PosEmb(nn.Module):
            def forward(self, x, n):
                return x[..., None] * 2.0 ** torch.arange(n, dtype=x.dtype)""",
    "frequencies whose module restores them": """
        class Rotary(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.register_buffer("inv_freq", self.table(d))
            def table(self, d):
                return 1e4 ** -(torch.arange(0, d, 2).float() / d)
            def _apply(self, fn, recurse=True):
                super()._apply(fn, recurse)
                self.inv_freq = self.table(64)
                return self""",
    "a dtype that a function of this file keeps wide": """
        def safe_dtype(dtype, device):
            return torch.float32 if device == "mps" else dtype
        def pos_emb(n, device):
            return 1e4 ** -torch.linspace(0, 1, n, dtype=safe_dtype(torch.float64, device))""",
}


@pytest.mark.parametrize("name", EXACT)
def test_what_no_low_dtype_reaches_or_rounds_is_at_most_a_note(name: str) -> None:
    assert severities(EXACT[name]) <= {"note"}


def severities(source: str) -> set[str]:
    lines = source.splitlines()[1:]
    text = MODULE + "\n".join(line[8:] for line in lines) + "\n"
    return {finding.severity for finding in analyze(text.encode(), "layers.py")}


@pytest.mark.parametrize("name", NOT_POSITIONS)
def test_what_no_path_shows_to_be_positions_is_a_note(name: str) -> None:
    assert severities(NOT_POSITIONS[name]) <= {"note"}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_reaches_positions_is_no_note(name: str) -> None:
    assert severities(POSITIONS[name]) & {"error", "warning"}


@pytest.mark.parametrize("source", [*NOT_POSITIONS.values(), *POSITIONS.values()])
def test_a_case_is_source_that_has_a_grid(source: str) -> None:
    assert any(word in source for word in ("arange", "linspace", "cumsum", "range("))
