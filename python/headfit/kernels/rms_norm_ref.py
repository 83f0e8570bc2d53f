"""RMS normalisation, weighted (per channel) and unweighted (per query head): what it computes, and where it rounds."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """`weight * x / rms(x)` over the last dimension, computed in float32 and rounded once to x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight * y).to(x.dtype)


def head_rms_norm(q: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Unweighted RMS norm of each head, q [..., head_dim]: the factor is rounded to q's dtype, then the product is."""
    return q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps).to(q.dtype)
