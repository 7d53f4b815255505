"""Position modules of libraries for language and proteins."""

from __future__ import annotations

from typing import Any

import torch

from laboratory.libraries.subject import LONG, Cast, Family, Subject, floats, ints, lib

HEADS, DIM = 4, 32
"""Of queries and keys."""


def x_transformers() -> list[Subject]:
    """Rotary with XPos and interpolation, sinusoids, ALiBi, and the learned and bucketed biases."""
    of = Family("x-transformers", "x_transformers.x_transformers")

    def phases(m: Any, to: Cast) -> Any:
        return m(torch.arange(LONG))

    def applied(m: Any, to: Cast) -> Any:
        return lib(of.module).apply_rotary_pos_emb(to(floats(1, HEADS, LONG, DIM)), *phases(m, to))

    def polar(m: Any, to: Cast) -> Any:
        return lib(of.module).apply_polar_pos_emb(to(floats(1, HEADS, LONG, DIM)), phases(m, to)[0])

    def tokens(m: Any, to: Cast) -> Any:
        return m(to(floats(1, LONG, DIM)))

    def few(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 64, DIM)))

    return [
        of.new("RotaryEmbedding", phases, DIM),
        of.new("RotaryEmbedding, applied", applied, DIM),
        of.new("RotaryEmbedding, interpolated", applied, DIM, interpolation_factor=4.0),
        of.new("RotaryEmbedding, NTK", applied, DIM, base_rescale_factor=4.0),
        of.new("RotaryEmbedding, XPos", phases, DIM, use_xpos=True),
        of.new("RotaryEmbedding, XPos, applied", applied, DIM, use_xpos=True),
        of.new("PolarEmbedding", phases, DIM, HEADS, bias_uniform_init=False),
        of.new("PolarEmbedding, applied", polar, DIM, HEADS),
        of.new("ScaledSinusoidalEmbedding", tokens, DIM),
        of.new("AbsolutePositionalEmbedding", few, DIM, 64),
        of.new("AlibiPositionalBias", lambda m, to: m(16, LONG), 6, 8),
        of.new(
            "AlibiPositionalBias, positions", lambda m, to: m.forward_custom_pos(torch.arange(0, LONG, 37)), 6
        ),
        of.new("DataDependentAlibi", few, DIM, HEADS),
        of.new("PerRowDataDependentAlibi", few, DIM, HEADS),
        of.new("RelativePositionBias", lambda m, to: m(64, 64), DIM**0.5, causal=True, heads=HEADS),
        of.new("RelativeProjPositionalBias", few, DIM, HEADS),
        of.new("DynamicPositionBias", lambda m, to: m(64, 64), DIM, heads=HEADS, depth=2),
        of.new(
            "DynamicPositionBias, log", lambda m, to: m(64, 64), DIM, heads=HEADS, depth=2, log_distance=True
        ),
        of.new(
            "CoPE",
            lambda m, to: m(to(floats(1, HEADS, 64, DIM)), to(floats(1, HEADS, 64, 64, seed=1))),
            DIM,
            HEADS,
            64,
        ),
    ]


def fair_esm() -> list[Subject]:
    """Rotary, sinusoids that forward makes, learned positions."""
    rotary = Family("fair-esm", "esm.rotary_embedding")
    others = Family("fair-esm", "esm.modules")

    def both(m: Any, to: Cast) -> Any:
        return m(to(floats(HEADS, LONG, DIM)), to(floats(HEADS, LONG, DIM, seed=1)))

    return [
        rotary.new("RotaryEmbedding", both, DIM),
        others.new("SinusoidalPositionalEmbedding", lambda m, to: m(ints(30, 1, LONG)), DIM, 1),
        others.new("LearnedPositionalEmbedding", lambda m, to: m(ints(30, 1, 60)), 64, DIM, 1),
    ]


def megatron() -> list[Subject]:
    """Rotary with interpolation and Llama 3 scaling, Yarn, three axes, T5's bias."""
    embeddings = "megatron.core.models.common.embeddings"
    of = Family("megatron-core", f"{embeddings}.rotary_pos_embedding")
    yarn = Family("megatron-core", f"{embeddings}.yarn_rotary_pos_embedding")
    relative = Family("megatron-core", f"{embeddings}.relative_pos_embedding")

    def rotary(**options: Any) -> Any:
        return lambda x: x.RotaryEmbedding(DIM, 1.0, use_cpu_initialization=True, **options)

    def multimodal(x: Any) -> Any:
        return x.MultimodalRotaryEmbedding(DIM, 1.0)

    def yarned(x: Any) -> Any:
        return x.YarnRotaryEmbedding(
            DIM, scaling_factor=4.0, original_max_position_embeddings=1024, use_cpu_initialization=True
        )

    def phases(m: Any, to: Cast) -> Any:
        return m(LONG)

    def rotated(phase: torch.Tensor, to: Cast, **options: Any) -> Any:
        apply = lib(f"{embeddings}.rope_utils")._apply_rotary_pos_emb_bshd
        return apply(to(floats(phase.shape[0], 1, HEADS, DIM)), phase, **options)

    def axes(m: Any, to: Cast) -> Any:
        return m(ints(LONG, 3, 1, 256), [4, 6, 6])

    def cached(m: Any, to: Cast) -> Any:
        return m.get_cached_cos_sin(1024), m.get_cached_cos_sin(LONG)

    return [
        of("RotaryEmbedding", rotary(), phases),
        of("RotaryEmbedding, applied", rotary(), lambda m, to: rotated(phases(m, to), to)),
        of("RotaryEmbedding, interleaved", rotary(rotary_interleaved=True), phases),
        of("RotaryEmbedding, interpolated", rotary(seq_len_interpolation_factor=4.0), phases),
        of("RotaryEmbedding, Llama 3", rotary(rope_scaling=True), phases),
        of("RotaryEmbedding, cos and sin", rotary(rotary_base=500_000), lambda m, to: m.get_cos_sin(LONG)),
        of("MultimodalRotaryEmbedding", multimodal, axes),
        of("MultimodalRotaryEmbedding, applied", multimodal, lambda m, to: rotated(axes(m, to), to)),
        yarn("YarnRotaryEmbedding", yarned, phases),
        yarn(
            "YarnRotaryEmbedding, applied", yarned, lambda m, to: rotated(m(LONG)[0], to, mscale=m(LONG)[1])
        ),
        yarn("YarnRotaryEmbedding, cached", yarned, cached),
        relative.new(
            "RelativePositionEmbedding", lambda m, to: m(64, 64), True, torch.nn.init.normal_, HEADS
        ),
    ]


def torchtitan() -> list[Subject]:
    """Complex phases and cos and sin, with their scalings; the vision towers' frequencies; Flux's axes."""
    of = Family("torchtitan", "torchtitan.models.common.rope")
    qwen = Family("torchtitan", "torchtitan.models.qwen3_5.rope")
    towers = "torchtitan.models.{}.vision_encoder"

    def rope(name: str, **options: Any) -> Any:
        return lambda x: getattr(x, name).Config(dim=DIM, max_seq_len=LONG, **options).build()

    def both(m: Any, to: Cast) -> Any:
        q, k = to(floats(1, LONG, HEADS, DIM)), to(floats(1, LONG, HEADS, DIM, seed=1))
        return m(q, k, torch.arange(LONG).flip(0)[None])

    def axes(m: Any, to: Cast) -> Any:
        q, k = to(floats(1, 256, HEADS, DIM)), to(floats(1, 256, HEADS, DIM, seed=1))
        return m(q, k, ints(LONG, 1, 256, 3))

    yarn = {"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 1024}
    return [
        of("ComplexRoPE", rope("ComplexRoPE"), both),
        of("ComplexRoPE, Llama 3", rope("ComplexRoPE", scaling="llama", theta=500_000.0), both),
        of("ComplexRoPE, Yarn", rope("ComplexRoPE", **yarn), both),
        of("CosSinRoPE", rope("CosSinRoPE"), both),
        of("CosSinRoPE, Yarn", rope("CosSinRoPE", **yarn), both),
        qwen("MRoPE", rope("MRoPE", mrope_section=[6, 5, 5]), axes),
        Family("torchtitan", towers.format("kimi_k2_7"))(
            "VisionRotaryEmbedding2D",
            lambda x: x.VisionRotaryEmbedding2D.Config(head_dim=DIM).build(),
            lambda m, to: m(LONG),
        ),
        Family("torchtitan", towers.format("qwen3_5"))(
            "VisionRotaryEmbedding",
            lambda x: x.VisionRotaryEmbedding.Config(dim=DIM).build(),
            lambda m, to: m(LONG),
        ),
        Family("torchtitan", towers.format("muse_glimmer"))(
            "VisionRopeFreq",
            lambda x: x.VisionRopeFreq.Config(head_dim=DIM, rope_theta=10_000.0).build(),
            lambda m, to: torch.outer(torch.arange(LONG), m.inv_freq),
        ),
        Family("torchtitan", "torchtitan.models.flux.model.layers")(
            "EmbedND",
            lambda x: x.EmbedND.Config(dim=DIM, theta=10_000, axes_dim=(8, 12, 12)).build(),
            lambda m, to: m(ints(256, 1, 64, 3).float()),
        ),
    ]
