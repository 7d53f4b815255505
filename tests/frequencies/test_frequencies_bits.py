"""The three roundings of a spec's frequencies: the checkpoint's, the exact one, and this CPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from stock_frequencies import LLAMA3, NEEDS_FUNCTIONS, YARN, llama_config, longrope, stock

from safe_rope._protection import guard, protect
from safe_rope.errors import ConfigError
from safe_rope.frequencies import RopeSpec, _powers

pytestmark = pytest.mark.contract

THETAS = (1e4, 5e5, 1e6)
DIMS = (64, 128)
DATA = Path(__file__).resolve().parents[1] / "data"

LISTED: dict[str, list[int]] = json.loads((DATA / "inv_freq_one_ulp.json").read_text())
"""Where the exact frequency is not the checkpoint's, by rope_theta and rotary_dim; 0 is the fastest."""

VECTOR_CODE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def default(theta: float, dim: int) -> RopeSpec:
    return RopeSpec("default", theta, dim, dim)


def units_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many FP32 numbers lie from a to b; both positive."""
    return (a.view(torch.int32) - b.view(torch.int32)).abs()


@pytest.mark.skipif(not VECTOR_CODE, reason="this torch runs scalar code, whose pow is another one")
@pytest.mark.parametrize("theta", [*THETAS, 10000, 1e7, 1.5e5, 25_000, 7777.7])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_checkpoint_bits_are_those_of_the_stock_code(theta: float, dim: int) -> None:
    assert torch.equal(RopeSpec("default", theta, dim, dim).inv_freq(), stock(llama_config(theta, dim))[0])


@pytest.mark.skipif(not VECTOR_CODE, reason="this torch runs scalar code, whose pow is another one")
def test_the_vector_power_is_the_one_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(4096, generator=generator)
    worst = 0
    for base in (1.0001, 2.0, 10000.0, 5e5, 12345.678, 3.0e7, 0.37):
        expected = torch.full((4096,), base) ** exponents
        assert torch.equal(_powers.vector_power(torch.tensor(base), exponents), expected)
        scalar = _powers.nearest_powers(torch.tensor(base).item(), exponents.tolist(), torch.float32)
        worst = max(worst, int(units_apart(scalar, expected).max()))
    assert worst == 1, "if the vector code were correctly rounded, this would need no emulation"


def test_the_nearest_power_is_correctly_rounded() -> None:
    with mpmath.workprec(400):
        for base in (1e4, 5e5, 0.3, 1.0, 7777.7, 256.0, 1.0000001):
            for exponent in (Fraction(1, 3), Fraction(-126, 128), Fraction(0), Fraction(1, 2), 0.7, 1.0):
                numerator, denominator = exponent.as_integer_ratio()
                true = mpmath.mpf(base) ** (mpmath.mpf(numerator) / denominator)
                assert _powers.nearest_power(base, exponent, 53) == float(true)
                with mpmath.workprec(24):
                    rounded = float(+true)
                assert _powers.nearest_power(base, exponent, 24) == rounded


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dim", DIMS)
def test_exact_bits_are_the_config_formula_rounded_once(theta: float, dim: int) -> None:
    got = default(theta, dim).inv_freq(bits="exact").tolist()
    with mpmath.workprec(200):
        for i, value in enumerate(got):
            true = mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / dim)
            with mpmath.workprec(24):
                assert value == float(+true)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dim", DIMS)
def test_exact_bits_are_the_checkpoints_but_for_the_listed_units(theta: float, dim: int) -> None:
    spec = default(theta, dim)
    apart = units_apart(spec.inv_freq(bits="exact"), spec.inv_freq())
    assert apart.nonzero().view(-1).tolist() == LISTED[f"{theta:g}/{dim}"]
    assert int(apart.max()) == 1


@pytest.mark.parametrize("theta", THETAS)
def test_the_frequencies_of_64_dimensions_are_every_other_one_of_128(theta: float) -> None:
    for bits in ("checkpoint", "exact"):
        assert torch.equal(
            default(theta, 64).inv_freq(bits=bits), default(theta, 128).inv_freq(bits=bits)[::2]
        )


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.7},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": YARN,
    "llama3": LLAMA3,
    # With its attention_factor, without which transformers 4.44 makes no config.
    "longrope": longrope(80, factor=4.0, attention_factor=1.25, original_max_position_embeddings=512),
}


@NEEDS_FUNCTIONS
@pytest.mark.parametrize("name", SCALED)
def test_every_rope_type_has_exact_frequencies(name: str) -> None:
    spec = RopeSpec.from_config(llama_config(7777.7, 80, SCALED[name], max_position_embeddings=512))
    for length in (None, 9000, torch.tensor(9000)) if spec.depends_on_length else (None,):
        exact = spec.inv_freq(length, bits="exact")
        checkpoint = spec.inv_freq(length)
        assert exact.dtype == torch.float32
        assert 0 < int(units_apart(exact, checkpoint).max()) <= 16


DIGEST = """
import hashlib, torch
from safe_rope.frequencies import RopeSpec
digest = hashlib.sha256()
for theta in (1e4, 1e6, 150000.0, 7777.7):
    for dim in (32, 64, 80, 96, 128, 256):
        for bits in ("checkpoint", "exact"):
            digest.update(RopeSpec("default", theta, dim, dim).inv_freq(bits=bits).numpy().tobytes())
        spec = RopeSpec("dynamic", theta, dim, dim, max_position_embeddings=512, factor=3.3)
        digest.update(spec.inv_freq(700).numpy().tobytes())
        digest.update(spec.inv_freq(torch.tensor(700)).numpy().tobytes())
if {machine}:
    digest.update(RopeSpec("default", 150000.0, 256, 256).inv_freq(bits="machine").numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
"""


def digest(capability: str, machine: bool) -> list[str]:
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", DIGEST.replace("{machine}", str(machine))]
    return subprocess.run(
        command, env=env, check=True, capture_output=True, text=True, timeout=120
    ).stdout.split()


@pytest.mark.slow
def test_another_instruction_set_gives_the_same_bits() -> None:
    here = torch.backends.cpu.get_cpu_capability().lower()
    scalar = digest("default", machine=False)
    assert scalar[0] in ("DEFAULT", "NO")  # "NO AVX" before torch 2.8
    assert digest(here, machine=False)[-1] == scalar[-1]
    if VECTOR_CODE:  # and the test can tell: torch.pow itself differs
        assert digest(here, machine=True)[1] != digest("default", machine=True)[1]


def test_unknown_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        default(1e4, 64).inv_freq(bits="fp64")  # type: ignore[arg-type]


# ---- the guard's option ----------------------------------------------------------------------------------


def model(theta: float = 1e6) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(theta, 64, vocab_size=32, intermediate_size=64, num_hidden_layers=1))


def frequencies_of(llama: Any) -> torch.Tensor:
    (rotary, *_) = [m for m in llama.modules() if type(m).__name__ == "LlamaRotaryEmbedding"]
    return rotary.inv_freq


@pytest.mark.parametrize("inv_freq", ["checkpoint", "exact"])
def test_a_guarded_model_has_the_frequencies_that_were_asked_for(inv_freq: Any) -> None:
    expected = default(1e6, 64).inv_freq(bits=inv_freq)
    with guard(inv_freq=inv_freq):
        guarded = model()
    guarded(torch.zeros(1, 2, dtype=torch.int64))  # post_init wrote the stock bits over the buffer
    assert torch.equal(frequencies_of(guarded), expected)
    protected = model()
    protect(protected, inv_freq=inv_freq)
    assert torch.equal(frequencies_of(protected), expected)


def test_exact_frequencies_do_not_go_with_stock_tables() -> None:
    with pytest.raises(ConfigError, match="exact"):
        guard(tables="fp32", inv_freq="exact")
    with pytest.raises(ConfigError, match="checkpoint"):
        guard(inv_freq="fp64")  # type: ignore[arg-type]
