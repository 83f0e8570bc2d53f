"""Sparse MQA decode: the operator's definition, float32, in equation order."""

import torch

from headfit.kv_cache import KVRegion

# Of gathered keys at a time, which bounds the memory of a long prompt: what fits a CPU's cache, what fills a GPU.
MAX_BLOCK_BYTES, MAX_GPU_BLOCK_BYTES = 8 * 2**20, 256 * 2**20


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
