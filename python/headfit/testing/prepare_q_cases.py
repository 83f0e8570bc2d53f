"""Problems for `prepare_q`: what a case is, its tensors, and a kernel's check against the reference and float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headfit.kernels.prepare_q_ref import prepare_q_ref
from headfit.kv_cache import HEAD_DIM
from headfit.testing.measure import FLOAT32, Tolerance, assert_close
from headfit.testing.store_kv_cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    angles,
    normed_float64,
    on_device,
    rotated_float64,
    rows_of,
    short,
)


def roundings(dtype: torch.dtype) -> Tolerance:
    """Three roundings to `dtype`, of at most half a step each; the cosine is half the relative squared."""
    step = torch.finfo(dtype).eps
    return FLOAT32 if dtype == FP32 else Tolerance(absolute=1.5 * step, relative=1.5 * step, cosine=1.2 * step**2)


@dataclass(frozen=True, slots=True)
class PrepareCase:
    """One call of `prepare_q`: `num_heads` of a buffer of `num_kernel_heads`.

    values: "exact", "random", "zero", or "not finite" (some heads with Inf or NaN).
    strided: the row stride of `out` in elements beyond what it needs; None: `out` is contiguous.
    """

    num_tokens: int = 3
    num_heads: int = 16
    num_kernel_heads: int = 64
    dtype: torch.dtype = BF16
    values: str = "exact"
    strided: int | None = None

    @property
    def id(self) -> str:
        """Readable, and different for different cases."""
        size = f"tokens{self.num_tokens}-heads{self.num_heads}of{self.num_kernel_heads}"
        parts = [self.values.replace(" ", "-"), size, short(self.dtype)]
        return "-".join(parts + [f"stride+{self.strided}"] * (self.strided is not None))


PREPARE_CASES = [
    *(PrepareCase(dtype=dtype, num_kernel_heads=heads) for dtype in (BF16, FP16, FP32) for heads in (16, 64)),
    *(PrepareCase(num_heads=heads, num_kernel_heads=heads + 3) for heads in (1, 3, 8, 13)),
    PrepareCase(num_tokens=1, num_heads=128, num_kernel_heads=128),
    PrepareCase(num_tokens=33, num_heads=2, num_kernel_heads=4),
    PrepareCase(num_tokens=0),
    PrepareCase(num_heads=0),
    *(PrepareCase(strided=pad, dtype=dtype, num_heads=5) for pad in (16, 1) for dtype in (BF16, FP32)),
    *(PrepareCase(values="random", dtype=dtype) for dtype in (BF16, FP16, FP32)),
    *(PrepareCase(values=values, dtype=dtype) for values in ("zero", "not finite") for dtype in (BF16, FP32)),
]


def make_prepare_case(case: PrepareCase, seed: int) -> dict[str, Any]:
    """Keyword arguments of `prepare_q` for `case`, `out` all NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.num_tokens, case.num_kernel_heads, HEAD_DIM)
    pad = case.strided or 0
    out = torch.full((shape[0], shape[1] + bool(pad), HEAD_DIM + pad), math.nan, dtype=case.dtype)
    return {
        "q": rows_of(case.values, (case.num_tokens, case.num_heads, HEAD_DIM), generator).to(case.dtype),
        "eps": EPS,
        "cos_sin": angles(case.num_tokens, generator),
        "out": out[:, : shape[1], :HEAD_DIM],
    }


def check_prepare_case(
    case: PrepareCase, seed: int, prepare_q: Callable[..., None], device: torch.device | str
) -> None:
    """Run `case`, compare the local heads with the reference's, and see the rest of `out`'s memory still NaN."""
    arguments = on_device(make_prepare_case(case, seed), device)
    out = arguments["out"]
    prepare_q(**arguments)
    got, expected = out[:, : case.num_heads].clone(), torch.empty_like(out[:, : case.num_heads])
    prepare_q_ref(**arguments | {"out": expected})
    if case.values == "random":
        assert_close(got, expected, roundings(case.dtype), case.id)
        wanted = rotated_float64(normed_float64(arguments["q"], EPS), arguments["cos_sin"])
        assert_close(got, wanted, roundings(case.dtype), case.id)
    else:
        # NaN need only be NaN; signed zeros are told apart by their bits.
        assert torch.equal(got.isnan(), expected.isnan())
        bits = [
            part.nan_to_num(nan=1.0, posinf=math.inf, neginf=-math.inf).view(torch.uint8) for part in (got, expected)
        ]
        assert torch.equal(*bits), (got != expected).nonzero().tolist()[:8]
    out[:, : case.num_heads] = math.nan
    base = out if out._base is None else out._base
    assert base.isnan().all()
