"""The one comparer of tests and benchmarks: three numbers, each with its reason, and no inline `allclose`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What `assert_close` allows; all three must hold.

    absolute: largest |out - ref| of an element, in units of max(1, max |ref|): catches one wrong element among many.
    relative: `relative_norm(out, ref)`: catches a small error everywhere.
    cosine: 1 - `cosine(out, ref)`: catches a turned direction where the two above were widened for quantised values.
    """

    absolute: float
    relative: float
    cosine: float


# The same float32 arithmetic in another order: a few hundred roundings of 2**-24, and no lower-precision step.
FLOAT32 = Tolerance(absolute=1e-5, relative=1e-5, cosine=1e-9)
# The output is rounded to bfloat16, and so are the probabilities on the way: an element may land one ULP away (2**-7 of
# its binade); roundings of at most 2**-9 average to about 1.7e-3 in norm; the cosine is half the relative squared.
BF16_OUTPUT = Tolerance(absolute=2**-7, relative=3e-3, cosine=5e-6)
# Packed fp8 keys against unquantised ones: e4m3 rounds by up to 2**-4, 2.7e-2 in norm over normal data; the cosine is
# half the relative squared.
FP8_KV = Tolerance(absolute=2**-4, relative=4e-2, cosine=8e-4)


def relative_norm(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64, over tensors of one shape; ||out|| where `ref` is all zero.

    Equal infinities (a row's `lse` of -inf) count as no difference and have no weight; other infinities and any NaN in
    `out` give inf. A NaN in `ref` or a different shape is a ValueError.
    """
    out, ref = _as_float64(out, ref)
    if out.isnan().any():
        return math.inf
    difference = torch.where(out == ref, 0.0, out - ref).norm().item()
    scale = torch.where(ref.isinf(), 0.0, ref).norm().item()
    return difference / scale if scale > 0 else difference


def cosine(out: Tensor, ref: Tensor) -> float:
    """Cosine of the angle between `out` and `ref` as flat vectors in float64, equal infinities left out.

    1 where both are all zero, 0 where one is, NaN where `out` holds a NaN or an infinity that `ref` does not match.
    """
    out, ref = _as_float64(out, ref)
    matched = out.isinf() & (out == ref)
    out, ref = torch.where(matched, 0.0, out), torch.where(matched, 0.0, ref)
    norms = out.norm() * ref.norm()
    if norms == 0:
        return 1.0 if torch.equal(out, ref) else 0.0
    return ((out * ref).sum() / norms).item()


def assert_close(out: Tensor, ref: Tensor, tolerance: Tolerance, label: str = "") -> None:
    """Raise AssertionError, naming all three numbers and the worst element, where `out` is not within `tolerance`.

    Same contract on shapes, NaN and infinities as `relative_norm`; `label` names `out` in the message.
    """
    norm = relative_norm(out, ref)
    if ref.numel() == 0:
        return
    out64, ref64 = _as_float64(out, ref)
    difference = torch.where(out64 == ref64, 0.0, out64 - ref64).abs().nan_to_num(nan=math.inf)
    worst = int(difference.argmax())
    unit = max(1.0, torch.where(ref64.isinf(), 0.0, ref64).abs().max().item())
    absolute = difference.flatten()[worst].item() / unit
    # An all-zero reference has no direction; the absolute bound covers it.
    turn = 1.0 - cosine(out, ref) if ref64.any() else 0.0
    if absolute <= tolerance.absolute and norm <= tolerance.relative and turn <= tolerance.cosine:
        return
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ref.shape))
    raise AssertionError(
        f"{label or 'out'} differs from its reference: "
        f"absolute {absolute:.3g} (allowed {tolerance.absolute:.3g}), relative norm {norm:.3g} "
        f"(allowed {tolerance.relative:.3g}), 1 - cosine {turn:.3g} (allowed {tolerance.cosine:.3g}); "
        f"worst at {place}: {out64.flatten()[worst].item()} for {ref64.flatten()[worst].item()}"
    )


def _as_float64(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64: on the GPU where `out` is on one, on the CPU otherwise."""
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; ref has {tuple(ref.shape)}")
    device = out.device if out.is_cuda else torch.device("cpu")
    ref = ref.detach().to(device, torch.float64)
    if ref.isnan().any():
        raise ValueError("ref holds NaN: nothing can be compared with it")
    return out.detach().to(device, torch.float64), ref
