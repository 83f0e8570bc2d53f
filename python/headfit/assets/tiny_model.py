"""Configuration, initial weights and saving of the tiny DeepSeek-V4 checkpoint."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

VOCAB_SIZE = 896
LAYER_TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "sliding_attention",
]
MLP_LAYER_TYPES = ["hash_moe", "hash_moe", "moe", "moe", "moe"]
SINK_RANGE = (-6.0, 12.0)


def make_config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV4Config:
    """Every part of DeepSeek-V4 at small width; heads, RoPE channels, window and ratios as in the released models."""
    rope = {"partial_rotary_factor": 0.125}
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "attention_factor": 1.0}
    return DeepseekV4Config(
        architectures=["DeepseekV4ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        moe_intermediate_size=80,
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=LAYER_TYPES,
        mlp_layer_types=MLP_LAYER_TYPES,
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=512,
        partial_rotary_factor=0.125,
        q_lora_rank=48,
        o_groups=8,
        o_lora_rank=32,
        sliding_window=128,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        index_n_heads=4,
        index_head_dim=128,
        index_topk=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        hc_mult=4,
        hc_sinkhorn_iters=5,
        num_nextn_predict_layers=0,
        max_position_embeddings=4096,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, **rope},
            "compress": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 160000.0, **rope},
        },
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: DeepseekV4Config) -> DeepseekV4ForCausalLM:
    """A float32 model with spread sinks, near-identity stream mixing and a random token-to-experts table."""
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    streams = config.hc_mult
    with torch.no_grad():
        for layer in model.model.layers:
            spread = torch.linspace(*SINK_RANGE, config.num_attention_heads)
            layer.self_attn.sinks.copy_(spread[torch.randperm(config.num_attention_heads)])
            if hasattr(layer.mlp.gate, "tid2eid"):
                scores = torch.rand(config.vocab_size, config.n_routed_experts)
                layer.mlp.gate.tid2eid.copy_(scores.topk(config.num_experts_per_tok).indices)
        for module in model.modules():
            if isinstance(module, DeepseekV4HyperConnection):
                module.scale.fill_(0.1)
                nn.init.normal_(module.base, std=0.5)
                module.base[2 * streams :] += 3.0 * torch.eye(streams).flatten()
    return model


def dense_experts(experts: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """All experts on all tokens, weighted by the routing: for so few small experts quicker than sorting tokens."""
    routing = torch.zeros(hidden.shape[0], experts.num_experts, dtype=weights.dtype, device=hidden.device)
    routing = routing.scatter(1, indices, weights)
    gated = experts._apply_gate(torch.einsum("td,efd->tef", hidden, experts.gate_up_proj))
    return torch.einsum("tef,edf->td", gated * routing.unsqueeze(-1), experts.down_proj).to(hidden.dtype)


def save(model: DeepseekV4ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Store in bfloat16 what transformers does not keep in float32, with tokenizer and greedy generation settings."""
    kept = model._keep_in_fp32_modules_strict
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=96,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out, save_original_format=False)
    tokenizer.save_pretrained(out)
