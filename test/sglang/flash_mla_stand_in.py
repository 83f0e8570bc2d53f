"""`flash_mla_with_kvcache` on a CPU: the reference over all padded heads, by FlashMLA's signature and conventions."""

from headfit.kernels.sparse_mqa_ref import sparse_mqa_ref
from headfit.kv_cache import KVRegion, PagedPool

calls = []  # the keyword arguments of every call that reached the server's own kernel


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table=None,
    cache_seqlens=None,
    head_dim_v=512,
    tile_scheduler_metadata=None,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    descale_q=None,
    descale_k=None,
    use_legacy=True,
    kv_format=None,
):
    calls.append(dict(locals()))
    regions = [_region(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        regions.append(_region(extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    rows = q[:, 0].float().nan_to_num()  # padded rows are unwritten memory
    out, lse = sparse_mqa_ref(
        q=rows, regions=tuple(regions), attn_sink=attn_sink, softmax_scale=softmax_scale or q.shape[-1] ** -0.5
    )
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return out.to(q.dtype)[:, None], lse[..., None]


def _region(cache, indices, lengths):
    return KVRegion(PagedPool.from_packed_cache("cache", cache), indices[:, 0], lengths)
