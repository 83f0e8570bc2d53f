"""Key preparation: RMS norm, RoPE, and the store into a paged pool. The operator's definition."""

import torch

from headfit.kernels.rms_norm_ref import rms_norm
from headfit.kernels.rope_ref import apply_rope
from headfit.kv_cache import PagedPool

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def store_kv_ref(
    *,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    pool: PagedPool,
) -> None:
    """Write `RoPE(rms_norm(kv, norm_weight))`, row n to pool slot `slots[n]`, in the pool's format.

    Norm and RoPE are computed in float32 and each is rounded to kv's dtype, before the pool rounds to its own.

    Args:
        kv: bfloat16, float16 or float32 [num_tokens, head_dim], as the projection gives it.
        norm_weight: floating point [head_dim].
        eps: added to the mean square.
        cos_sin: of each token's rotation angles, float32 [num_tokens, rope_dim // 2]; the last rope_dim channels turn.
        slots: int32 or int64 [num_tokens]; a negative slot drops its row. Trusted to lie in the pool; if one occurs
            twice, which row it keeps is undefined.

    Raises:
        TypeError, ValueError: a dtype or shape that does not fit, named.
    """
    check_store_kv(kv, norm_weight, cos_sin, slots, pool)
    pool.store(slots, apply_rope(rms_norm(kv, norm_weight, eps=eps), cos_sin))


def check_store_kv(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    pool: PagedPool,
) -> None:
    """Refuse what no form of the operator takes."""
    head_dim = pool.kv_format.head_dim
    if kv.dtype not in _FLOATS:
        raise TypeError(f"kv: dtype {kv.dtype}, allowed: {', '.join(map(str, _FLOATS))}")
    if kv.dim() != 2 or kv.shape[1] != head_dim:
        raise ValueError(f"kv: shape {tuple(kv.shape)}, allowed: (num_tokens, {head_dim})")
    if not norm_weight.is_floating_point():
        raise TypeError(f"norm_weight: dtype {norm_weight.dtype}, allowed: floating point")
    if norm_weight.shape != (head_dim,):
        raise ValueError(f"norm_weight: shape {tuple(norm_weight.shape)}, allowed: ({head_dim},)")
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slots: dtype {slots.dtype}, allowed: torch.int32, torch.int64")
    if slots.shape != (len(kv),):
        raise ValueError(f"slots: shape {tuple(slots.shape)}, allowed: ({len(kv)},), one a row of kv")
    check_cos_sin(cos_sin, len(kv), head_dim)


def check_cos_sin(cos_sin: tuple[torch.Tensor, torch.Tensor], num_tokens: int, head_dim: int) -> None:
    """Refuse angles that do not belong to `num_tokens` rows of `head_dim` channels."""
    for name, value in zip(("cos", "sin"), cos_sin, strict=True):
        if value.dtype != torch.float32:
            raise TypeError(f"{name}: dtype {value.dtype}, allowed: torch.float32")
        if value.dim() != 2 or len(value) != num_tokens or not 0 < 2 * value.shape[1] <= head_dim:
            allowed = f"({num_tokens}, rope_dim // 2) with rope_dim of 2 to {head_dim}"
            raise ValueError(f"{name}: shape {tuple(value.shape)}, allowed: {allowed}")
    if cos_sin[0].shape != cos_sin[1].shape:
        raise ValueError(f"sin: shape {tuple(cos_sin[1].shape)}, allowed: cos's {tuple(cos_sin[0].shape)}")
