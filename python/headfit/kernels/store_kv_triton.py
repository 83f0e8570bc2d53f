"""`store_kv` in one Triton kernel: norm, RoPE, fp8 quantisation and the write into packed pages, a program a token."""

import struct

import torch
import triton
import triton.language as tl

from headfit import kv_cache
from headfit.kernels.rounding_triton import rounded
from headfit.kernels.store_kv_ref import check_store_kv
from headfit.kv_cache import PackedFp8Format, PagedPool

NUM_WARPS = 4

HEAD_DIM = tl.constexpr(kv_cache.HEAD_DIM)
NOPE_DIM = tl.constexpr(kv_cache.NOPE_DIM)
ROPE_DIM = tl.constexpr(kv_cache.ROPE_DIM)
GROUP_SIZE = tl.constexpr(kv_cache.GROUP_SIZE)
NUM_GROUPS = tl.constexpr(kv_cache.NUM_GROUPS)
NOPE_BYTES = tl.constexpr(kv_cache.NOPE_BYTES)
DATA_BYTES = tl.constexpr(kv_cache.DATA_BYTES)
SCALE_BYTES = tl.constexpr(kv_cache.SCALE_BYTES)  # a block of this many groups covers the whole row: the last is RoPE's
SCALE_NAN = tl.constexpr(kv_cache.SCALE_NAN)

# Bits of float32 values; non-negative floats order as their bits do, Inf and NaN above all others.
MIN_AMAX_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", kv_cache.MIN_AMAX))[0])
INF_BITS = tl.constexpr(0x7F800000)
MANTISSA_BITS = tl.constexpr(0x007FFFFF)
FP8_MAX_EXPONENT = tl.constexpr(8)  # 448 = 1.75 * 2**8
FP8_MAX_MANTISSA_BITS = tl.constexpr(0x00600000)
E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def _normed(kv_row, norm_weight, channel, factor):
    """Channels of the row, normalised and rounded to its dtype."""
    x = tl.load(kv_row + channel).to(tl.float32)
    weight = tl.load(norm_weight + channel).to(tl.float32)
    return rounded(weight * (x * factor), kv_row.dtype.element_ty)


@triton.jit
def _e4m3_codes(magnitude):
    """Bytes of e4m3 values: `magnitude` float32 in 0..448, rounded to nearest, ties to even.

    On the float's bits, as no architecture below sm89 and not Triton's interpreter can convert. Normal values keep
    three mantissa bits. Below 2**-6 the step is 2**-9: the last bit of a float between 2**14 and 2**15.
    """
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & MANTISSA_BITS
    return tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def _quantised(y):
    """Float32 groups [G, 64] -> their bytes and the biased exponents of their scales, int32 [G, 64] and [G].

    The scale is `2 ** ceil(log2(max(amax, 1e-4) / 448))`, found as `kv_cache.pack` does: amax's exponent less 448's,
    plus one where amax's mantissa is the larger.
    """
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.maximum(tl.max(magnitude, axis=1), MIN_AMAX_BITS)
    scale = (amax >> 23) - FP8_MAX_EXPONENT + ((amax & MANTISSA_BITS) > FP8_MAX_MANTISSA_BITS).to(tl.int32)
    finite = amax < INF_BITS
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    codes = _e4m3_codes(magnitude.to(tl.float32, bitcast=True) * inverse[:, None])
    codes = tl.where(finite[:, None], codes | ((bits >> 24) & 0x80), E4M3_NAN)
    return codes, tl.where(finite, scale, SCALE_NAN)


@triton.jit(do_not_specialize=["kv_stride", "page_size", "page_stride"])
def _store_kv(kv, norm_weight, cos, sin, slots, pages, eps, kv_stride, page_size, page_stride):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    kv_row = kv + token * kv_stride
    group = tl.arange(0, SCALE_BYTES)
    channel = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    x = tl.load(kv_row + channel).to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) * (1.0 / HEAD_DIM) + eps)

    offset = slot % page_size
    page = pages + slot // page_size * page_stride
    data = page + offset * DATA_BYTES
    codes, scale = _quantised(_normed(kv_row, norm_weight, channel, factor))
    is_nope = group < NUM_GROUPS
    tl.store(data + channel, codes.to(tl.uint8), mask=is_nope[:, None])
    scales = page + page_size.to(tl.int64) * DATA_BYTES + offset * SCALE_BYTES
    tl.store(scales + group, tl.where(is_nope, scale, 0).to(tl.uint8))

    # A pair's partner is the channel whose number differs in the last bit.
    rope = tl.arange(0, ROPE_DIM)
    own = _normed(kv_row, norm_weight, rope + NOPE_DIM, factor)
    partner = _normed(kv_row, norm_weight, (rope ^ 1) + NOPE_DIM, factor)
    angle = token * (ROPE_DIM // 2) + rope // 2
    turn = tl.load(sin + angle)
    turn = tl.where(rope % 2 == 0, -turn, turn)
    rotated = rounded(own * tl.load(cos + angle) + partner * turn, kv.dtype.element_ty)
    # Byte by byte: pages of another allocator may start at an odd address.
    bits = rounded(rotated, tl.bfloat16).to(tl.int32, bitcast=True)
    tl.store(data + NOPE_BYTES + 2 * rope, (bits >> 16).to(tl.uint8))
    tl.store(data + NOPE_BYTES + 2 * rope + 1, (bits >> 24).to(tl.uint8))


def store_kv_triton(
    *,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    pool: PagedPool,
) -> None:
    """See `store_kv_ref`. The pool is packed fp8, the last 64 channels turn, kv's rows may be strided.

    The bytes are `kv_cache.pack`'s, but for what the order of the norm's sum may change, and a NaN may have other bits
    (as e4m3 it is always 0x7F). Dropped rows are written nowhere. Never waits for the device, so it can be captured in
    a CUDA graph once compiled, which the first call for a combination of dtypes does.

    Raises:
        TypeError, ValueError: as `store_kv_ref`; also another KV format or RoPE width, tensors on several devices, an
            input that is not contiguous.
    """
    check_store_kv(kv, norm_weight, cos_sin, slots, pool)
    cos, sin = cos_sin
    if not isinstance(pool.kv_format, PackedFp8Format):
        raise ValueError(f"pool: kv_format {pool.kv_format.name!r}, allowed by the Triton kernel: 'fp8'")
    if cos.shape[1] != kv_cache.ROPE_DIM // 2:
        raise ValueError(f"cos: {cos.shape[1]} wide, allowed by the Triton kernel: {kv_cache.ROPE_DIM // 2}")
    if kv.stride(1) != 1:
        raise ValueError(f"kv: strides {kv.stride()}, allowed: (any, 1)")
    inputs = {"norm_weight": norm_weight, "cos": cos, "sin": sin, "slots": slots}
    for name, value in inputs.items():
        if not value.is_contiguous():
            raise ValueError(f"{name}: strides {value.stride()}, allowed: contiguous")
    for name, value in (inputs | {"pool": pool.buffer}).items():
        if value.device != kv.device:
            raise ValueError(f"{name}: on {value.device}, allowed: kv's {kv.device}")
    if not len(kv):
        return
    with torch.cuda.device_of(kv):
        # Products and sums of RoPE are rounded one by one, as PyTorch rounds them.
        _store_kv[(len(kv),)](
            kv,
            norm_weight,
            cos,
            sin,
            slots,
            pool.buffer,
            eps,
            kv.stride(0),
            pool.page_size,
            pool.buffer.stride(0),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
