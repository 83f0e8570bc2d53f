"""Query preparation: each head's RMS norm and RoPE, into the buffer that attention reads. The operator's definition."""

import torch

from headfit.kernels.rms_norm_ref import head_rms_norm
from headfit.kernels.rope_ref import apply_rope
from headfit.kernels.store_kv_ref import check_cos_sin

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def prepare_q_ref(
    *, q: torch.Tensor, eps: float, cos_sin: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    """Write `RoPE(head_rms_norm(q))` to `out[:, :num_local_heads]`; the other heads of `out` are left as they are.

    The norm's factor, its product with q and the rotated channels are each rounded to q's dtype.

    Args:
        q: bfloat16, float16 or float32 [num_tokens, num_local_heads, head_dim].
        eps: added to the mean square.
        cos_sin: of each token's rotation angles, float32 [num_tokens, rope_dim // 2]; the last rope_dim channels turn.
        out: q's dtype, [num_tokens, at least num_local_heads, head_dim]; may be strided, must not overlap q.

    Raises:
        TypeError, ValueError: a dtype or shape that does not fit, named.
    """
    check_prepare_q(q, cos_sin, out)
    out[:, : q.shape[1]] = apply_rope(head_rms_norm(q, eps=eps), cos_sin)


def check_prepare_q(q: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
    """Refuse what no form of the operator takes."""
    if q.dtype not in _FLOATS:
        raise TypeError(f"q: dtype {q.dtype}, allowed: {', '.join(map(str, _FLOATS))}")
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, allowed: (num_tokens, num_local_heads, head_dim)")
    if out.dtype != q.dtype:
        raise TypeError(f"out: dtype {out.dtype}, allowed: q's {q.dtype}")
    num_tokens, num_local_heads, head_dim = q.shape
    if out.dim() != 3 or (out.shape[0], out.shape[2]) != (num_tokens, head_dim) or out.shape[1] < num_local_heads:
        allowed = f"({num_tokens}, {num_local_heads} or more, {head_dim})"
        raise ValueError(f"out: shape {tuple(out.shape)}, allowed: {allowed}")
    check_cos_sin(cos_sin, num_tokens, head_dim)
