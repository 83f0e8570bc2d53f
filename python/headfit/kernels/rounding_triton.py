"""Rounding inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` rounded to the nearest value of `dtype`, ties to even, still float32.

    bfloat16 is rounded on the float's bits: Triton's interpreter truncates where a GPU rounds, and one kernel must give
    the same bytes on both.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)
