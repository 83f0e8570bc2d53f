"""headfit inside Hugging Face transformers: its DeepSeek-V4 model with our attention in every layer.

transformers keeps everything else: embeddings, hyper-connections, MoE, norms, head. Its `DeepseekV4ForCausalLM` hands
keyword arguments that it does not know down to each layer's `self_attn`, which is how `forward_batch` travels.
"""

import importlib.util
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers import __version__ as transformers_version
from transformers.distributed import DistributedConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from headfit.backends.base import AttentionBackend
from headfit.checkpoint import Checkpoint
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.models.deepseek_v4 import MQALayer

logger = logging.getLogger(__name__)


class AttentionAdapter(nn.Module):
    """Stands where transformers has `self_attn`: flattens the batch and calls the layer."""

    def __init__(self, layer: MQALayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch, **_: object
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [B, S, hidden], position_ids [B, S]; transformers' own masks, caches and angles are unused."""
        x = hidden_states.flatten(0, 1)
        return self.layer(x, position_ids.flatten(), forward_batch).view_as(hidden_states), None


class _HostModel(DeepseekV4ForCausalLM):
    """transformers' model without attention modules: `from_pretrained` builds it on the meta device, so that their
    weights are neither allocated nor read."""

    _keys_to_ignore_on_load_unexpected = (r"(^|\.)mtp\..*", r"\.self_attn\.")

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = nn.Module()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for its decorator in the source of the class's module, which is ours here.
        return DeepseekV4ForCausalLM._can_set_experts_implementation()

    def save_pretrained(self, *args: object, **kwargs: object) -> None:
        """Refused: attention holds one rank's slices, under other names than transformers reads."""
        raise NotImplementedError("a model with headfit's attention cannot be saved; keep the checkpoint it came from")


def load_model(
    folder: str | Path,
    *,
    backend: AttentionBackend,
    group: AttnTPGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DeepseekV4ForCausalLM:
    """transformers' DeepSeek-V4 from a local checkpoint folder, every attention module an MQALayer of this rank.

    Call the result with `forward_batch=`, see `forward`. Routed experts are sharded where `experts_shard_over` says so;
    everything else outside attention is whole on every rank.

    Raises:
        ValueError: a config that is not DeepSeek-V4's, heads that do not divide over the group, tensors that are
            missing, unknown or of another shape, files that are corrupt; each named.
    """
    group = group or AttnTPGroup()
    config = DeepSeekV4Config.from_file(folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check_layers(config.num_hidden_layers)
    layers = [
        MQALayer(
            config,
            layer_id=layer_id,
            backend=backend,
            group=group,
            dtype=dtype,
            device=device,
            fp8_linears=checkpoint.fp8_linears(layer_id),
        )
        for layer_id in range(config.num_hidden_layers)
    ]
    for layer in layers:
        checkpoint.load_attention(layer)
    backend.prewarm(layers[0].head_layout.kernel_num_heads, device)
    model = _load_host(checkpoint, config, group, dtype, device)
    for layer, decoder_layer in zip(layers, model.model.layers, strict=True):
        decoder_layer.self_attn = AttentionAdapter(layer)
    model.attention_step = backend.step
    return model.eval().requires_grad_(False)


def _load_host(checkpoint: Checkpoint, config: DeepSeekV4Config, group: AttnTPGroup, dtype, device) -> _HostModel:
    """transformers' part of the model."""
    folder = checkpoint.folder
    hf_config = DeepseekV4Config.from_pretrained(folder)
    if DeepSeekV4Config.from_pretrained_config(hf_config) != config:
        raise ValueError(f"{folder}/config.json: transformers reads other sizes from it; allowed: its own field names")
    if not checkpoint.has_fp8_outside_attention and hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config  # nothing is left for transformers to dequantise
    shards_experts, reason = _expert_sharding(group)
    logger.info("experts %s: %s", "sharded over the ranks" if shards_experts else "whole on every rank", reason)
    if shards_experts:
        placement = {"distributed_config": DistributedConfig(tp_size=group.size, tp_plan="auto")}
    else:
        # transformers needs accelerate to load onto a device directly.
        placement = {"device_map": None if torch.device(device).type == "cpu" else device}
    model, info = _HostModel.from_pretrained(
        folder,
        config=hf_config,
        dtype=dtype,
        experts_implementation=_experts_implementation(dtype, device),
        **placement,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported in `info`, with names, and refused here
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, info.get(kind) or ())):
            raise ValueError(f"{folder}: {kind.replace('_', ' ')}: {', '.join(names)}")
    for module in model.modules():
        if isinstance(module, DeepseekV4RMSNorm):
            # Norm weights stay float32; transformers 5.17 lets them widen the output too.
            module.register_forward_hook(lambda module, inputs, output: output.to(inputs[0].dtype))
    return model


def _experts_implementation(dtype: torch.dtype, device: torch.device | str) -> str:
    """How transformers runs the routed experts: as grouped products where those never wait for the device."""
    return "grouped_mm" if torch.device(device).type == "cuda" and dtype == torch.bfloat16 else "eager"


def graph_obstacle(model: DeepseekV4ForCausalLM) -> str | None:
    """Why a step of `model` cannot be captured in a CUDA graph, None where it can."""
    if model.device.type != "cuda":
        return f"the device is {model.device.type}"
    implementation = model.config._experts_implementation
    if implementation != "grouped_mm":
        return f"the experts run as {implementation!r}, which waits for the device ({model.dtype})"
    return None


def experts_shard_over(size: int) -> tuple[bool, str]:
    """Whether transformers' own tensor-parallel plan can shard the routed experts over `size` ranks, and the reason."""
    if size == 1:
        return False, "one rank"
    if not getattr(DeepseekV4Config, "base_model_tp_plan", None):
        return False, f"transformers {transformers_version} has no tensor-parallel plan for this model"
    if importlib.util.find_spec("accelerate") is None:
        return False, "transformers needs accelerate for that, which is not installed"
    return True, "by transformers' tensor-parallel plan"


def _expert_sharding(group: AttnTPGroup) -> tuple[bool, str]:
    shards, reason = experts_shard_over(group.size)
    is_world = dist.is_initialized() and group.process_group is None and dist.get_world_size() == group.size
    if shards and not is_world:
        return False, "the attention-TP group is not the whole world"
    return shards, reason


def forward(
    model: DeepseekV4ForCausalLM,
    input_ids: torch.Tensor,
    forward_batch: ForwardBatch,
    *,
    logits_for: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of the model over a flat batch.

    One step of the attention backend too, where it has such: what it plans for lengths is shared by the layers.

    Args:
        input_ids: int [num_tokens], sequence after sequence as in `forward_batch`.
        logits_for: rows to compute logits for; all where None.

    Returns:
        logits [num rows, vocab_size].
    """
    rows = logits_for if logits_for is not None else 0
    with model.attention_step():
        return model(
            input_ids=input_ids[None],
            position_ids=forward_batch.positions[None],
            # A dictionary is taken as ready-made masks, and attention needs none.
            attention_mask={"sliding_attention": None},
            use_cache=False,
            logits_to_keep=rows,
            forward_batch=forward_batch,
        ).logits[0]
