"""RopeSpec: what a model's config says about rotary position embeddings, and the frequencies that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from safe_rope.frequencies._checks import ROPE_TYPES, check
from safe_rope.frequencies._config import read_fields
from safe_rope.frequencies._formulas import ARITHMETICS, FORMULAS, SCALINGS

__all__ = ["ROPE_TYPES", "Bits", "RopeSpec"]

Bits = Literal["checkpoint", "exact", "machine"]
"""Which rounding of the frequencies; see `RopeSpec.inv_freq`."""


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of one model, or of one layer type of it; immutable, hashable, picklable.

    Attributes:
        rope_type: one of ``ROPE_TYPES``.
        rope_theta: the base of the geometric progression, positive.
        rotary_dim: how many of a head's channels rotate, even; for ``proportional`` the whole head.
        head_dim: channels per head.
        max_position_embeddings: the longest sequence that the config announces.
        partial_rotary_factor: for ``proportional``, the part of the frequencies that is not zero.

    The others are the options of single rope types under their usual names, None where they do not apply.

    Raises:
        ConfigError: the values contradict each other, or one that the rope type needs is missing.
    """

    rope_type: str
    rope_theta: float
    rotary_dim: int
    head_dim: int
    max_position_embeddings: int | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            if isinstance(getattr(self, name), list):  # a list would not hash
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check(self)

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer_type: str | None = None,
        *,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
    ) -> RopeSpec:
        """Read a spec from a config object, or from a dict that holds the content of a ``config.json``.

        Args:
            config: the form of transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).
                A composite config without rope information of its own is read at its ``text_config``.
            layer_type: which rotary embedding, where layers differ ("full_attention", "sliding_attention").
            head_dim: overrides what the config says.
            rotary_dim: overrides what follows from ``head_dim`` and ``partial_rotary_factor``.

        Raises:
            ConfigError: the config is incomplete, contradicts itself, or needs a ``layer_type``.

        Where transformers 4 and 5 read the same keys differently, the config's form decides (the trained
        length and the factor of longrope, the trained length of yarn and llama3).
        """
        return cls(**read_fields(config, layer_type, head_dim, rotary_dim))

    @property
    def depends_on_length(self) -> bool:
        """Whether ``inv_freq`` differs between sequence lengths."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return SCALINGS[self.rope_type](self) if self.rope_type in SCALINGS else 1.0

    @property
    def scales_attention(self) -> bool:
        """Whether the rope type has a formula for `attention_scaling`."""
        return self.rope_type in SCALINGS

    def unscaled(self) -> RopeSpec:
        """Return the spec without its scaling.

        Linear scaling in transformers 4.36 divides the positions by ``factor`` and leaves ``inv_freq`` as the
        unscaled spec has it; later versions divide ``inv_freq``.
        """
        return RopeSpec(
            rope_type="default",
            rope_theta=self.rope_theta,
            rotary_dim=self.rotary_dim,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
        )

    def inv_freq(self, seq_len: int | torch.Tensor | None = None, bits: Bits = "checkpoint") -> torch.Tensor:
        """Return the inverse frequencies.

        Args:
            seq_len: the current sequence length, for the types that depend on it; an int or an integer tensor
                of one element. Up to ``max_position_embeddings``, and for None, dynamic NTK gives the base
                frequencies; beyond, an int raises the base in double precision (as transformers 4.36 does)
                and a tensor in FP32 (as later versions do). longrope takes its long factors beyond
                ``original_max_position_embeddings``.
            bits: ``"checkpoint"``: what transformers computes on a CPU with AVX-512, on every machine.
                ``"exact"``: the config's formula in float64, rounded once, the same on every machine; most
                frequencies are the checkpoint's, the others differ by one or two units in the last place.
                ``"machine"``: what transformers computes on this CPU. FP32 ``pow`` is SLEEF's in vector code
                and the C library's in scalar code, so a few frequencies of a model may differ from the
                checkpoint's by one unit: with AVX2 where rotary_dim is no multiple of 64, in scalar code for
                any.

        Returns:
            FP32 ``[rotary_dim // 2]`` on CPU, new at every call, whatever the default dtype, autocast,
            ``torch.device`` contexts and ``deepspeed.zero.Init`` say.

        Raises:
            TypeError: ``seq_len`` is not an integer.
            ValueError: ``seq_len`` is negative, or ``bits`` none of the three.
        """
        length = _length(seq_len)
        if bits not in ARITHMETICS:
            raise ValueError(f'bits must be "checkpoint", "exact" or "machine", got {bits!r}')
        return self._computed(length, bits, as_tensor=isinstance(seq_len, torch.Tensor))

    def inv_freq_below(self, length: float | torch.Tensor, bits: Bits = "checkpoint") -> torch.Tensor:
        """Return the inverse frequencies that transformers takes for positions below ``length``.

        Args:
            length: ``position_ids.max() + 1``, of any real dtype: positions may be fractions.
            bits: as for `inv_freq`.

        Returns:
            FP32 ``[rotary_dim // 2]`` on CPU, as `inv_freq` gives it for a tensor.
        """
        length = cast(float, length.item()) if isinstance(length, torch.Tensor) else length
        return self._computed(length, bits, as_tensor=True)

    # An inference tensor made here would outlive the mode and could not be used in training. As decorators:
    # a Dynamo before 2.8 cannot go on after a break of the graph inside such a block.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _computed(self, length: float, bits: Bits, as_tensor: bool) -> torch.Tensor:
        return FORMULAS[self.rope_type](ARITHMETICS[bits], self, length, as_tensor).to(torch.float32)


def _length(seq_len: int | torch.Tensor | None) -> int:
    if seq_len is None:
        return 0
    if isinstance(seq_len, torch.Tensor):
        if seq_len.is_floating_point() or seq_len.is_complex() or seq_len.dtype == torch.bool:
            raise TypeError(
                f"seq_len must be an integer tensor, got {seq_len.dtype}; pass position_ids.max() + 1"
            )
        seq_len = cast(int, seq_len.item())
    if isinstance(seq_len, bool) or not isinstance(seq_len, int):
        raise TypeError(f"seq_len must be an integer, got {seq_len!r}; pass position_ids.max() + 1")
    if seq_len < 0:
        raise ValueError(f"seq_len must not be negative, got {seq_len}; pass position_ids.max() + 1")
    return seq_len
