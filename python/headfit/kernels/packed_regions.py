"""What the exact-head kernels' host sides share: checks of their arguments, and division by a page's size."""

import math
from functools import cache

import torch
from torch import Tensor

from headfit.kernels.sparse_mqa_ref import check_sparse_mqa
from headfit.kv_cache import KVRegion, PackedFp8Format

MAX_SOFTMAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)  # kernels take it in base 2, as float32


def check_packed_regions(
    kernel: str,
    *,
    q: Tensor,
    regions: tuple[KVRegion, ...],
    attn_sink: Tensor,
    softmax_scale: float,
    out: Tensor | None,
    alignment: int,
) -> None:
    """Refuse what a kernel over packed pages cannot run: all that its form of the operator promises to refuse.

    Nothing is read back.

    Args:
        kernel: its name in the messages.
        q, out: [num_tokens, num_heads, 512].
        alignment: bytes that pages must start at multiples of.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what is allowed.
    """
    if len(regions) not in (1, 2):
        raise ValueError(f"regions: {len(regions)} of them, allowed: 1 or 2")
    check_sparse_mqa(q, regions, attn_sink)
    if q.shape[1] == 0:
        raise ValueError("q: no heads, allowed: at least 1")
    if not -MAX_SOFTMAX_SCALE <= softmax_scale <= MAX_SOFTMAX_SCALE:  # NaN neither
        raise ValueError(f"softmax_scale: {softmax_scale}, allowed: up to {MAX_SOFTMAX_SCALE:.4g}, finite as float32")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, allowed: q's {q.dtype} {tuple(q.shape)}")
    for name, value in (("q", q), ("out", out)):
        if value is not None and value.stride(2) != 1:
            raise ValueError(f"{name}: strides {value.stride()}, allowed: (any, any, 1)")
    placed = {"attn_sink": attn_sink} | ({} if out is None else {"out": out})
    for region, name in zip(regions, ("window", "compressed"), strict=False):
        pool = region.pool
        if not isinstance(pool.kv_format, PackedFp8Format):
            raise ValueError(f"{name}.pool: kv_format {pool.kv_format.name!r}, allowed by the {kernel} kernel: 'fp8'")
        # A single page's stride is anything: what is read lies at 0 times it.
        stride = pool.buffer.stride(0) if pool.buffer.shape[0] > 1 else 0
        if pool.buffer.data_ptr() % alignment or stride % alignment or stride >= 1 << 32:
            place = f"first page at {pool.buffer.data_ptr()}, page stride {stride}"
            raise ValueError(f"{name}.pool: {place}, allowed: multiples of {alignment} bytes, the stride below 4 GiB")
        placed |= {f"{name}.pool": pool.buffer, f"{name}.indices": region.indices, f"{name}.lengths": region.lengths}
    for name, value in placed.items():
        if value.device != q.device:
            raise ValueError(f"{name}: on {value.device}, allowed: q's {q.device}")


@cache
def division_constants(divisor: int) -> tuple[int, int]:
    """(magic, shift) with `n // divisor == (2 * n * magic >> 32) >> shift` for every 0 <= n < 2**31.

    With shift = ceil(log2(divisor)) and magic = ceil(2**(31 + shift) / divisor), which is below 2**32, the excess of
    n * magic over n * 2**(31 + shift) / divisor stays below 2**(31 + shift) / divisor, so that no quotient is rounded
    up (Granlund and Montgomery 1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift
