"""RopeSpec is a value: right by the papers, the same in all surroundings, refused when contradictory."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import mpmath
import pytest
import torch
from stock_frequencies import LLAMA3, NESTED, YARN, assert_same_bits, longrope
from support.default_dtype import default_dtype
from support.one_rank import environment

from safe_rope.errors import ConfigError
from safe_rope.frequencies import ROPE_TYPES, RopeSpec

# ---- nothing outside takes part -------------------------------------------------------------------------


@contextlib.contextmanager
def zero_init() -> Iterator[None]:
    deepspeed = pytest.importorskip("deepspeed")
    with environment():
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(dtype=torch.bfloat16, remote_device="cpu"):
            assert torch.tensor([1.5], dtype=torch.float32).dtype == torch.bfloat16, "nothing is intercepted"
            yield


SURROUNDINGS = {
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "zero.Init": zero_init,
}


def one_spec_of_each_type() -> list[RopeSpec]:
    size = {"rope_theta": 5e5, "head_dim": 96, "max_position_embeddings": 2048}
    scalings = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.7},
        {"rope_type": "dynamic", "factor": 1.3},
        YARN,
        longrope(96, original_max_position_embeddings=512),
        LLAMA3,
        {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    ]
    specs = [RopeSpec.from_config({**size, "rope_scaling": scaling}) for scaling in scalings]
    assert [spec.rope_type for spec in specs] == list(ROPE_TYPES)
    return specs


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_do_not_change_the_bits(name: str) -> None:
    specs = one_spec_of_each_type()
    lengths = (None, 5000, torch.tensor(5000))
    expected = [[spec.inv_freq(length) for length in lengths] for spec in specs]
    with SURROUNDINGS[name]():
        inside = [[spec.inv_freq(length) for length in lengths] for spec in specs]
    for got, want in zip(itertools.chain(*inside), itertools.chain(*expected), strict=True):
        assert_same_bits(got, want)
        assert not got.is_inference()
        assert type(got) is torch.Tensor


def test_each_call_returns_memory_of_its_own() -> None:
    for spec in one_spec_of_each_type():
        spec.inv_freq().zero_()
        assert spec.inv_freq()[0] > 0


# ---- the true values ------------------------------------------------------------------------------------


def true_frequencies(spec: RopeSpec, length: int | None = None) -> list[mpmath.mpf]:
    """Evaluate the papers' formulas with 40 digits."""
    half, dim, theta = spec.rotary_dim // 2, spec.rotary_dim, mpmath.mpf(spec.rope_theta)
    factor = mpmath.mpf(spec.factor or 1)
    if spec.rope_type == "dynamic" and length:
        stretch = factor * length / spec.max_position_embeddings - (factor - 1)
        theta *= stretch ** (mpmath.mpf(dim) / (dim - 2))
    base = [theta ** (-mpmath.mpf(2 * i) / dim) for i in range(half)]
    trained = spec.original_max_position_embeddings
    if spec.rope_type == "linear":
        return [value / factor for value in base]
    if spec.rope_type == "longrope":
        factors = spec.long_factor if length and length > trained else spec.short_factor
        return [value / divisor for value, divisor in zip(base, factors, strict=True)]
    if spec.rope_type == "proportional":
        turning = int(spec.partial_rotary_factor * dim // 2)
        return [value if i < turning else mpmath.mpf(0) for i, value in enumerate(base)]
    if spec.rope_type == "llama3":
        low, high = spec.low_freq_factor, spec.high_freq_factor
        turns = [trained * value / (2 * mpmath.pi) for value in base]
        blend = [min(max((turn - low) / (high - low), 0), 1) for turn in turns]
        return [(1 - b) * value / factor + b * value for b, value in zip(blend, base, strict=True)]
    if spec.rope_type == "yarn":

        def pair(rotations: float) -> mpmath.mpf:
            return dim * mpmath.log(trained / (2 * mpmath.pi * rotations)) / (2 * mpmath.log(theta))

        low, high = max(mpmath.floor(pair(32)), 0), min(mpmath.ceil(pair(1)), dim - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(half)]
        return [r * value / factor + (1 - r) * value for r, value in zip(ramp, base, strict=True)]
    return base


@pytest.mark.parametrize("spec", one_spec_of_each_type(), ids=lambda spec: spec.rope_type)
@pytest.mark.parametrize("length", [None, 5000])
def test_frequencies_are_those_of_the_papers(spec: RopeSpec, length: int | None) -> None:
    """Within a few ulp of FP32, relative to the unscaled frequency.

    The exponent 2i/D < 1 is rounded to FP32, half an ulp of it, which the power magnifies by ln(theta), 13
    for 5e5; power, reciprocal and division add half to one ulp each. The blends of yarn and llama3 weigh two
    values that are at most the unscaled frequency, hence its ulp is the measure there.
    """
    with mpmath.workdps(40):
        true = true_frequencies(spec, length)
        unscaled = true_frequencies(spec.unscaled())
        bounds = unscaled if spec.rope_type in ("yarn", "llama3") else true
        ulp = mpmath.mpf(2) ** -23
        got = [mpmath.mpf(value) for value in spec.inv_freq(length).tolist()]
        worst = max(
            abs(g - t) / (bound * ulp) if bound else abs(g)
            for g, t, bound in zip(got, true, bounds, strict=True)
        )
    print(f"{spec.rope_type}: {float(worst):.2f} ulp")
    assert worst <= math.log(spec.rope_theta * (8 if length else 1)) / 2 + 3


# ---- a value object -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", one_spec_of_each_type(), ids=lambda spec: spec.rope_type)
def test_spec_is_an_immutable_value(spec: RopeSpec) -> None:
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert_same_bits(twin.inv_freq(), spec.inv_freq())
    with pytest.raises(AttributeError):
        spec.rope_theta = 1.0  # type: ignore[misc]


# ---- errors ---------------------------------------------------------------------------------------------

BASE = {"rope_theta": 1e4, "head_dim": 64, "max_position_embeddings": 2048}


def scaled(rope_type: str, **options: Any) -> dict[str, Any]:
    return {**BASE, "rope_scaling": {"rope_type": rope_type, **options}}


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "odd rotary_dim": ({**BASE, "head_dim": 63}, "rotary_dim"),
    "odd partial rotary_dim": ({**BASE, "partial_rotary_factor": 0.33}, "rotary_dim"),
    "rotary_dim zero": ({**BASE, "partial_rotary_factor": 0.0}, "rotary_dim"),
    "more than the head rotates": ({**BASE, "partial_rotary_factor": 2.0}, "head_dim"),
    "theta zero": ({**BASE, "rope_theta": 0.0}, "rope_theta"),
    "theta negative": ({**BASE, "rope_theta": -1e4}, "rope_theta"),
    "theta NaN": ({**BASE, "rope_theta": math.nan}, "rope_theta"),
    "theta infinite": ({**BASE, "rope_theta": math.inf}, "rope_theta"),
    "theta a string": ({**BASE, "rope_theta": "10000"}, "rope_theta"),
    "theta missing": ({"head_dim": 64, "rope_scaling": None}, "rope_theta"),
    "no rope at all": ({"model_type": "bert", "hidden_size": 768}, "rope_parameters"),
    "no dimensions": ({"rope_theta": 1e4}, "head_dim"),
    "rope_scaling a string": ({**BASE, "rope_scaling": "linear"}, "rope_scaling"),
    "rope_type missing": ({**BASE, "rope_scaling": {"factor": 2.0}}, "rope_type"),
    "rope_type unknown": (scaled("spiral", factor=2.0), "rope_type"),
    "factor missing": (scaled("linear"), "factor"),
    "factor below one": (scaled("linear", factor=0.5), "factor"),
    "factor NaN": (scaled("dynamic", factor=math.nan), "factor"),
    "factor a bool": (scaled("dynamic", factor=True), "factor"),
    "factor below one, yarn": (scaled("yarn", factor=0.5), "factor"),
    "factor below one, longrope": (scaled(**{**longrope(64), "factor": 0.5}), "factor"),
    "factor below one, llama3": (scaled(**{**LLAMA3, "factor": 0.5}), "factor"),
    "factor below one, proportional": (scaled("proportional", factor=0.5), "factor"),
    "proportion above one": (scaled("proportional", partial_rotary_factor=1.5), "partial_rotary_factor"),
    "factor missing, yarn": (scaled("yarn"), "factor"),
    "dynamic without a length": (
        {"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "max_position_embeddings",
    ),
    "dynamic of two channels": ({**scaled("dynamic", factor=2.0), "head_dim": 2}, "rotary_dim"),
    "length not an integer": ({**BASE, "max_position_embeddings": 10.5}, "max_position_embeddings"),
    "length zero": ({**BASE, "max_position_embeddings": 0}, "max_position_embeddings"),
    "attention_factor negative": (scaled("yarn", factor=2.0, attention_factor=-1.0), "attention_factor"),
    "betas exchanged": (scaled("yarn", factor=2.0, beta_fast=1, beta_slow=32), "beta_fast"),
    "theta one, yarn": ({**scaled("yarn", factor=2.0), "rope_theta": 1.0}, "rope_theta"),
    "llama3 without a trained length": (
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        "original_max_position_embeddings",
    ),
    "llama3 without low_freq_factor": (
        scaled("llama3", factor=8.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        "low_freq_factor",
    ),
    "llama3 bands exchanged": (scaled(**{**LLAMA3, "low_freq_factor": 8.0}), "low_freq_factor"),
    "short_factor missing": (scaled("longrope", long_factor=[1.0] * 32), "short_factor"),
    "short_factor too short": (scaled(**{**longrope(64), "short_factor": [1.0]}), "short_factor"),
    "long_factor too long": (scaled(**{**longrope(64), "long_factor": [1.0] * 48}), "long_factor"),
    "long_factor with zero": (scaled(**{**longrope(64), "long_factor": [0.0] * 32}), "long_factor"),
    "long_factor not a list": (scaled(**{**longrope(64), "long_factor": 3.0}), "long_factor"),
    "layer_type missing": ({**BASE, "rope_parameters": NESTED}, "full_attention, sliding_attention"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_is_refused_with_expected_got_and_remedy(name: str) -> None:
    content, mentioned = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=r"(?s)expected .*, got .*; ") as caught:
        RopeSpec.from_config(content)
    assert mentioned in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ({"rope_type": "default", "rope_theta": "1e4", "rotary_dim": 64, "head_dim": 64}, "got '1e4'"),
        ({"rope_type": "default", "rope_theta": 1e4, "rotary_dim": 64.0, "head_dim": 64}, "rotary_dim"),
        ({"rope_type": "linear", "rope_theta": 1e4, "rotary_dim": 64, "head_dim": 64}, "factor"),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "rotary_dim": 64, "head_dim": 64, "factor": "2"},
            "factor to be a number of at least 1, got '2'",
        ),
    ],
)
def test_a_spec_built_by_hand_is_checked_too(arguments: dict[str, Any], mentioned: str) -> None:
    with pytest.raises(ConfigError, match=mentioned):
        RopeSpec(**arguments)


def test_unknown_layer_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"full_attention, sliding_attention.*'global'"):
        RopeSpec.from_config({**BASE, "rope_parameters": NESTED}, "global")


@pytest.mark.parametrize("config", [None, 3, object(), "config.json"])
def test_something_that_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a config"):
        RopeSpec.from_config(config)


@pytest.mark.parametrize("seq_len", [1.5, True, torch.tensor(3.0), torch.tensor(True), "7"])
def test_seq_len_must_be_an_integer(seq_len: Any) -> None:
    with pytest.raises(TypeError, match="seq_len must be an integer"):
        RopeSpec.from_config(BASE).inv_freq(seq_len)


def test_seq_len_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        RopeSpec.from_config(BASE).inv_freq(-1)
