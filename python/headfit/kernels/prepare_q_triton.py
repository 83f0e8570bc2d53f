"""`prepare_q` in one Triton kernel: norm, RoPE and the write into the query buffer, a program for a few heads."""

import torch
import triton
import triton.language as tl

from headfit import kv_cache
from headfit.kernels.prepare_q_ref import check_prepare_q
from headfit.kernels.rounding_triton import rounded

NUM_WARPS = 4
HEADS_PER_PROGRAM = 4

HEAD_DIM = tl.constexpr(kv_cache.HEAD_DIM)
NOPE_DIM = tl.constexpr(kv_cache.NOPE_DIM)
ROPE_DIM = tl.constexpr(kv_cache.ROPE_DIM)


@triton.jit
def _normed(rows, channel, factor, is_head):
    """Channels of each head, normalised and rounded to its dtype: [HEADS, channels]."""
    x = tl.load(rows[:, None] + channel[None, :], mask=is_head[:, None], other=0.0).to(tl.float32)
    return rounded(x * factor[:, None], rows.dtype.element_ty)


@triton.jit(do_not_specialize=["num_heads", "out_token_stride", "out_head_stride"])
def _prepare_q(
    q,
    cos,
    sin,
    out,
    eps,
    num_heads,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    OUT_MULTIPLE: tl.constexpr,  # every row of `out` starts at a multiple of this many elements
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    rows = q + (token * num_heads + head) * HEAD_DIM
    out_rows = out + tl.multiple_of(token * out_token_stride + head.to(tl.int64) * out_head_stride, OUT_MULTIPLE)

    channel = tl.arange(0, HEAD_DIM)
    x = tl.load(rows[:, None] + channel[None, :], mask=is_head[:, None], other=0.0).to(tl.float32)
    factor = rounded(tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / HEAD_DIM) + eps), q.dtype.element_ty)
    y = rounded(x * factor[:, None], q.dtype.element_ty).to(q.dtype.element_ty)
    tl.store(out_rows[:, None] + channel[None, :], y, mask=is_head[:, None] & (channel < NOPE_DIM)[None, :])

    # A pair's partner is the channel whose number differs in the last bit.
    rope = tl.arange(0, ROPE_DIM)
    own = _normed(rows, rope + NOPE_DIM, factor, is_head)
    partner = _normed(rows, (rope ^ 1) + NOPE_DIM, factor, is_head)
    angle = token * (ROPE_DIM // 2) + rope // 2
    turn = tl.load(sin + angle)
    turn = tl.where(rope % 2 == 0, -turn, turn)
    rotated = own * tl.load(cos + angle)[None, :] + partner * turn[None, :]
    rotated = rounded(rotated, q.dtype.element_ty).to(q.dtype.element_ty)
    tl.store(out_rows[:, None] + (rope + NOPE_DIM)[None, :], rotated, mask=is_head[:, None])


def prepare_q_triton(
    *, q: torch.Tensor, eps: float, cos_sin: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    """See `prepare_q_ref`. q is contiguous, heads are 512 wide, the last 64 channels turn; no gradient flows.

    Never waits for the device, so it can be captured in a CUDA graph once compiled, which the first call for a dtype
    does (and the first whose `out` starts rows at addresses that no vector store can take).

    Raises:
        TypeError, ValueError: as `prepare_q_ref`; also another head or RoPE width, tensors on several devices, an
            input that is not contiguous or that requires a gradient, an `out` whose channels are strided.
    """
    check_prepare_q(q, cos_sin, out)
    cos, sin = cos_sin
    num_tokens, num_heads, head_dim = q.shape
    if head_dim != kv_cache.HEAD_DIM:
        raise ValueError(f"q: heads are {head_dim} wide, allowed by the Triton kernel: {kv_cache.HEAD_DIM}")
    if cos.shape[1] != kv_cache.ROPE_DIM // 2:
        raise ValueError(f"cos: {cos.shape[1]} wide, allowed by the Triton kernel: {kv_cache.ROPE_DIM // 2}")
    for name, value in {"q": q, "cos": cos, "sin": sin}.items():
        if not value.is_contiguous():
            raise ValueError(f"{name}: strides {value.stride()}, allowed: contiguous")
    if q.requires_grad:
        raise ValueError("q: requires a gradient, allowed: none, the Triton kernel has no backward")
    if out.stride(2) != 1:
        raise ValueError(f"out: strides {out.stride()}, allowed: (any, any, 1)")
    for name, value in {"cos": cos, "sin": sin, "out": out}.items():
        if value.device != q.device:
            raise ValueError(f"{name}: on {value.device}, allowed: q's {q.device}")
    if not q.numel():
        return
    with torch.cuda.device_of(q):
        # Products and sums of RoPE are rounded one by one, as PyTorch rounds them.
        _prepare_q[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            q,
            cos,
            sin,
            out,
            eps,
            num_heads,
            out.stride(0),
            out.stride(1),
            HEADS=HEADS_PER_PROGRAM,
            OUT_MULTIPLE=_row_multiple(out),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _row_multiple(out: torch.Tensor) -> int:
    """8 elements where rows start so, the widest vector store of 16-bit values, else 1."""
    return 8 if out.stride(0) % 8 == 0 and out.stride(1) % 8 == 0 else 1
