"""What the forward of a class reads besides its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from safe_rope._base.forwards import reads_of


class OfRopeTypes(nn.Module):
    """As the rotary modules of transformers 4.43 to 4.51."""

    inv_freq: Tensor
    rope_init_fn: Any

    def _dynamic_frequency_update(self, position_ids: Tensor) -> None:
        self.inv_freq = self.rope_init_fn(self.config)

    def _longrope_frequency_update(self, position_ids: Tensor) -> None:
        if position_ids.max() > self.config.original_max_position_embeddings:
            self.inv_freq = self.rope_init_fn(self.config)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        self._dynamic_frequency_update(position_ids)
        self._longrope_frequency_update(position_ids)
        return position_ids[..., None] * self.inv_freq


class OfConfig(OfRopeTypes):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return position_ids[..., None] * self.inv_freq * self.config.scale


def test_a_config_counts_but_for_what_makes_the_frequencies_of_a_rope_type() -> None:
    assert not reads_of(OfRopeTypes).has_config
    assert reads_of(OfConfig).has_config
