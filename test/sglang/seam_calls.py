"""The keyword arguments with which a server calls `flash_mla_with_kvcache`, and the layer that does."""

import math

import torch

from headfit.kv_cache import HEAD_DIM, PackedFp8Format
from headfit.testing.cases import make_case


class Layer:
    """What the seam reads of the running layer."""

    def __init__(self, n_local_heads, layer_id=0):
        self.n_local_heads, self.layer_id = n_local_heads, layer_id


def make_call(case, seed, *, padded_heads=64, device="cpu"):
    """The server's keyword arguments for `case`: q and the sink padded with poison, the caches as views."""
    arguments = make_case(case, seed, kv_format=PackedFp8Format(), dtype=torch.bfloat16, device=device)
    q = torch.full((case.num_tokens, 1, padded_heads, HEAD_DIM), math.nan, dtype=torch.bfloat16, device=device)
    q[:, 0, : case.num_heads] = arguments["q"]
    sink = torch.full((padded_heads,), math.nan, device=device)
    sink[: case.num_heads] = arguments["attn_sink"]
    window, extra = arguments["window"], arguments["compressed"]
    call = {
        "q": q,
        "k_cache": window.pool.kernel_view().view(torch.float8_e4m3fn),
        "head_dim_v": HEAD_DIM,
        "block_table": None,
        "cache_seqlens": None,
        "tile_scheduler_metadata": object(),
        "softmax_scale": HEAD_DIM**-0.5,
        "is_fp8_kvcache": True,
        "indices": window.indices[:, None],
        "topk_length": window.lengths,
        "attn_sink": sink,
        "extra_k_cache": extra and extra.pool.kernel_view(),
        "extra_indices_in_kvcache": extra and extra.indices[:, None],
        "extra_topk_length": extra and extra.lengths,
    }
    return call, arguments
