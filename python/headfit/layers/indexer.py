"""The lightning indexer: picks the compressed entries of ratio 4 that a query attends to."""

import torch
from torch import nn

from headfit.config import DeepSeekV4Config
from headfit.forward_batch import ForwardBatch
from headfit.layers.compressor import Compressor
from headfit.layers.linear import ParallelLinear
from headfit.layers.rope import RotaryEmbedding, apply_rope
from headfit.model_cache import INDEXED_RATIO, LayerCache

MAX_SCORE_BYTES = 64 * 2**20  # of per-head scores at a time


class Indexer(nn.Module):
    """`wq_b` [index_n_heads * index_head_dim, q_lora_rank], `weights_proj` [index_n_heads, hidden], own compressor.

    Replicated on every rank: all ranks must pick the same entries.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device | None = None,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.topk = config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = ParallelLinear(
            config.q_lora_rank, self.num_heads * self.head_dim, dtype=dtype, device=device, fp8=fp8
        )
        self.weights_proj = ParallelLinear(config.hidden_size, self.num_heads, dtype=dtype, device=device)
        self.compressor = Compressor(
            config, ratio=INDEXED_RATIO, head_dim=self.head_dim, rotary=rotary, dtype=dtype, device=device
        )
        self.rotary = rotary

    def forward(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Store this step's index keys, then pick: entries int64 [num_tokens, topk], -1 beyond the visible ones."""
        plan = forward_batch.entry_plans[INDEXED_RATIO]
        cache.index_keys.store(plan.slots, self.compressor(x, cache.index_state, plan))
        q = self.wq_b(q_lora).unflatten(-1, (self.num_heads, self.head_dim))
        q = apply_rope(q, self.rotary(positions))
        weights = self.weights_proj(x).float() * self.scale
        visible = forward_batch.visible_entries[INDEXED_RATIO]
        picked = torch.full((x.shape[0], self.topk), -1, dtype=torch.int64, device=x.device)
        for block in forward_batch.query_blocks:
            num_tokens = block.tokens.stop - block.tokens.start
            if num_tokens and block.num_entries:
                keys = self._keys(block, forward_batch, cache)
                shape = (len(block.request_slots), num_tokens // len(block.request_slots))
                args = (part[block.tokens].unflatten(0, shape) for part in (q, weights, visible))
                chosen = self._pick(*args, keys).flatten(0, 1)
                picked[block.tokens, : chosen.shape[-1]] = chosen
        return picked

    def _keys(self, block, forward_batch: ForwardBatch, cache: LayerCache) -> torch.Tensor:
        """float32 [num_seqs, num_entries, head_dim]; entries that are not written yet are whatever the pool holds."""
        entries = torch.arange(block.num_entries, device=block.request_slots.device)
        slots = forward_batch.cache.entry_slots(INDEXED_RATIO, block.request_slots[:, None], entries)
        return cache.index_keys.load(slots)

    def _pick(self, q, weights, visible, keys) -> torch.Tensor:
        """q [seqs, tokens, heads, dim], weights [seqs, tokens, heads], visible [seqs, tokens] -> entries or -1."""
        num_entries = keys.shape[1]
        step = max(1, MAX_SCORE_BYTES // (4 * q.shape[0] * self.num_heads * num_entries))
        picks = []
        for start in range(0, q.shape[1], step):
            rows = slice(start, start + step)
            scores = torch.einsum("bshd,bnd->bshn", q[:, rows].float(), keys).relu_()
            scores = torch.einsum("bshn,bsh->bsn", scores, weights[:, rows])
            hidden = torch.arange(num_entries, device=q.device) >= visible[:, rows, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            best, entries = scores.topk(min(self.topk, num_entries), dim=-1)
            picks.append(torch.where(best == float("-inf"), -1, entries))
        return torch.cat(picks, dim=1)
