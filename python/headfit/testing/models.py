"""Small random DeepSeek-V4 models out of transformers: the oracle that the layer is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM


def hf_config(compress_ratios: Sequence[int] = (0, 4, 128), **changes: Any) -> DeepseekV4Config:
    """A narrow model with the real head and RoPE widths, one layer per entry of `compress_ratios`."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(compress_ratios),
        "num_attention_heads": 16,
        "head_dim": 512,
        "q_lora_rank": 32,
        "o_groups": 8,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "index_n_heads": 32,  # enough that a score of exactly 0, a tie at the cut, does not occur
        "index_head_dim": 128,
        "index_topk": 32,
        "sliding_window": 128,
        "max_position_embeddings": 4096,
        "compress_ratios": list(compress_ratios),
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    }
    return DeepseekV4Config(**sizes | changes)


def random_model(config: DeepseekV4Config, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A model whose every tensor is random, sinks, norm weights, gates and the hash table included."""
    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV4ForCausalLM._from_config(config, dtype=dtype).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.data
        if "tid2eid" in name:
            experts = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator).argsort(dim=-1)
            data.copy_(experts[:, : config.num_experts_per_tok])
        elif "norm.weight" in name or "layernorm.weight" in name:
            data.copy_(1 + 0.2 * torch.randn(data.shape, generator=generator))
        elif "sinks" in name:
            data.copy_(2 * torch.randn(data.shape, generator=generator))
        elif "inv_freq" not in name:
            scale = 0.5 if "_hc." in name or "hc_head" in name or "position_bias" in name else data.shape[-1] ** -0.5
            data.copy_(scale * torch.randn(data.shape, generator=generator))
    return model
