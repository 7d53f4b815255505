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
        of.new("RotaryEmbedding", tables, DIM, in_pixels=False),
        of.new("RotaryEmbedding, applied", picture, DIM, in_pixels=False),
        of.new("RotaryEmbedding, pixels", tables, DIM),
        of.new("RotaryEmbedding, linear bands", tables, DIM, linear_bands=True),
        of.new("RotaryEmbedding, cached", cached, DIM, in_pixels=False, feat_shape=GRID),
        of.new("RotaryEmbeddingCat", tables, DIM, **index),
        of.new("RotaryEmbeddingCat, applied", concatenated, DIM, **index),
        of.new("RotaryEmbeddingCat, cached", cached, DIM, feat_shape=GRID, **index),
        of.new("RotaryEmbeddingMRope", tables, DIM, (4, 6, 6)),
        of.new("RotaryEmbeddingMixed", tables, DIM * HEADS, 2, HEADS),
        of.new("RotaryEmbeddingMixed, cached", cached, DIM * HEADS, 2, HEADS, feat_shape=GRID),
        of.new("RotaryEmbeddingDinoV3", tables, DIM),
        of.new("RotaryEmbeddingDinoV3, cached", cached, DIM, feat_shape=GRID),
        of.new("RotaryEmbeddingDinoV3, periods", tables, DIM, min_period=0.01, max_period=10.0),
        of.new("FourierEmbed", lambda m, to: m(to(floats(1, 3, *GRID)))),
        Family("timm", "timm.models.gemma4_vit").new(
            "Gemma4RotaryEmbedding2D", lambda m, to: m(to(floats(1, 64, DIM)), ints(4096, 1, 64, 2)), DIM
        ),
        relative.new("RelPosBias", bias, WINDOW, HEADS),
        relative.new("RelPosBiasTf", bias, WINDOW, HEADS),
        relative.new("RelPosMlp, swin", bias, WINDOW, HEADS, mode="swin"),
        relative.new("RelPosMlp, cr", bias, WINDOW, HEADS, mode="cr"),
        Family("timm", "timm.models.swin_transformer_v2").new(
            "SwinV2 WindowAttention", lambda m, to: m(to(floats(2, 49, DIM))), DIM, WINDOW, HEADS
        ),
        Family("timm", "timm.models.swin_transformer_v2_cr")(
            "SwinV2-CR attention",
            lambda x: x.WindowMultiHeadAttention(DIM, HEADS, WINDOW),
            lambda m, to: m(to(floats(2, 49, DIM))),
        ),
        Family("timm", "timm.models.edgenext").new(
            "EdgeNeXt PositionalEncodingFourier", lambda m, to: m((1, *GRID)), DIM, DIM
        ),
        Family("timm", "timm.models.xcit").new(
            "XCiT PositionalEncodingFourier", lambda m, to: m(1, *GRID), DIM, DIM
        ),
        Family("timm", "timm.models.beit").new("BEiT RelativePositionBias", lambda m, to: m(), WINDOW, HEADS),
        Family("timm", "timm.layers.halo_attn").new(
            "PosEmbedRel", lambda m, to: m(to(floats(2, 3, 16, DIM))), 4, 6, DIM, 0.2
        ),
    ]
