"""Sparse MQA decode: the operator's definition, float32, in equation order."""

import torch

from headfit.kv_cache import KVRegion

# Of gathered keys at a time, which bounds the memory of a long prompt: what fits a CPU's cache, what fills a GPU.
MAX_BLOCK_BYTES, MAX_GPU_BLOCK_BYTES = 8 * 2**20, 256 * 2**20

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def sparse_mqa_ref(
    *, q: torch.Tensor, regions: tuple[KVRegion, ...], attn_sink: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `AttentionBackend.decode`, whose contract this defines. Blocks of tokens do not change a token's result."""
    num_tokens, _, head_dim = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    num_keys = sum(region.indices.shape[1] for region in regions)
    most = MAX_BLOCK_BYTES if q.device.type == "cpu" else MAX_GPU_BLOCK_BYTES
    block = max(1, most // max(1, 4 * head_dim * num_keys))
    for start in range(0, num_tokens, block):
        rows = slice(start, start + block)
        o[rows], lse[rows] = _attend(q[rows], [_rows(region, rows) for region in regions], attn_sink, softmax_scale)
    return o, lse


def check_sparse_mqa(q: torch.Tensor, regions: tuple[KVRegion, ...], attn_sink: torch.Tensor) -> None:
    """Refuse what no form of the operator takes: shapes and dtypes; nothing is read back.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what is allowed.
    """
    if q.dim() != 3:
        raise ValueError(f"q: shape {tuple(q.shape)}, allowed: [num_tokens, num_heads, head_dim]")
    if q.dtype not in _FLOATS:
        raise TypeError(f"q: dtype {q.dtype}, allowed: {', '.join(map(str, _FLOATS))}")
    num_tokens, num_heads, head_dim = q.shape
    if attn_sink.dtype != torch.float32:
        raise TypeError(f"attn_sink: dtype {attn_sink.dtype}, allowed: torch.float32")
    if attn_sink.shape != (num_heads,):
        raise ValueError(f"attn_sink: shape {tuple(attn_sink.shape)}, allowed: ({num_heads},), one a query head")
    for region, name in zip(regions, ("window", "compressed"), strict=False):
        if region.pool.kv_format.head_dim != head_dim:
            raise ValueError(f"{name}: keys are {region.pool.kv_format.head_dim} wide, allowed: q's {head_dim}")
        if region.indices.dim() != 2 or region.indices.shape[0] != num_tokens:
            raise ValueError(
                f"{name}.indices: shape {tuple(region.indices.shape)}, allowed: [{num_tokens}, num_keys], a row a token"
            )
        if region.lengths.shape != (num_tokens,):
            raise ValueError(f"{name}.lengths: shape {tuple(region.lengths.shape)}, allowed: ({num_tokens},)")
        for part, value in (("indices", region.indices), ("lengths", region.lengths)):
            if value.dtype != torch.int32:
                raise TypeError(f"{name}.{part}: dtype {value.dtype}, allowed: torch.int32")


def _attend(q, regions, attn_sink, softmax_scale) -> tuple[torch.Tensor, torch.Tensor]:
    valid = [region.valid() for region in regions]
    kv = [r.pool.load(torch.where(v, r.indices, -1)) for r, v in zip(regions, valid, strict=True)]
    scores = torch.cat([torch.einsum("thd,tkd->thk", q.float(), part) for part in kv], dim=-1) * softmax_scale
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), device=q.device)

    valid = torch.cat(valid, dim=1)
    has_key = valid.any(dim=1)[:, None]
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    m = torch.where(has_key, scores.amax(dim=-1), 0)
    p = torch.exp(scores - m[..., None])
    denominator = p.sum(dim=-1)
    lse = m + denominator.log()
    # Without a valid key numerator and denominator may both be zero; the convention is zeros.
    share = torch.where(has_key, denominator + torch.exp(attn_sink - m), 1)
    parts = zip(p.split([part.shape[1] for part in kv], dim=-1), kv, strict=True)
    o = sum(torch.einsum("thk,tkd->thd", weights, part) for weights, part in parts) / share[..., None]
    return o.to(q.dtype), lse


def _rows(region: KVRegion, rows: slice) -> KVRegion:
    return KVRegion(region.pool, region.indices[rows], region.lengths[rows])
