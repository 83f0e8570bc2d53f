"""SGLang's own attention layers on a CPU: the class, its sink and its forward are real, the projections are stubs.

The projections and the norm before the attention call are GPU kernels; what they would have computed is set as
`layer.test_q` [num_tokens, num_local_heads, 512], which is written where the server writes it.
"""

import importlib
import types

from torch import nn

HEAD_DIM = 512
_PARALLEL = types.SimpleNamespace()


def set_parallel(rank: int, size: int) -> None:
    """The attention-TP coordinates that the next layers are built for."""
    _PARALLEL.__dict__.update(
        attn_tp_rank=rank, attn_tp_size=size, tp_rank=rank, tp_size=size, attn_cp_rank=0, attn_cp_size=1
    )


def build(num_heads: int, rank: int, size: int, *, draft: bool = False, layer_id: int = 0) -> nn.Module:
    """A window-only layer of one rank; `draft`: DSpark's, where this version has one."""
    set_parallel(rank, size)
    owner = module()
    if draft:
        owner = module("deepseek_v4_dspark")
    return getattr(owner, "DSparkAttention" if draft else "MQALayer")(_config(num_heads), layer_id)


def module(name: str = "deepseek_v4") -> types.ModuleType:
    """One of SGLang's model files, its GPU parts stubbed."""
    found = importlib.import_module(f"sglang.srt.models.{name}")
    for part in ("ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear", "RMSNorm", "RadixAttention"):
        if hasattr(found, part):
            setattr(found, part, _Stub)
    for part, value in {
        "get_parallel": lambda: _PARALLEL,
        "get_attention_tp_rank": lambda: _PARALLEL.attn_tp_rank,
        "get_attention_tp_size": lambda: _PARALLEL.attn_tp_size,
        "is_dsa_enable_prefill_cp": lambda: False,
        "is_cp_active": lambda batch: False,
        "get_server_args": _server_args,
        "get_global_server_args": _server_args,
        "get_device": lambda: types.SimpleNamespace(device="cpu"),
        "get_rope_wrapper": lambda **kwargs: None,
        "wo_a_fp8_gemm_enabled": lambda quant_config: False,
        "use_npu_arch35_mxfp8_wo_a": lambda quant_config: False,
        "get_is_capture_mode": lambda: False,
        "get_cp_decode_attn_tp_ctx": lambda: types.SimpleNamespace(decode_tp_size=None),
        "get_attn_tp_context": lambda: types.SimpleNamespace(input_scattered=False),
        "is_in_breakable_cuda_graph": lambda: False,
        "fused_rope_inplace": lambda *args, **kwargs: None,
        "_is_cuda": False,
        "_FP8_WO_A_GEMM": False,
    }.items():
        if hasattr(found, part):
            setattr(found, part, value)
    return found


class _Stub(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.layer_id, self.v_head_dim, self.tp_q_head_num = kwargs.get("layer_id"), HEAD_DIM, args[0]
        self.quant_method = None


def _server_args():
    return types.SimpleNamespace(device="cpu", enable_dsa_prefill_context_parallel=False)


def _config(num_heads: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        model_type="deepseek_v4",
        hidden_size=64,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        qk_rope_head_dim=64,
        o_groups=16,
        o_lora_rank=8,
        q_lora_rank=16,
        rms_norm_eps=1e-6,
        q_head_norm=True,
        compress_ratios=[0] * 8,
        rope_theta=10000,
        compress_rope_theta=160000,
        rope_parameters=None,
        rope_scaling={
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        max_position_embeddings=128,
        sliding_window=128,
        window_size=128,
    )
