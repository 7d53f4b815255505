"""Position modules of diffusers: rotary on one to four axes, sinusoids of positions and of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laboratory.libraries.subject import LONG, Ask, Cast, Family, Subject, floats, ints, lib

DIM = 32
AXES = [8, 12, 12]
CPU = torch.device("cpu")
TRANSFORMERS = "diffusers.models.transformers"
_Make = Callable[[Any], Any]


def diffusers() -> list[Subject]:
    """Everything that the transformers, decoders and text encoders of diffusers rotate or add."""
    return [*_tables(), *_axes(), *_grids(), *_others(), *_times(), *_patches()]


def _of(file: str) -> Family:
    return Family("diffusers", f"{TRANSFORMERS}.{file}")


def _video(m: Any, to: Cast) -> Any:
    return m(to(floats(1, 4, 8, 48, 40)))


def _tables() -> list[Subject]:
    """Modules that store ready tables, for sizes up to a largest one."""
    files = {
        "WanRotaryPosEmbed": "transformer_wan",
        "SkyReelsV2RotaryPosEmbed": "transformer_skyreels_v2",
        "ChronoEditRotaryPosEmbed": "transformer_chronoedit",
    }
    made = [_of(file)(name, _stored(name), _video) for name, file in files.items()]
    made += [
        _of("transformer_sana_video")("SanaVideo's WanRotaryPosEmbed", _stored("WanRotaryPosEmbed"), _video),
        _of("transformer_wan_animate")(
            "WanAnimate's WanRotaryPosEmbed", _stored("WanRotaryPosEmbed"), _video
        ),
    ]

    def layout(m: Any, to: Cast) -> Any:
        shape = {"total_frames": 8, "full_frame_shape": (24, 20), "compressed_frame_shape": (12, 10)}
        return m(shape | {"num_compressed_frames": 4, "num_full_frames": 4}, CPU)

    images = [(1, 48, 40)]
    return [
        *made,
        _of("transformer_anyflow")("AnyFlowRotaryPosEmbed", _stored("AnyFlowRotaryPosEmbed"), layout),
        _of("transformer_anyflow_far")(
            "AnyFlowCausalRotaryPosEmbed",
            lambda x: x.AnyFlowCausalRotaryPosEmbed(DIM, (1, 2, 2), (1, 4, 4), 1024),
            layout,
        ),
        _of("transformer_sana_wm")(
            "SanaWMRotaryPosEmbed",
            lambda x: x.SanaWMRotaryPosEmbed(DIM, (1, 2, 2), 1024),
            lambda m, to: m((8, 24, 20)),
        ),
        _of("transformer_qwenimage")(
            "QwenEmbedRope",
            lambda x: x.QwenEmbedRope(10_000, AXES, scale_rope=True),
            lambda m, to: m(images, device=CPU, max_txt_seq_len=1024),
        ),
        _of("transformer_qwenimage")(
            "QwenEmbedLayer3DRope",
            lambda x: x.QwenEmbedLayer3DRope(10_000, AXES, scale_rope=True),
            lambda m, to: m(images, 1024, device=CPU),
        ),
        _of("transformer_qwenimage21")(
            "QwenImage21Rope", lambda x: x.QwenImage21Rope(10_000, AXES), _image_mask
        ),
        _of("transformer_nucleusmoe_image")(
            "NucleusMoEEmbedRope",
            lambda x: x.NucleusMoEEmbedRope(10_000, AXES, scale_rope=True),
            lambda m, to: m(images, device=CPU, max_txt_seq_len=1024),
        ),
        _of("transformer_lumina2")(
            "Lumina2RotaryPosEmbed",
            lambda x: x.Lumina2RotaryPosEmbed(10_000, AXES, (1024, 128, 128)),
            lambda m, to: m(to(floats(1, 4, 48, 40)), torch.ones(1, 512, dtype=torch.int64))[:4],
        ),
        _of("transformer_kandinsky")(
            "Kandinsky5RoPE1D",
            lambda x: x.Kandinsky5RoPE1D(DIM, LONG),
            lambda m, to: m(torch.arange(LONG)),
        ),
        _of("transformer_kandinsky")(
            "Kandinsky5RoPE3D",
            lambda x: x.Kandinsky5RoPE3D(AXES),
            lambda m, to: m((1, 16, 24, 100), _ranges()),
        ),
        _of("transformer_kandinsky6")(
            "Kandinsky6RoPE1D",
            lambda x: x.Kandinsky6RoPE1D(DIM, LONG),
            lambda m, to: m(torch.arange(LONG)),
        ),
        _of("transformer_kandinsky6")(
            "Kandinsky6RoPE3D", lambda x: x.Kandinsky6RoPE3D(AXES), lambda m, to: m(_ranges())
        ),
        _of("transformer_kandinsky6_sr")(
            "Kandinsky6SRRoPE3D", lambda x: x.Kandinsky6SRRoPE3D(AXES), lambda m, to: m(_ranges())
        ),
    ]


def _stored(name: str) -> _Make:
    return lambda x: getattr(x, name)(DIM, (1, 2, 2), 1024)


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

    files: dict[str, tuple[str, _Make, Ask]] = {
        "FluxPosEmbed": ("flux", lambda x: x.FluxPosEmbed(10_000, AXES), positions),
        "Flux2PosEmbed": (
            "flux2",
            lambda x: x.Flux2PosEmbed(2000, [8, 8, 8, 8]),
            lambda m, to: m(ints(LONG, 200, 4)),
        ),
        "BriaPosEmbed": ("bria", lambda x: x.BriaPosEmbed(10_000, AXES), positions),
        "LongCatImagePosEmbed": ("longcat_image", lambda x: x.LongCatImagePosEmbed(10_000, AXES), positions),
        "OvisImagePosEmbed": ("ovis_image", lambda x: x.OvisImagePosEmbed(10_000, AXES), positions),
        "Krea2RotaryPosEmbed": ("krea2", lambda x: x.Krea2RotaryPosEmbed(1000, AXES), positions),
        "Flux3PosEmbed": (
            "flux3",
            lambda x: x.Flux3PosEmbed(2000, [8, 8, 8, 8]),
            lambda m, to: m(ints(LONG, 200, 4)),
        ),
        "Ideogram4MRoPE": (
            "ideogram4",
            lambda x: x.Ideogram4MRoPE(DIM, 10_000, (6, 5, 5)),
            lambda m, to: m(ints(LONG, 1, 200, 3)),
        ),
        "MiniMaxH3RotaryPosEmbed": (
            "minimax_h3",
            lambda x: x.MiniMaxH3RotaryPosEmbed(8),
            lambda m, to: m(ints(LONG, 200, 3).float()),
        ),
        "Cosmos3VLTextRotaryEmbedding": (
            "cosmos3",
            lambda x: x.Cosmos3VLTextRotaryEmbedding(DIM, 10_000.0, (6, 5, 5)),
            lambda m, to: m(ints(LONG, 3, 1, 200), CPU, to(torch.zeros(1)).dtype),
        ),
        "HeliosRotaryPosEmbed": (
            "helios",
            lambda x: x.HeliosRotaryPosEmbed(AXES, 10_000.0),
            lambda m, to: m(ints(LONG, 1, 8), 24, 20, CPU),
        ),
        "LTX2AudioVideoRotaryPosEmbed": (
            "ltx2",
            lambda x: x.LTX2AudioVideoRotaryPosEmbed(DIM),
            lambda m, to: m(ints(LONG, 1, 3, 200).float()),
        ),
        "SanaWMLTX2AudioVideoRotaryPosEmbed": (
            "sana_wm_refiner",
            lambda x: x.SanaWMLTX2AudioVideoRotaryPosEmbed(DIM),
            lambda m, to: m(ints(LONG, 1, 3, 200).float()),
        ),
    }
    made = [_of(f"transformer_{file}")(name, build, ask) for name, (file, build, ask) in files.items()]
    decoder = Family("diffusers", "diffusers.models.autoencoders.autoencoder_kl_minimax_h3")
    build_decoder: _Make = lambda x: x.MiniMaxH3VideoRotaryPosEmbed(24)  # noqa: E731
    return [*made, decoder("MiniMaxH3VideoRotaryPosEmbed", build_decoder, batched)]


def _grids() -> list[Subject]:
    """Modules that take positions from the size of what they are given."""
    files: dict[str, tuple[str, _Make]] = {
        "HunyuanVideoRotaryPosEmbed": ("hunyuan_video", lambda x: x.HunyuanVideoRotaryPosEmbed(2, 1, AXES)),
        "HunyuanVideo15RotaryPosEmbed": (
            "hunyuan_video15",
            lambda x: x.HunyuanVideo15RotaryPosEmbed(2, 1, AXES),
        ),
        "MotifVideoRotaryPosEmbed": ("motif_video", lambda x: x.MotifVideoRotaryPosEmbed(2, 1, AXES)),
        "CosmosRotaryPosEmbed": ("cosmos", lambda x: x.CosmosRotaryPosEmbed(DIM)),
        "EasyAnimateRotaryPosEmbed": ("easyanimate", lambda x: x.EasyAnimateRotaryPosEmbed(2, DIM)),
    }
    images: dict[str, tuple[str, _Make]] = {
        "HunyuanImageRotaryPosEmbed": (
            "hunyuanimage",
            lambda x: x.HunyuanImageRotaryPosEmbed((1, 1), (16, 16)),
        ),
        "CogView4RotaryPosEmbed": ("cogview4", lambda x: x.CogView4RotaryPosEmbed(DIM, 1, (64, 64))),
        "GlmImageRotaryPosEmbed": ("glm_image", lambda x: x.GlmImageRotaryPosEmbed(DIM, 1)),
    }

    def picture(m: Any, to: Cast) -> Any:
        return m(to(floats(1, 4, 300, 4)))

    return [
        *(_of(f"transformer_{file}")(name, build, _video) for name, (file, build) in files.items()),
        *(_of(f"transformer_{file}")(name, build, picture) for name, (file, build) in images.items()),
        _of("transformer_hunyuan_video_framepack")(
            "HunyuanVideoFramepackRotaryPosEmbed",
            lambda x: x.HunyuanVideoFramepackRotaryPosEmbed(2, 1, AXES),
            lambda m, to: m(ints(LONG, 8), 48, 40, CPU),
        ),
        _of("transformer_ltx")(
            "LTXVideoRotaryPosEmbed",
            lambda x: x.LTXVideoRotaryPosEmbed(DIM),
            lambda m, to: m(to(floats(1, 8 * 24 * 20, DIM)), 8, 24, 20, (1.0, 32, 32)),
        ),
        _of("transformer_mochi")(
            "MochiRoPE",
            lambda x: x.MochiRoPE(),
            lambda m, to: m(to(floats(3, 4, DIM // 2)), 8, 24, 20, CPU, torch.float32),
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
        kolors("ChatGLM RotaryEmbedding", lambda x: x.RotaryEmbedding(DIM), lambda m, to: m(LONG)),
        _of("transformer_stable_audio3")(
            "StableAudio3RotaryEmbedding", lambda x: x.StableAudio3RotaryEmbedding(DIM), phases
        ),
        _of("transformer_stable_audio3")(
            "StableAudio3RotaryEmbedding, applied", lambda x: x.StableAudio3RotaryEmbedding(DIM), partial
        ),
        _of("transformer_minimax_music3")(
            "MiniMaxMusic3RotaryEmbedding", lambda x: x.MiniMaxMusic3RotaryEmbedding(DIM), phases
        ),
        _of("transformer_longcat_audio_dit")(
            "AudioDiTRotaryEmbedding",
            lambda x: x.AudioDiTRotaryEmbedding(DIM),
            lambda m, to: m(to(floats(1, LONG, DIM))),
        ),
        _of("transformer_omnigen")(
            "OmniGenSuScaledRotaryEmbedding",
            lambda x: x.OmniGenSuScaledRotaryEmbedding(DIM, rope_scaling=rope_scaling),
            tokens,
        ),
        Family("diffusers", f"{autoencoders}.autoencoder_same")(
            "SAME RotaryEmbedding", lambda x: x.RotaryEmbedding(DIM), phases
        ),
        Family("diffusers", f"{autoencoders}.ltx2_diffusion_decoder")(
            "LTX2VideoVaeRotaryPosEmbed3D",
            lambda x: x.LTX2VideoVaeRotaryPosEmbed3D(DIM),
            lambda m, to: m(to(floats(1, 4, 24, 300, 1, DIM))),
        ),
        Family("diffusers", "diffusers.models.condition_embedders.condition_embedder_anima")(
            "AnimaRotaryEmbedding", lambda x: x.AnimaRotaryEmbedding(DIM), tokens
        ),
        Family("diffusers", "diffusers.pipelines.ltx2.connectors")(
            "LTX2RotaryPosEmbed1d", lambda x: x.LTX2RotaryPosEmbed1d(DIM), lambda m, to: m(1, LONG, CPU)
        ),
        Family("diffusers", "diffusers.models.embeddings")(
            "SinusoidalPositionalEmbedding",
            lambda x: x.SinusoidalPositionalEmbedding(DIM, LONG),
            lambda m, to: m(to(floats(1, LONG, DIM))),
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
        of("Timesteps", lambda x: x.Timesteps(64, True, 0.0), times),
        _of("transformer_bria")("BriaTimesteps", lambda x: x.BriaTimesteps(64, True, 0.0), times),
        _of("transformer_bria_fibo")(
            "BriaFiboTimesteps", lambda x: x.BriaFiboTimesteps(64, True, 0.0), times
        ),
        _of("transformer_skyreels_v2")(
            "SkyReelsV2Timesteps", lambda x: x.SkyReelsV2Timesteps(64, True), times
        ),
        _of("transformer_qwenimage21")(
            "QwenImage21TemporalTimesteps", lambda x: x.QwenImage21TemporalTimesteps(64), fractions
        ),
        _of("transformer_longcat_audio_dit")(
            "AudioDiTSinusPositionEmbedding", lambda x: x.AudioDiTSinusPositionEmbedding(64), fractions
        ),
        _of("transformer_stable_audio3")(
            "StableAudio3ExpoFourierFeatures", lambda x: x.StableAudio3ExpoFourierFeatures(64), fractions
        ),
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
        of("PatchEmbed", lambda x: x.PatchEmbed(64, 64, 2, 4, width, pos_embed_max_size=48), picture),
        of("PatchEmbed, whole", lambda x: x.PatchEmbed(32, 32, 2, 4, width), square),
        of(
            "CogVideoXPatchEmbed",
            lambda x: x.CogVideoXPatchEmbed(
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
            video,
        ),
        of(
            "CogView3PlusPatchEmbed",
            lambda x: x.CogView3PlusPatchEmbed(4, width, 2, 16, 48),
            lambda m, to: m(to(floats(1, 4, 32, 24)), to(floats(1, 8, 16))),
        ),
        _of("transformer_omnigen")(
            "OmniGenPatchEmbed",
            lambda x: x.OmniGenPatchEmbed(2, 4, width, pos_embed_max_size=48, base_size=16),
            lambda m, to: m(to(floats(1, 4, 32, 24)), False),
        ),
        _of("auraflow_transformer_2d")(
            "AuraFlowPatchEmbed",
            lambda x: x.AuraFlowPatchEmbed(32, 24, 2, 4, width, 1024),
            picture,
        ),
    ]
