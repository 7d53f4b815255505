"""Position modules of diffusers: rotary on one to four axes, sinusoids of positions and of times."""

from __future__ import annotations

from typing import Any

import torch

from laboratory.libraries.subject import LONG, Cast, Family, Subject, floats, ints, lib

DIM = 32
AXES = [8, 12, 12]
CPU = torch.device("cpu")
TRANSFORMERS = "diffusers.models.transformers"


def diffusers() -> list[Subject]:
    """Everything that the transformers, decoders and text encoders of diffusers rotate or add."""
    return [*_tables(), *_axes(), *_grids(), *_others(), *_times(), *_patches()]


def _of(file: str) -> Family:
    return Family("diffusers", f"{TRANSFORMERS}.{file}")


def _video(m: Any, to: Cast) -> Any:
    return m(to(floats(1, 4, 8, 48, 40)))


def _tables() -> list[Subject]:
    """Modules that store ready tables, for sizes up to a largest one."""

    def layout(m: Any, to: Cast) -> Any:
        shape = {"total_frames": 8, "full_frame_shape": (24, 20), "compressed_frame_shape": (12, 10)}
        return m(shape | {"num_compressed_frames": 4, "num_full_frames": 4}, CPU)

    images = [(1, 48, 40)]
    stored = (DIM, (1, 2, 2), 1024)
    return [
        _of("transformer_wan").new("WanRotaryPosEmbed", _video, *stored),
        _of("transformer_skyreels_v2").new("SkyReelsV2RotaryPosEmbed", _video, *stored),
        _of("transformer_chronoedit").new("ChronoEditRotaryPosEmbed", _video, *stored),
        _of("transformer_sana_video").new("SanaVideo's WanRotaryPosEmbed", _video, *stored),
        _of("transformer_wan_animate").new("WanAnimate's WanRotaryPosEmbed", _video, *stored),
        _of("transformer_anyflow").new("AnyFlowRotaryPosEmbed", layout, *stored),
        _of("transformer_anyflow_far").new(
            "AnyFlowCausalRotaryPosEmbed", layout, DIM, (1, 2, 2), (1, 4, 4), 1024
        ),
        _of("transformer_sana_wm").new(
            "SanaWMRotaryPosEmbed", lambda m, to: m((8, 24, 20)), DIM, (1, 2, 2), 1024
        ),
        _of("transformer_qwenimage").new(
            "QwenEmbedRope",
            lambda m, to: m(images, device=CPU, max_txt_seq_len=1024),
            10_000,
            AXES,
            scale_rope=True,
        ),
        _of("transformer_qwenimage").new(
            "QwenEmbedLayer3DRope", lambda m, to: m(images, 1024, device=CPU), 10_000, AXES, scale_rope=True
        ),
        _of("transformer_qwenimage21").new("QwenImage21Rope", _image_mask, 10_000, AXES),
        _of("transformer_nucleusmoe_image").new(
            "NucleusMoEEmbedRope",
            lambda m, to: m(images, device=CPU, max_txt_seq_len=1024),
            10_000,
            AXES,
            scale_rope=True,
        ),
        _of("transformer_lumina2").new(
            "Lumina2RotaryPosEmbed",
            lambda m, to: m(to(floats(1, 4, 48, 40)), torch.ones(1, 512, dtype=torch.int64))[:4],
            10_000,
            AXES,
            (1024, 128, 128),
        ),
        _of("transformer_kandinsky").new("Kandinsky5RoPE1D", lambda m, to: m(torch.arange(LONG)), DIM, LONG),
        _of("transformer_kandinsky").new(
            "Kandinsky5RoPE3D", lambda m, to: m((1, 16, 24, 100), _ranges()), AXES
        ),
        _of("transformer_kandinsky6").new("Kandinsky6RoPE1D", lambda m, to: m(torch.arange(LONG)), DIM, LONG),
        _of("transformer_kandinsky6").new("Kandinsky6RoPE3D", lambda m, to: m(_ranges()), AXES),
        _of("transformer_kandinsky6_sr").new("Kandinsky6SRRoPE3D", lambda m, to: m(_ranges()), AXES),
    ]


def _ranges() -> tuple[torch.Tensor, ...]:
    return torch.arange(16), torch.arange(24), torch.arange(100)


def _image_mask(m: Any, to: Cast) -> Any:
    mask = torch.zeros(1000 + 48 * 40, dtype=torch.bool)
    mask[1000:] = True
    return m([(1, 48, 40)], mask, CPU)


def _axes() -> list[Subject]:
    """Modules that are given positions on three or four axes."""

    def positions(m: Any, to: Cast) -> Any:
        return m(to(ints(256, 200, 3).float()))

    def batched(m: Any, to: Cast) -> Any:
        return m(ints(256, 1, 200, 3).float() / 128)

    decoder = Family("diffusers", "diffusers.models.autoencoders.autoencoder_kl_minimax_h3")
    return [
        _of("transformer_flux").new("FluxPosEmbed", positions, 10_000, AXES),
        _of("transformer_flux2").new(
            "Flux2PosEmbed", lambda m, to: m(ints(LONG, 200, 4)), 2000, [8, 8, 8, 8]
        ),
        _of("transformer_bria").new("BriaPosEmbed", positions, 10_000, AXES),
        _of("transformer_longcat_image").new("LongCatImagePosEmbed", positions, 10_000, AXES),
        _of("transformer_ovis_image").new("OvisImagePosEmbed", positions, 10_000, AXES),
        _of("transformer_krea2").new("Krea2RotaryPosEmbed", positions, 1000, AXES),
        _of("transformer_flux3").new(
            "Flux3PosEmbed", lambda m, to: m(ints(LONG, 200, 4)), 2000, [8, 8, 8, 8]
        ),
        _of("transformer_ideogram4").new(
            "Ideogram4MRoPE", lambda m, to: m(ints(LONG, 1, 200, 3)), DIM, 10_000, (6, 5, 5)
        ),
        _of("transformer_minimax_h3").new(
            "MiniMaxH3RotaryPosEmbed", lambda m, to: m(ints(LONG, 200, 3).float()), 8
        ),
        _of("transformer_cosmos3").new(
            "Cosmos3VLTextRotaryEmbedding",
            lambda m, to: m(ints(LONG, 3, 1, 200), CPU, to(torch.zeros(1)).dtype),
            DIM,
            10_000.0,
            (6, 5, 5),
        ),
        _of("transformer_helios").new(
            "HeliosRotaryPosEmbed", lambda m, to: m(ints(LONG, 1, 8), 24, 20, CPU), AXES, 10_000.0
        ),
        _of("transformer_ltx2").new(
            "LTX2AudioVideoRotaryPosEmbed", lambda m, to: m(ints(LONG, 1, 3, 200).float()), DIM
        ),
        _of("transformer_sana_wm_refiner").new(
            "SanaWMLTX2AudioVideoRotaryPosEmbed", lambda m, to: m(ints(LONG, 1, 3, 200).float()), DIM
        ),
        decoder.new("MiniMaxH3VideoRotaryPosEmbed", batched, 24),
    ]


def _grids() -> list[Subject]:
    """Modules that take positions from the size of what they are given."""

    def picture(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 4, 300, 4)))

    return [
        _of("transformer_hunyuan_video").new("HunyuanVideoRotaryPosEmbed", _video, 2, 1, AXES),
        _of("transformer_hunyuan_video15").new("HunyuanVideo15RotaryPosEmbed", _video, 2, 1, AXES),
        _of("transformer_motif_video").new("MotifVideoRotaryPosEmbed", _video, 2, 1, AXES),
        _of("transformer_cosmos").new("CosmosRotaryPosEmbed", _video, DIM),
        _of("transformer_easyanimate").new("EasyAnimateRotaryPosEmbed", _video, 2, DIM),
        _of("transformer_hunyuanimage").new("HunyuanImageRotaryPosEmbed", picture, (1, 1), (16, 16)),
        _of("transformer_cogview4").new("CogView4RotaryPosEmbed", picture, DIM, 1, (64, 64)),
        _of("transformer_glm_image").new("GlmImageRotaryPosEmbed", picture, DIM, 1),
        _of("transformer_hunyuan_video_framepack").new(
            "HunyuanVideoFramepackRotaryPosEmbed", lambda m, to: m(ints(LONG, 8), 48, 40, CPU), 2, 1, AXES
        ),
        _of("transformer_ltx").new(
            "LTXVideoRotaryPosEmbed",
            lambda m, to: m(to(floats(1, 8 * 24 * 20, DIM)), 8, 24, 20, (1.0, 32, 32)),
            DIM,
        ),
        _of("transformer_mochi").new(
            "MochiRoPE", lambda m, to: m(to(floats(3, 4, DIM // 2)), 8, 24, 20, CPU, torch.float32)
        ),
    ]


def _others() -> list[Subject]:
    """One axis, in text encoders, audio and decoders."""
    kolors = Family("diffusers", "diffusers.pipelines.kolors.text_encoder")
    autoencoders = "diffusers.models.autoencoders"

    def phases(m: Any, to: Cast) -> Any:
        return m(LONG, CPU)

    def partial(m: Any, to: Cast) -> Any:
        rotate = lib(f"{TRANSFORMERS}.transformer_stable_audio3")._apply_rotary_partial
        return rotate(to(floats(1, LONG, 4, DIM)), m(LONG, CPU))

    def tokens(m: Any, to: Cast) -> Any:
        return m(to(floats(1, LONG, DIM)), torch.arange(LONG)[None])

    rope_scaling = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    return [
        kolors.new("ChatGLM RotaryEmbedding", lambda m, to: m(LONG), DIM),
        _of("transformer_stable_audio3").new("StableAudio3RotaryEmbedding", phases, DIM),
        _of("transformer_stable_audio3").new("StableAudio3RotaryEmbedding, applied", partial, DIM),
        _of("transformer_minimax_music3").new("MiniMaxMusic3RotaryEmbedding", phases, DIM),
        _of("transformer_longcat_audio_dit").new(
            "AudioDiTRotaryEmbedding", lambda m, to: m(to(floats(1, LONG, DIM))), DIM
        ),
        _of("transformer_omnigen").new(
            "OmniGenSuScaledRotaryEmbedding", tokens, DIM, rope_scaling=rope_scaling
        ),
        Family("diffusers", f"{autoencoders}.autoencoder_same").new("SAME RotaryEmbedding", phases, DIM),
        Family("diffusers", f"{autoencoders}.ltx2_diffusion_decoder").new(
            "LTX2VideoVaeRotaryPosEmbed3D", lambda m, to: m(to(floats(1, 4, 24, 300, 1, DIM))), DIM
        ),
        Family("diffusers", "diffusers.models.condition_embedders.condition_embedder_anima").new(
            "AnimaRotaryEmbedding", tokens, DIM
        ),
        Family("diffusers", "diffusers.pipelines.ltx2.connectors").new(
            "LTX2RotaryPosEmbed1d", lambda m, to: m(1, LONG, CPU), DIM
        ),
        Family("diffusers", "diffusers.models.embeddings").new(
            "SinusoidalPositionalEmbedding", lambda m, to: m(to(floats(1, LONG, DIM))), DIM, LONG
        ),
    ]


def _times() -> list[Subject]:
    """Sinusoids of the time step."""
    of = Family("diffusers", "diffusers.models.embeddings")

    def times(m: Any, to: Cast) -> Any:
        return m(ints(1000, 32).float())

    def fractions(m: Any, to: Cast) -> Any:
        return m(ints(256, 32).float() / 256)

    return [
        of.new("Timesteps", times, 64, True, 0.0),
        _of("transformer_bria").new("BriaTimesteps", times, 64, True, 0.0),
        _of("transformer_bria_fibo").new("BriaFiboTimesteps", times, 64, True, 0.0),
        _of("transformer_skyreels_v2").new("SkyReelsV2Timesteps", times, 64, True),
        _of("transformer_qwenimage21").new("QwenImage21TemporalTimesteps", fractions, 64),
        _of("transformer_longcat_audio_dit").new("AudioDiTSinusPositionEmbedding", fractions, 64),
        _of("transformer_stable_audio3").new("StableAudio3ExpoFourierFeatures", fractions, 64),
    ]


def _patches() -> list[Subject]:
    """Patch embeddings that add sinusoids of their own."""
    of = Family("diffusers", "diffusers.models.embeddings")
    width = 64

    def picture(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 4, 32, 24)))

    def square(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 4, 32, 32)))

    def video(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 8, 16)), to(floats(1, 2, 4, 32, 24)))

    return [
        of.new("PatchEmbed", picture, 64, 64, 2, 4, width, pos_embed_max_size=48),
        of.new("PatchEmbed, whole", square, 32, 32, 2, 4, width),
        of.new(
            "CogVideoXPatchEmbed",
            video,
            2,
            None,
            4,
            width,
            16,
            sample_width=24,
            sample_height=32,
            sample_frames=5,
            max_text_seq_length=8,
            use_learned_positional_embeddings=False,
        ),
        of.new(
            "CogView3PlusPatchEmbed",
            lambda m, to: m(to(floats(1, 4, 32, 24)), to(floats(1, 8, 16))),
            4,
            width,
            2,
            16,
            48,
        ),
        _of("transformer_omnigen").new(
            "OmniGenPatchEmbed",
            lambda m, to: m(to(floats(1, 4, 32, 24)), False),
            2,
            4,
            width,
            pos_embed_max_size=48,
            base_size=16,
        ),
        _of("auraflow_transformer_2d").new("AuraFlowPatchEmbed", picture, 32, 24, 2, 4, width, 1024),
    ]
