"""Interleaved rotary position embedding on the trailing channels, plain or YaRN-scaled.

Frequencies follow transformers' `_compute_yarn_parameters` (YaRN, https://arxiv.org/abs/2309.00071): low frequencies
are divided by `factor`, high ones kept, with a linear ramp between the dimensions that make `beta_slow` and
`beta_fast` turns over the original context. DeepSeek-V4 multiplies cos and sin by `attention_factor` 1.
"""

import math

import torch
from torch import nn

from headfit.config import RopeConfig
from headfit.kernels.rope_ref import apply_rope

__all__ = ["RotaryEmbedding", "apply_rope", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """Angle per position of each channel pair: float32 [rope_dim // 2]."""
    base = rope.theta ** (torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim)
    plain = 1.0 / base
    if rope.rope_type == "default":
        return plain

    def dimension_of(turns: float) -> float:
        return (rope_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept


class RotaryEmbedding(nn.Module):
    """cos and sin of a layer's rotation angles. Not a parameter: recomputed from the config, never loaded."""

    def __init__(self, rope: RopeConfig, rope_dim: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.rope = rope
        self.rope_dim = rope_dim
        self.register_buffer("inv_freq", self._computed().to(device), persistent=False)

    def _computed(self) -> torch.Tensor:
        # On the CPU whatever the default device is: a model made on the meta device has its angles too.
        with torch.device("cpu"):
            return inverse_frequencies(self.rope, self.rope_dim)

    def _apply(self, fn, recurse=True):
        # A cast to bfloat16 must not round the angles, and `to_empty` must not lose them.
        super()._apply(fn, recurse)
        self.inv_freq = self._computed().to(self.inv_freq.device)
        return self

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [N] -> cos, sin float32 [N, rope_dim // 2]."""
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos() * self.rope.attention_factor, angles.sin() * self.rope.attention_factor
