"""RMS normalisation, weighted (per channel) and unweighted (per query head)."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last dimension, computed in float32 and rounded once to x's dtype."""

    def __init__(self, dim: int, *, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


def head_rms_norm(q: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Unweighted RMS norm of each query head: q [..., head_dim]."""
    return q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps).to(q.dtype)
