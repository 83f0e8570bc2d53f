"""What `mqa_layer.py` runs: one rank's layers of a released model's widths, their caches, and a decode step."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mqa_layer_report as report
import torch
from decode_kernel_inputs import random_packed_pool
from torch import Tensor

from headfit.backends.base import AttentionBackend
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.head_layout import plan_heads
from headfit.kv_cache import PackedFp8Format, PagedPool
from headfit.model_cache import ModelCache
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.models import hf_config

MODELS = {
    "flash": {"hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8, "index_topk": 512},
    "pro": {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A rank's layers of one compress ratio and the step that they run."""

    model: str
    attn_tp_size: int
    compress_ratio: int
    context: int
    batch: int

    @property
    def fields(self) -> report.Row:
        return {name: getattr(self, name) for name in report.SHAPE_FIELDS}


class DecodeStep:
    """One token a sequence, through the layers of one rank and their caches, which are full up to that token.

    Running a step twice writes the same bytes twice.
    """

    def __init__(self, layers: Sequence[MQALayer], cache: ModelCache) -> None:
        self.layers = layers
        self.group = layers[0].group
        self.config = cache.config
        positions = torch.full((cache.max_seqs,), cache.max_context - 1, device=cache.device)
        slots = torch.arange(cache.max_seqs, device=cache.device)
        self.batch = ForwardBatch.for_decode(cache, request_slots=slots, positions=positions)
        self.x = torch.randn(cache.max_seqs, cache.config.hidden_size, dtype=torch.bfloat16, device=cache.device)
        self.scope = nullcontext

    def use(self, backend: AttentionBackend) -> int:
        """Run on `backend` from now on; the head count that its kernel is given."""
        for layer in self.layers:
            layer.backend = backend
            layer.head_layout = plan_heads(
                num_heads=self.config.num_heads,
                attn_tp_size=self.group.size,
                attn_tp_rank=self.group.rank,
                supported=backend.supported_num_heads,
                o_groups=self.config.o_groups,
            )
        self.scope = getattr(backend, "step", nullcontext)
        return self.layers[0].head_layout.kernel_num_heads

    def one_layer(self) -> Tensor:
        """The first layer's output [batch, hidden]."""
        return self.layers[0](self.x, self.batch.positions, self.batch)

    def all_layers(self) -> None:
        """Each layer once, on the same input, as one step of the backend."""
        with self.scope():
            for layer in self.layers:
                layer(self.x, self.batch.positions, self.batch)


def make_config(model: str, compress_ratio: int, num_layers: int, **changes: Any) -> DeepSeekV4Config:
    """`num_layers` layers of one compress ratio at a released model's attention widths."""
    sizes = MODELS[model] | {"o_lora_rank": 1024, "index_n_heads": 64, "max_position_embeddings": 2**20} | changes
    return DeepSeekV4Config.from_pretrained_config(hf_config([compress_ratio] * num_layers, **sizes))


def random_layers(config: DeepSeekV4Config, attn_tp_size: int, device: torch.device | str) -> list[MQALayer]:
    """The last rank's layers of a group."""
    group = AttnTPGroup(attn_tp_size - 1, attn_tp_size, reduce_results=False)
    return [_random_layer(config, layer_id, group, device) for layer_id in range(config.num_hidden_layers)]


def _random_layer(config: DeepSeekV4Config, layer_id: int, group: AttnTPGroup, device: torch.device | str) -> MQALayer:
    """A layer whose every tensor is random."""
    layer = MQALayer(config, layer_id=layer_id, backend=ReferenceBackend(), group=group, device=device)
    for name, param in layer.named_parameters():
        scale = 1.0 if "norm" in name or param.dim() == 1 else param.shape[-1] ** -0.5
        param.data.copy_(scale * torch.randn(param.shape, device=device))
    return layer


def random_cache(config: DeepSeekV4Config, *, context: int, batch: int, device: torch.device | str) -> ModelCache:
    """Caches of `batch` sequences as full as the context, every key random. They suit every rank of every group."""
    sizes = {"max_seqs": batch, "max_context": context, "max_chunk": 1}
    cache = ModelCache(config, **sizes, kv_format=PackedFp8Format(), dtype=torch.bfloat16, device=device)
    for layer in cache.layers:
        layer.window = _random_pool_like(layer.window, device)
        if layer.compressed is not None:
            layer.compressed = _random_pool_like(layer.compressed, device)
        unpacked = [layer.state, layer.index_state, layer.index_keys and layer.index_keys.buffer]
        for tensor in unpacked:
            if tensor is not None:
                tensor.normal_()
    return cache


def _random_pool_like(pool: PagedPool, device: torch.device | str) -> PagedPool:
    return random_packed_pool(pool.num_slots, pool.page_size, device)
