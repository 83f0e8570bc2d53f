"""The memory that a rank of a checkpoint needs, estimated before anything is loaded, and what a machine has."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from headfit.config import DeepSeekV4Config

RUNTIME_BYTES = 512 * 2**20  # of a rank's process before it holds a tensor: Python, torch and transformers
STEP_TOKENS = 2048  # tokens that one forward brings, over all sequences
_FLOATS = ("F64", "F32", "BF16", "F16")  # safetensors dtypes that are loaded in the dtype of the run


@dataclass(frozen=True, slots=True)
class RunShape:
    """What a run asks of each rank's memory, besides the checkpoint."""

    attn_tp_size: int
    backend: str
    dtype: torch.dtype
    kv_format: str
    max_seqs: int
    max_context: int
    expert_shards: int = 1
    """Ranks that share the experts; 1 where each holds all."""

    @property
    def max_chunk(self) -> int:
        """Tokens of one sequence that one forward brings."""
        return min(self.max_context, max(1, STEP_TOKENS // self.max_seqs))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """An estimate of the bytes that one rank needs."""

    attention: int
    """This rank's attention weights."""
    experts: int
    """This rank's share of the routed experts."""
    other: int
    """Everything else of the model, whole on every rank: embeddings, shared experts, hyper-connections, head."""
    cache: int
    working: int
    """Activations of the largest step and the process itself."""

    @property
    def total(self) -> int:
        return self.attention + self.experts + self.other + self.cache + self.working


def rank_memory(folder: str | Path, config: DeepSeekV4Config, shape: RunShape) -> RankMemory:
    """Estimate a rank's memory out of the checkpoint's headers; no weight is read.

    Floating tensors count in the dtype they are loaded in, fp8 and packed ones as stored.

    Raises:
        ValueError: a corrupt or missing file, attention tensors that do not fit, heads that do not divide, an unknown
            backend or KV format.
    """
    from headfit import backends
    from headfit.backends.reference import ReferenceBackend
    from headfit.checkpoint import Checkpoint
    from headfit.distributed import AttnTPGroup
    from headfit.models.deepseek_v4 import MQALayer

    checkpoint = Checkpoint(folder)
    backend = ReferenceBackend(supported_num_heads=backends.support(shape.backend).num_heads)  # pads alike
    layers = [
        MQALayer(
            config,
            layer_id=layer_id,
            backend=backend,
            group=AttnTPGroup(0, shape.attn_tp_size),
            dtype=shape.dtype,
            device="meta",
            fp8_linears=checkpoint.fp8_linears(layer_id),
        )
        for layer_id in range(config.num_hidden_layers)
    ]
    checkpoint.check_layers(config.num_hidden_layers)
    for layer in layers:
        checkpoint.check_attention(layer)
    experts, other = _bytes_outside_attention(checkpoint, shape.dtype.itemsize)
    return RankMemory(
        attention=sum(param.nbytes for layer in layers for param in layer.parameters()),
        experts=-(-experts // shape.expert_shards),
        other=other,
        cache=cache_bytes(config, shape),
        working=_working_bytes(config, shape, max(layer.head_layout.kernel_num_heads for layer in layers)),
    )


def kv_format_of(name: str, config: DeepSeekV4Config, dtype: torch.dtype) -> Any:
    """The KV format that "fp8" or "model" means. Raises ValueError where the model's keys do not fit it."""
    from headfit import kv_cache

    if name == "model":
        return kv_cache.ModelDtypeFormat(dtype, config.head_dim)
    fp8 = kv_cache.PackedFp8Format()
    widths = (config.head_dim, config.qk_rope_head_dim)
    if widths != (fp8.head_dim, kv_cache.ROPE_DIM):
        allowed = f"head_dim {fp8.head_dim} with qk_rope_head_dim {kv_cache.ROPE_DIM}"
        raise ValueError(f"kv_format fp8: head_dim {widths[0]} with qk_rope_head_dim {widths[1]}, allowed: {allowed}")
    return fp8


def make_cache(config: DeepSeekV4Config, shape: RunShape, device: str) -> Any:
    """The `ModelCache` of a run."""
    from headfit.model_cache import ModelCache

    return ModelCache(
        config,
        max_seqs=shape.max_seqs,
        max_context=shape.max_context,
        max_chunk=shape.max_chunk,
        kv_format=kv_format_of(shape.kv_format, config, shape.dtype),
        dtype=shape.dtype,
        device=device,
    )


def cache_bytes(config: DeepSeekV4Config, shape: RunShape) -> int:
    """Bytes of the pools and running state of all layers."""
    pools = ("window", "compressed", "index_keys")
    total = 0
    for layer in make_cache(config, shape, "meta").layers:
        total += sum(pool.buffer.nbytes for name in pools if (pool := getattr(layer, name)) is not None)
        total += sum(state.nbytes for state in (layer.state, layer.index_state) if state is not None)
    return total


def _bytes_outside_attention(checkpoint: Any, itemsize: int) -> tuple[int, int]:
    """(routed experts, everything else), MTP layers left out as they are not loaded."""
    experts, other = 0, 0
    for tensor, shape, dtype in checkpoint.tensors_outside_attention():
        if re.match(r"(.*\.)?mtp\.", tensor):
            continue
        width = re.search(r"\d+", dtype)
        bits = 8 * itemsize if dtype in _FLOATS else int(width[0]) if width else 8
        size = math.prod(shape) * bits // 8
        if ".experts." in tensor:
            experts += size
        else:
            other += size
    return experts, other


def _working_bytes(config: DeepSeekV4Config, shape: RunShape, kernel_num_heads: int) -> int:
    """Activations of a full step: a few copies of the queries and of the widened hidden state, and the logits."""
    tokens = min(STEP_TOKENS, shape.max_seqs * shape.max_chunk)
    per_token = 6 * kernel_num_heads * config.head_dim + 32 * config.hidden_size
    logits = shape.max_seqs * config.vocab_size
    return 4 * (tokens * per_token + logits) + RUNTIME_BYTES


def available_memory(device: str) -> int:
    """Bytes free on "cuda:<i>", or those that this machine (and its control group) can still give."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = int(found[1]) * 1024
    except (OSError, TypeError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, _cgroup_memory(Path("/sys/fs/cgroup")) or free)


def _cgroup_memory(folder: Path) -> int | None:
    """Bytes left of a container's limit, its file cache counted as free; None where there is no limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # "max" is no number
        return None
    return max(0, limit - used + (int(cached[1]) if cached else 0))


def memory_report(memory: RankMemory, size: int, device: str) -> dict[str, Any]:
    """What `size` ranks need and what there is, JSON-ready. Ranks on "cpu" share one memory."""
    sharing = size if device == "cpu" else 1
    needed = memory.total * sharing
    devices = [f"cuda:{rank}" for rank in range(size)] if device == "cuda" else ["cpu"]
    available = min(map(available_memory, devices))
    each = f"{sharing} ranks of {readable(memory.total)} need" if sharing > 1 else "a rank needs"
    return {
        "attention_bytes": memory.attention,
        "experts_bytes": memory.experts,
        "other_bytes": memory.other,
        "cache_bytes": memory.cache,
        "working_bytes": memory.working,
        "rank_bytes": memory.total,
        "needed_bytes": needed,
        "available_bytes": available,
        "fits": needed <= available,
        "verdict": f"{each} about {readable(needed)} of {device} memory, available {readable(available)}",
    }


def readable(size: int) -> str:
    """Bytes for people, such as 1.5 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
