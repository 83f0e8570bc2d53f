"""Linear layers of one attention-TP rank: full precision or block-scaled fp8, whole, column-, row- or group-parallel.

A layer holds only its rank's part of the checkpoint's weight; `rows` and `cols` say which part that is, so a loader
reads each slice once and nothing else. Released DeepSeek-V4 attention weights are float8_e4m3 with one scale per
128 x 128 block; a rank's part need not start on a block border.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

FP8_BLOCK = 128  # rows and columns of a weight that share a scale, and channels of an activation that do

Quantized = tuple[torch.Tensor, torch.Tensor]
"""Pre-quantised activations: values float8_e4m3 [N, dim] and scales float32 [N, ceil(dim / 128)]."""


def dequantize_activation(x_quant: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """values * scales, per 128 channels: [N, dim] in `dtype`."""
    values, scales = x_quant
    wide = scales.float().repeat_interleave(FP8_BLOCK, dim=-1)[:, : values.shape[-1]]
    return (values.float() * wide).to(dtype)


class ParallelLinear(nn.Module):
    """y = x W^T with this rank's `rows` (outputs) and `cols` (inputs) of the checkpoint's W [out, in], no bias.

    Args:
        rows, cols: this rank's part; the whole dimension where None.
        fp8: the weight is float8_e4m3 with `weight_scale_inv`, one scale per 128 x 128 block (dequantised value =
            weight * scale). Products are computed in x's dtype on the dequantised weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rows: slice | None = None,
        cols: slice | None = None,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.full_shape = (out_features, in_features)
        self.rows = rows or slice(0, out_features)
        self.cols = cols or slice(0, in_features)
        self.fp8 = fp8
        shape = (self.rows.stop - self.rows.start, self.cols.stop - self.cols.start)
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn if fp8 else dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if fp8:
            blocks = [part.stop - part.start for part in map(_blocks, (self.rows, self.cols))]
            scale = torch.empty(blocks, dtype=torch.float32, device=device)
            self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def tensor_slices(self) -> Mapping[str, tuple[tuple[int, ...], tuple[slice, ...]]]:
        """For each parameter: the checkpoint tensor's full shape and the part of it that this rank holds."""
        slices = {"weight": (self.full_shape, (self.rows, self.cols))}
        if self.fp8:
            full = tuple(-(-size // FP8_BLOCK) for size in self.full_shape)
            slices["weight_scale_inv"] = (full, (_blocks(self.rows), _blocks(self.cols)))
        return slices

    def dequantized_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of W in `dtype`."""
        if not self.fp8:
            return self.weight.to(dtype)
        scale = _expand(_expand(self.weight_scale_inv, self.rows, dim=0), self.cols, dim=1)
        return (self.weight.float() * scale).to(dtype)

    def forward(self, x: torch.Tensor, x_quant: Quantized | None = None) -> torch.Tensor:
        """x [N, in] -> [N, out]. `x_quant` replaces x where the weight is fp8 and is ignored elsewhere."""
        if self.fp8 and x_quant is not None:
            x = dequantize_activation(x_quant, x.dtype)
        return F.linear(x, self.dequantized_weight(x.dtype))


class GroupedLinear(ParallelLinear):
    """Block-diagonal linear: group g of the input meets rows [g * out_per_group, ...) of W. x [N, groups, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, local groups, in] -> [N, local groups * out_per_group]."""
        weight = self.dequantized_weight(x.dtype).unflatten(0, (x.shape[1], -1))
        return torch.einsum("ngd,god->ngo", x, weight).flatten(1)


def _blocks(part: slice) -> slice:
    """The fp8 blocks that a range of rows or columns touches."""
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))


def _expand(scale: torch.Tensor, part: slice, *, dim: int) -> torch.Tensor:
    """One scale per row (or column) of `part` from one per block that it touches."""
    offset = part.start % FP8_BLOCK
    return scale.repeat_interleave(FP8_BLOCK, dim=dim).narrow(dim, offset, part.stop - part.start)
