"""RMS normalisation: the weighted layer, and the unweighted norm of query heads."""

import torch
from torch import nn

from headfit.kernels.rms_norm_ref import head_rms_norm, rms_norm

__all__ = ["RMSNorm", "head_rms_norm"]


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last dimension, computed in float32 and rounded once to x's dtype."""

    def __init__(self, dim: int, *, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps)
