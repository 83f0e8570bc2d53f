"""Every rank of an attention-TP layout in one process."""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from headfit.backends.base import AttentionBackend
from headfit.checkpoint import Checkpoint
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.hosts.transformers import load_model
from headfit.kv_cache import KVFormat, ModelDtypeFormat
from headfit.model_cache import ModelCache
from headfit.models.deepseek_v4 import MQALayer


class AllRanks(nn.Module):
    """Stands where transformers has `self_attn`: runs each rank's layer on its own cache and adds the ranks up."""

    def __init__(self, layers: list[MQALayer], caches: list[ModelCache]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.caches = caches

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch, **_):
        """hidden_states [B, S, hidden] -> the sum over ranks, in float32 order of rank."""
        x, positions = hidden_states.flatten(0, 1), position_ids.flatten()
        parts = [
            layer(x, positions, dataclasses.replace(forward_batch, cache=cache))
            for layer, cache in zip(self.layers, self.caches, strict=True)
        ]
        return torch.stack(parts).sum(dim=0).view_as(hidden_states), None


def load_all_ranks(
    folder: str | Path,
    *,
    backend: AttentionBackend,
    attn_tp_size: int = 1,
    max_seqs: int = 4,
    max_context: int = 1100,
    max_chunk: int = 1000,
    kv_format: KVFormat | None = None,
):
    """A float32 model whose layers run all `attn_tp_size` ranks, and the cache to build forward batches on."""
    config = DeepSeekV4Config.from_file(folder)
    model = load_model(folder, backend=backend)
    caches = [
        ModelCache(
            config,
            max_seqs=max_seqs,
            max_context=max_context,
            max_chunk=max_chunk,
            kv_format=kv_format or ModelDtypeFormat(torch.float32),
            dtype=torch.float32,
        )
        for _ in range(attn_tp_size)
    ]
    if attn_tp_size > 1:
        checkpoint = Checkpoint(folder)
        for layer_id, decoder_layer in enumerate(model.model.layers):
            layers = []
            for rank in range(attn_tp_size):
                group = AttnTPGroup(rank, attn_tp_size, reduce_results=False)
                layer = MQALayer(
                    config,
                    layer_id=layer_id,
                    backend=backend,
                    group=group,
                    dtype=torch.float32,
                    fp8_linears=checkpoint.fp8_linears(layer_id),
                )
                checkpoint.load_attention(layer)
                layers.append(layer)
            decoder_layer.self_attn = AllRanks(layers, caches)
    return model, caches[0]
