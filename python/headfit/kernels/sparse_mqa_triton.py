"""Sparse MQA decode in Triton: NVIDIA Ampere and later, and the CPU under TRITON_INTERPRET=1.

A program attends one token with up to 32 heads to one share of the token's keys. It gathers tiles of keys as packed
bytes, decodes each byte once to the dot's dtype (exactly: e4m3 times a power of two fits bfloat16), and runs both
products on that tile. A key's 512 channels are five chunks, 128 + 128 + 128 + 64 as e4m3 and 64 as bfloat16, because
a dot's sides must be powers of two. With more than one share, a second kernel merges them and applies the sink.
"""

import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from headfit import kv_cache
from headfit.kernels.packed_regions import check_packed_regions, division_constants
from headfit.kernels.rounding_triton import rounded
from headfit.kernels.sparse_mqa_triton_plan import BATCH_INVARIANT_SPLITS, MAX_SPLITS, choose_launch, plan_splits
from headfit.kv_cache import HEAD_DIM, KVRegion, PackedFp8Format, PagedPool

MAX_PAGE_SIZE = (2**31 - 1) // kv_cache.DATA_BYTES  # the bytes of a page's data rows are counted in 32 bits
MAX_SCRATCH_BYTES = 64 * 2**20  # of partial outputs at a time: more tokens than that go in several launches

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))
_DATA_BYTES = tl.constexpr(kv_cache.DATA_BYTES)
_SCALE_BYTES = tl.constexpr(kv_cache.SCALE_BYTES)
_GROUP = tl.constexpr(kv_cache.GROUP_SIZE)
_ROPE = tl.constexpr(kv_cache.ROPE_DIM)
_ROPE_START = tl.constexpr(kv_cache.NOPE_DIM)  # its channel, and its byte in a key's data
_HEAD_DIM = tl.constexpr(HEAD_DIM)
_WIDE = tl.constexpr(128)  # channels of the wide chunks
_TWO_TO_120 = tl.constexpr(2.0**120)  # between the exponent biases of float32 (127) and e4m3 (7)
_E4M3_MAX = tl.constexpr(kv_cache.FP8_MAX)


@triton.jit
def _narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 to `dtype`, to nearest even."""
    if INTERPRETED:
        x = rounded(x, dtype)
    return x.to(dtype)


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """a @ b + acc in float32. The interpreter multiplies bfloat16 as integers, so there both become float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _decode_e4m3(x, NATIVE_E4M3: tl.constexpr):
    """e4m3 bytes to float32, exactly."""
    if NATIVE_E4M3:
        value = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Sign, exponent and mantissa in float32's places read as the value times 2**-120, subnormals too.
        bits = (x.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # keeps bit 31 and bits 20 to 26
        value = bits.to(tl.float32, bitcast=True) * _TWO_TO_120
        value = tl.where(tl.abs(value) > _E4M3_MAX, float("nan"), value)  # 0x7F, the only NaN, would be 480
    return value


@triton.jit
def _load_chunk(
    data_ptrs,
    scales,
    valid,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Channels [FIRST, FIRST + WIDTH) of a tile's keys, dequantised: `dtype` [BLOCK_N, WIDTH], absent keys 0."""
    BLOCK_N: tl.constexpr = valid.shape[0]
    GROUPS: tl.constexpr = WIDTH // _GROUP
    channels = tl.arange(0, WIDTH) + FIRST
    x = tl.load(data_ptrs[:, None] + channels[None, :], mask=valid[:, None], other=0)
    groups = tl.arange(0, GROUPS) + FIRST // _GROUP
    exponent = (scales[:, None] >> (8 * groups)[None, :]).to(tl.int32) & 0xFF
    # As float32: byte 0 is 2**-127, a subnormal, and byte 255 is NaN.
    bits = tl.where(exponent == 255, 0x7FC00000, tl.maximum(exponent << 23, 1 << 22))
    scale = tl.broadcast_to(bits.to(tl.float32, bitcast=True)[:, :, None], (BLOCK_N, GROUPS, _GROUP))
    k = _decode_e4m3(x, NATIVE_E4M3) * tl.reshape(scale, (BLOCK_N, WIDTH))
    # The maximum over an axis of one changes nothing, but no layout passes through it: without it the compiler loads
    # the bytes in the layout of a dot's operand, one by one, and decodes them once for each of the two dots.
    k = tl.max(tl.reshape(k, (BLOCK_N, 1, WIDTH)), axis=1)
    return _narrow(k, dtype, INTERPRETED)


@triton.jit
def _store_chunk(ptrs, acc, factor, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    out = _narrow(acc * factor[:, None], ptrs.dtype.element_ty, INTERPRETED)
    tl.store(ptrs[:, None] + (tl.arange(0, WIDTH) + FIRST)[None, :], out, mask=mask[:, None])


@triton.jit
def _store_heads(ptrs, a, b, c, d, rope, factor, mask, INTERPRETED: tl.constexpr):
    """The five chunks of a tile of heads, each times `factor` [BLOCK_H]."""
    _store_chunk(ptrs, a, factor, mask, 0, _WIDE, INTERPRETED)
    _store_chunk(ptrs, b, factor, mask, _WIDE, _WIDE, INTERPRETED)
    _store_chunk(ptrs, c, factor, mask, 2 * _WIDE, _WIDE, INTERPRETED)
    _store_chunk(ptrs, d, factor, mask, 3 * _WIDE, _GROUP, INTERPRETED)
    _store_chunk(ptrs, rope, factor, mask, _ROPE_START, _ROPE, INTERPRETED)


@triton.jit(do_not_specialize=range(37))  # all but the constexprs: no batch, length, stride or address compiles anew
def _attend(
    q_ptr,
    q_stride_t,
    q_stride_h,
    sink_ptr,
    sink_stride,
    qk_scale,
    o_ptr,
    o_stride_t,
    o_stride_h,
    lse_ptr,
    o_part_ptr,
    lse_part_ptr,
    num_heads,
    head_blocks,
    num_splits,
    pool_0,
    page_stride_0,
    page_size_0,
    page_magic_0,
    page_shift_0,
    indices_0,
    indices_stride_t_0,
    indices_stride_k_0,
    num_keys_0,
    lengths_0,
    lengths_stride_0,
    pool_1,
    page_stride_1,
    page_size_1,
    page_magic_1,
    page_shift_1,
    indices_1,
    indices_stride_t_1,
    indices_stride_k_1,
    num_keys_1,
    lengths_1,
    lengths_stride_1,
    NUM_REGIONS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One token, BLOCK_H heads, one of `num_splits` shares of its keys.

    One share: writes o and lse. Several: writes the share's normalised output to o_part [token, split, head, 512] and
    its base-2 lse, without the sink, to lse_part [token, split, head]; a share without a key writes its lse only.
    """
    pid = tl.program_id(0)
    head = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = pid // head_blocks % num_splits
    token = (pid // (head_blocks * num_splits)).to(tl.int64)
    head_mask = head < num_heads
    n = tl.arange(0, BLOCK_N)
    wide, narrow, rope = tl.arange(0, _WIDE)[None, :], tl.arange(0, _GROUP)[None, :], tl.arange(0, _ROPE)[None, :]
    dtype: tl.constexpr = tl.bfloat16 if q_ptr.dtype.element_ty == tl.bfloat16 else tl.float32

    q_ptrs = q_ptr + token * q_stride_t + head.to(tl.int64) * q_stride_h
    if ALIGNED:
        q_ptrs = tl.multiple_of(q_ptrs, 16)
    q_ptrs, q_mask = q_ptrs[:, None], head_mask[:, None]
    q_a = tl.load(q_ptrs + wide, mask=q_mask, other=0.0).to(dtype)
    q_b = tl.load(q_ptrs + _WIDE + wide, mask=q_mask, other=0.0).to(dtype)
    q_c = tl.load(q_ptrs + 2 * _WIDE + wide, mask=q_mask, other=0.0).to(dtype)
    q_d = tl.load(q_ptrs + 3 * _WIDE + narrow, mask=q_mask, other=0.0).to(dtype)
    q_rope = tl.load(q_ptrs + _ROPE_START + rope, mask=q_mask, other=0.0).to(dtype)

    # Tiles of both regions in one sequence, so that shares are even and the loop stands here once.
    length_0 = tl.minimum(tl.load(lengths_0 + token * lengths_stride_0), num_keys_0)
    tiles_0 = tl.cdiv(tl.maximum(length_0, 0), BLOCK_N)
    tiles = tiles_0
    indices_0 += token * indices_stride_t_0
    if NUM_REGIONS == 2:
        length_1 = tl.minimum(tl.load(lengths_1 + token * lengths_stride_1), num_keys_1)
        tiles += tl.cdiv(tl.maximum(length_1, 0), BLOCK_N)
        indices_1 += token * indices_stride_t_1

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)  # base 2, over the keys so far
    l = tl.zeros([BLOCK_H], tl.float32)
    acc_a = tl.zeros([BLOCK_H, _WIDE], tl.float32)
    acc_b = tl.zeros([BLOCK_H, _WIDE], tl.float32)
    acc_c = tl.zeros([BLOCK_H, _WIDE], tl.float32)
    acc_d = tl.zeros([BLOCK_H, _GROUP], tl.float32)
    acc_rope = tl.zeros([BLOCK_H, _ROPE], tl.float32)
    for tile in tl.range(tiles * split // num_splits, tiles * (split + 1) // num_splits, num_stages=NUM_STAGES):
        pool, page_stride, page_size, magic, shift = pool_0, page_stride_0, page_size_0, page_magic_0, page_shift_0
        indices, indices_stride_k, length, first = indices_0, indices_stride_k_0, length_0, tile * BLOCK_N
        if NUM_REGIONS == 2:
            other = tile >= tiles_0
            pool = tl.where(other, pool_1, pool)
            page_stride = tl.where(other, page_stride_1, page_stride)
            page_size = tl.where(other, page_size_1, page_size)
            magic = tl.where(other, page_magic_1, magic)
            shift = tl.where(other, page_shift_1, shift)
            indices = tl.where(other, indices_1, indices)
            indices_stride_k = tl.where(other, indices_stride_k_1, indices_stride_k)
            length = tl.where(other, length_1, length)
            first = tl.where(other, tile - tiles_0, tile) * BLOCK_N
        column = first + n
        slot = tl.load(indices + column.to(tl.int64) * indices_stride_k, mask=column < length, other=-1)
        valid = slot >= 0
        slot = tl.maximum(slot, 0)
        page = tl.umulhi((2 * slot).to(tl.uint32), magic.to(tl.uint32)).to(tl.int32) >> shift  # slot // page_size
        # A page is data rows, then scale rows: page * page_stride + (slot - page * page_size) * row, in 64 bits.
        slot, page = slot.to(tl.int64), page.to(tl.int64)
        data_ptrs = pool + slot * _DATA_BYTES + page * (page_stride - page_size * _DATA_BYTES)
        scale_ptrs = pool + page_size * _DATA_BYTES
        scale_ptrs = scale_ptrs + slot * _SCALE_BYTES + page * (page_stride - page_size * _SCALE_BYTES)
        data_ptrs = tl.multiple_of(data_ptrs, 16 if ALIGNED else 8)
        scale_ptrs = tl.multiple_of(scale_ptrs, 8).to(tl.pointer_type(tl.int64))  # a key's seven and the padding
        scales = tl.load(scale_ptrs, mask=valid, other=0)
        k_a = _load_chunk(data_ptrs, scales, valid, 0, _WIDE, dtype, NATIVE_E4M3, INTERPRETED)
        k_b = _load_chunk(data_ptrs, scales, valid, _WIDE, _WIDE, dtype, NATIVE_E4M3, INTERPRETED)
        k_c = _load_chunk(data_ptrs, scales, valid, 2 * _WIDE, _WIDE, dtype, NATIVE_E4M3, INTERPRETED)
        k_d = _load_chunk(data_ptrs, scales, valid, 3 * _WIDE, _GROUP, dtype, NATIVE_E4M3, INTERPRETED)
        rope_ptrs = (data_ptrs + _ROPE_START).to(tl.pointer_type(tl.bfloat16))
        k_rope = tl.load(rope_ptrs[:, None] + rope, mask=valid[:, None], other=0.0).to(dtype)

        s = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        s = _dot(q_a, tl.trans(k_a), s, INTERPRETED)
        s = _dot(q_b, tl.trans(k_b), s, INTERPRETED)
        s = _dot(q_c, tl.trans(k_c), s, INTERPRETED)
        s = _dot(q_d, tl.trans(k_d), s, INTERPRETED)
        s = _dot(q_rope, tl.trans(k_rope), s, INTERPRETED) * qk_scale
        s = tl.where(valid[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift_by = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: -inf - -inf would be NaN
        alpha = tl.exp2(m - shift_by)
        p = tl.exp2(s - shift_by[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
        p = _narrow(p, dtype, INTERPRETED)
        acc_a = _dot(p, k_a, acc_a * alpha[:, None], INTERPRETED)
        acc_b = _dot(p, k_b, acc_b * alpha[:, None], INTERPRETED)
        acc_c = _dot(p, k_c, acc_c * alpha[:, None], INTERPRETED)
        acc_d = _dot(p, k_d, acc_d * alpha[:, None], INTERPRETED)
        acc_rope = _dot(p, k_rope, acc_rope * alpha[:, None], INTERPRETED)

    has_key = l != 0  # NaN, of a corrupt key, is one
    if num_splits == 1:
        sink = tl.load(sink_ptr + head * sink_stride, mask=head_mask, other=0.0) * _LOG2E
        share = tl.where(has_key, l + tl.exp2(sink - m), 1.0)
        o_ptrs = o_ptr + token * o_stride_t + head.to(tl.int64) * o_stride_h
        if ALIGNED:
            o_ptrs = tl.multiple_of(o_ptrs, 16)
        _store_heads(o_ptrs, acc_a, acc_b, acc_c, acc_d, acc_rope, 1.0 / share, head_mask, INTERPRETED)
        tl.store(lse_ptr + token * num_heads + head, (m + tl.log2(l)) * _LN2, mask=head_mask)
    else:
        row = (token * num_splits + split) * num_heads + head
        part_ptrs = tl.multiple_of(o_part_ptr + row * _HEAD_DIM, 16)
        _store_heads(part_ptrs, acc_a, acc_b, acc_c, acc_d, acc_rope, 1.0 / l, head_mask & has_key, INTERPRETED)
        tl.store(lse_part_ptr + row, m + tl.log2(l), mask=head_mask)


@triton.jit(do_not_specialize=range(10))
def _merge(
    o_part_ptr,
    lse_part_ptr,
    sink_ptr,
    sink_stride,
    o_ptr,
    o_stride_t,
    o_stride_h,
    lse_ptr,
    num_heads,
    num_splits,
    BLOCK_S: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One token and head: its shares' outputs weighted by their lse, and the sink, once."""
    pid = tl.program_id(0)
    token, head = (pid // num_heads).to(tl.int64), pid % num_heads
    split, channel = tl.arange(0, BLOCK_S), tl.arange(0, _HEAD_DIM)
    row = (token * num_splits + split) * num_heads + head
    lse = tl.load(lse_part_ptr + row, mask=split < num_splits, other=float("-inf"))
    m = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(m == float("-inf"), 0.0, m))
    total = tl.sum(weight, axis=0)
    # A share without a key has weight 0, and its output was never written.
    part_ptrs = tl.multiple_of(o_part_ptr + row * _HEAD_DIM, 16)
    parts = tl.load(part_ptrs[:, None] + channel[None, :], mask=(weight != 0)[:, None], other=0.0)
    sink = tl.load(sink_ptr + head * sink_stride) * _LOG2E
    share = tl.where(total != 0, total + tl.exp2(sink - m), 1.0)
    o = _narrow(tl.sum(parts * weight[:, None], axis=0) / share, o_ptr.dtype.element_ty, INTERPRETED)
    o_row = o_ptr + token * o_stride_t + head.to(tl.int64) * o_stride_h
    o_ptrs = o_row + channel
    if ALIGNED:
        o_ptrs = tl.multiple_of(o_ptrs, 16)
    tl.store(o_ptrs, o)
    tl.store(lse_ptr + token * num_heads + head, (m + tl.log2(total)) * _LN2)


INTERPRETED = not isinstance(_attend, triton.runtime.JITFunction)


def sparse_mqa_triton(
    *,
    q: Tensor,
    regions: tuple[KVRegion, ...],
    attn_sink: Tensor,
    softmax_scale: float,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `AttentionBackend.decode`, over one region or two, packed fp8. Indices past a pool are not looked for.

    Never waits for the device: it can be captured in a CUDA graph once compiled (`prewarm_triton`), which then serves
    other lengths and indices of the same shapes.

    Args:
        q: [num_tokens, num_heads, 512] of any strides with a contiguous last axis. bfloat16; float32 and float16 run in
            float32 products, slowly.
        out: where o goes, like q; a new tensor if None.
        batch_invariant: split each row's keys into `BATCH_INVARIANT_SPLITS` shares by its own lengths alone, so that
            its result is the same bits whatever else is in the batch.

    Returns:
        o in q's dtype and lse float32 [num_tokens, num_heads], natural logarithm without the sink.

    Raises:
        ValueError, TypeError: naming the argument; also tensors on several devices, a device that Triton does not run
            on, and pages that do not start at multiples of 8 bytes or hold more than `MAX_PAGE_SIZE` keys.
    """
    _check(q, regions, attn_sink, softmax_scale, out)
    num_tokens, num_heads, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return o, lse
    num_sms, shared_bytes = _device_sizes(q.device)
    launch = choose_launch(num_heads, q.dtype, shared_bytes)
    num_splits = BATCH_INVARIANT_SPLITS
    if not batch_invariant:
        num_splits = plan_splits(
            num_tokens=num_tokens,
            head_blocks=triton.cdiv(num_heads, launch.block_h),
            num_keys=sum(region.indices.shape[1] for region in regions),
            num_sms=num_sms,
        )
    block = num_tokens
    if num_splits > 1:
        block = max(1, MAX_SCRATCH_BYTES // (num_splits * num_heads * HEAD_DIM * 4))
    with nullcontext() if INTERPRETED else torch.cuda.device(q.device):
        for start in range(0, num_tokens, block):
            rows = slice(start, start + block)
            parts = tuple(KVRegion(r.pool, r.indices[rows], r.lengths[rows]) for r in regions)
            _launch(launch, num_splits, q[rows], parts, attn_sink, softmax_scale, o[rows], lse[rows])
    return o, lse


def prewarm_triton(num_heads: int, num_regions: int, device: torch.device | str) -> None:
    """Compile what bfloat16 queries of `num_heads` heads over `num_regions` regions need, by running it once.

    A server calls this before it captures a graph or takes requests. Pools whose pages start at multiples of 16 bytes
    (all of `PagedPool`'s own) and queries likewise; others compile on their first call.
    """
    pool = PagedPool(num_pages=1, page_size=2, kv_format=PackedFp8Format(), device=device)
    indices = torch.zeros(1, 1, dtype=torch.int32, device=device)
    region = KVRegion(pool, indices, torch.ones(1, dtype=torch.int32, device=device))
    q = torch.zeros(1, num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    sinks = torch.zeros(num_heads, device=device)
    # Batch-invariant mode runs both kernels; they are the same ones in the other mode.
    sparse_mqa_triton(q=q, regions=(region,) * num_regions, attn_sink=sinks, softmax_scale=1.0, batch_invariant=True)


def _launch(launch, num_splits, q, regions, attn_sink, softmax_scale, o, lse) -> None:
    """Both kernels over a block of tokens."""
    num_tokens, num_heads, _ = q.shape
    head_blocks = triton.cdiv(num_heads, launch.block_h)
    parts = lse_parts = lse  # with one share never touched
    if num_splits > 1:
        parts = q.new_empty(num_tokens, num_splits, num_heads, HEAD_DIM, dtype=torch.float32)
        lse_parts = q.new_empty(num_tokens, num_splits, num_heads, dtype=torch.float32)
    flags = {"ALIGNED": _is_aligned(q, o, *(region.pool.buffer for region in regions)), "INTERPRETED": INTERPRETED}
    sink, out = (attn_sink, attn_sink.stride(0)), (o, o.stride(0), o.stride(1), lse)
    _attend[(num_tokens * num_splits * head_blocks,)](
        q,
        q.stride(0),
        q.stride(1),
        *sink,
        softmax_scale * math.log2(math.e),
        *out,
        parts,
        lse_parts,
        num_heads,
        head_blocks,
        num_splits,
        *_region_arguments(regions[0]),
        *_region_arguments(regions[-1]),
        NUM_REGIONS=len(regions),
        BLOCK_H=launch.block_h,
        BLOCK_N=launch.block_n,
        NUM_STAGES=launch.num_stages,
        NATIVE_E4M3=has_native_e4m3(q.device),
        **flags,
        num_warps=launch.num_warps,
    )
    if num_splits > 1:
        _merge[(num_tokens * num_heads,)](
            parts, lse_parts, *sink, *out, num_heads, num_splits, BLOCK_S=MAX_SPLITS, **flags, num_warps=4
        )


def _region_arguments(region: KVRegion) -> tuple:
    """A region's arguments of `_attend`, in order."""
    pool, indices, lengths = region.pool, region.indices, region.lengths
    pages = (pool.buffer, pool.buffer.stride(0), pool.page_size, *division_constants(pool.page_size))
    return (*pages, indices, *indices.stride(), indices.shape[1], lengths, lengths.stride(0))


def _device_sizes(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and shared memory of each; of the interpreter, which has neither, one with no memory."""
    if INTERPRETED:
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor


def has_native_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 itself; sm80 and sm86, and the interpreter, decode its bits."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


def _is_aligned(q: Tensor, o: Tensor, *buffers: Tensor) -> bool:
    """Whether every row of queries, of outputs and of pages starts at a multiple of 16 bytes."""
    strides = [x.stride(axis) * x.element_size() for x in (q, o) for axis in (0, 1) if x.shape[axis] > 1]
    strides += [buffer.stride(0) for buffer in buffers]
    return all(value % 16 == 0 for value in (*strides, *(x.data_ptr() for x in (q, o, *buffers))))


def _check(
    q: Tensor, regions: tuple[KVRegion, ...], attn_sink: Tensor, softmax_scale: float, out: Tensor | None
) -> None:
    if not INTERPRETED and (q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) < (8, 0)):
        raise ValueError(f"q: on {q.device}, allowed: a CUDA device of capability 8.0 or later")
    arguments = {"q": q, "regions": regions, "attn_sink": attn_sink, "softmax_scale": softmax_scale, "out": out}
    check_packed_regions("Triton", **arguments, alignment=8)
    for region, name in zip(regions, ("window", "compressed"), strict=False):
        if region.pool.page_size > MAX_PAGE_SIZE:
            allowed = f"up to {MAX_PAGE_SIZE} by the Triton kernel, 2 GiB of data"
            raise ValueError(f"{name}.pool: page_size {region.pool.page_size}, allowed: {allowed}")
