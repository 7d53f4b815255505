"""Position modules of timm: rotary on two axes, sinusoids, relative and log-spaced biases."""

from __future__ import annotations

from typing import Any

from laboratory.libraries.subject import Cast, Family, Subject, floats, ints, lib

HEADS, DIM = 4, 32
GRID = [48, 40]
WINDOW = (7, 7)


def timm() -> list[Subject]:
    """The layers, and the modules that some models have of their own."""
    of = Family("timm", "timm.layers.pos_embed_sincos")
    relative = Family("timm", "timm.layers.pos_embed_rel")

    def tables(m: Any, to: Cast) -> Any:
        return m.get_embed(GRID)

    def cached(m: Any, to: Cast) -> Any:
        return m.get_embed()

    def picture(m: Any, to: Cast) -> Any:
        return m(to(floats(1, DIM, *GRID)))

    def bias(m: Any, to: Cast) -> Any:
        return m(to(floats(1, HEADS, 49, 49)))

    def concatenated(m: Any, to: Cast) -> Any:
        rotate = lib(of.module).apply_rot_embed_cat
        return rotate(to(floats(1, HEADS, GRID[0] * GRID[1], DIM)), m.get_embed(GRID), half=False)

    index = {"in_pixels": False, "ref_feat_shape": [16, 16]}
    return [
        of("RotaryEmbedding", lambda x: x.RotaryEmbedding(DIM, in_pixels=False), tables),
        of("RotaryEmbedding, applied", lambda x: x.RotaryEmbedding(DIM, in_pixels=False), picture),
        of("RotaryEmbedding, pixels", lambda x: x.RotaryEmbedding(DIM), tables),
        of("RotaryEmbedding, linear bands", lambda x: x.RotaryEmbedding(DIM, linear_bands=True), tables),
        of(
            "RotaryEmbedding, cached",
            lambda x: x.RotaryEmbedding(DIM, in_pixels=False, feat_shape=GRID),
            cached,
        ),
        of("RotaryEmbeddingCat", lambda x: x.RotaryEmbeddingCat(DIM, **index), tables),
        of("RotaryEmbeddingCat, applied", lambda x: x.RotaryEmbeddingCat(DIM, **index), concatenated),
        of(
            "RotaryEmbeddingCat, cached",
            lambda x: x.RotaryEmbeddingCat(DIM, feat_shape=GRID, **index),
            cached,
        ),
        of("RotaryEmbeddingMRope", lambda x: x.RotaryEmbeddingMRope(DIM, (4, 6, 6)), tables),
        of("RotaryEmbeddingMixed", lambda x: x.RotaryEmbeddingMixed(DIM * HEADS, 2, HEADS), tables),
        of(
            "RotaryEmbeddingMixed, cached",
            lambda x: x.RotaryEmbeddingMixed(DIM * HEADS, 2, HEADS, feat_shape=GRID),
            cached,
        ),
        of("RotaryEmbeddingDinoV3", lambda x: x.RotaryEmbeddingDinoV3(DIM), tables),
        of("RotaryEmbeddingDinoV3, cached", lambda x: x.RotaryEmbeddingDinoV3(DIM, feat_shape=GRID), cached),
        of(
            "RotaryEmbeddingDinoV3, periods",
            lambda x: x.RotaryEmbeddingDinoV3(DIM, min_period=0.01, max_period=10.0),
            tables,
        ),
        of("FourierEmbed", lambda x: x.FourierEmbed(), lambda m, to: m(to(floats(1, 3, *GRID)))),
        Family("timm", "timm.models.gemma4_vit")(
            "Gemma4RotaryEmbedding2D",
            lambda x: x.Gemma4RotaryEmbedding2D(DIM),
            lambda m, to: m(to(floats(1, 64, DIM)), ints(4096, 1, 64, 2)),
        ),
        relative("RelPosBias", lambda x: x.RelPosBias(WINDOW, HEADS), bias),
        relative("RelPosBiasTf", lambda x: x.RelPosBiasTf(WINDOW, HEADS), bias),
        relative("RelPosMlp, swin", lambda x: x.RelPosMlp(WINDOW, HEADS, mode="swin"), bias),
        relative("RelPosMlp, cr", lambda x: x.RelPosMlp(WINDOW, HEADS, mode="cr"), bias),
        Family("timm", "timm.models.swin_transformer_v2")(
            "SwinV2 WindowAttention",
            lambda x: x.WindowAttention(DIM, WINDOW, HEADS),
            lambda m, to: m(to(floats(2, 49, DIM))),
        ),
        Family("timm", "timm.models.swin_transformer_v2_cr")(
            "SwinV2-CR attention",
            lambda x: x.WindowMultiHeadAttention(DIM, HEADS, WINDOW),
            lambda m, to: m(to(floats(2, 49, DIM))),
        ),
        Family("timm", "timm.models.edgenext")(
            "EdgeNeXt PositionalEncodingFourier",
            lambda x: x.PositionalEncodingFourier(DIM, DIM),
            lambda m, to: m((1, *GRID)),
        ),
        Family("timm", "timm.models.xcit")(
            "XCiT PositionalEncodingFourier",
            lambda x: x.PositionalEncodingFourier(DIM, DIM),
            lambda m, to: m(1, *GRID),
        ),
        Family("timm", "timm.models.beit")(
            "BEiT RelativePositionBias",
            lambda x: x.RelativePositionBias(WINDOW, HEADS),
            lambda m, to: m(),
        ),
        Family("timm", "timm.layers.halo_attn")(
            "PosEmbedRel",
            lambda x: x.PosEmbedRel(4, 6, DIM, 0.2),
            lambda m, to: m(to(floats(2, 3, 16, DIM))),
        ),
    ]
