"""Interleaved rotary position embedding on the trailing channels: products and sum in float32, one rounding."""

import torch


def apply_rope(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], *, inverse: bool = False) -> torch.Tensor:
    """Rotate the channel pairs (0, 1), (2, 3), ... of x's last `2 * cos.shape[-1]` channels.

    Args:
        x: [N, dim] or [N, heads, dim].
        cos_sin: each [N, rope_dim // 2], float32.
        inverse: rotate back.
    """
    cos, sin = cos_sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    rope_dim = 2 * cos.shape[-1]
    even, odd = x[..., -rope_dim:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
