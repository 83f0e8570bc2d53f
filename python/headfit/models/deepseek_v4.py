"""DeepSeek-V4 attention for one attention-TP rank, its heads fitted to the kernel that will run them."""

import torch
from torch import nn

from headfit.attn_sink import AttnSink
from headfit.backends.base import AttentionBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.head_layout import plan_heads
from headfit.kv_cache import KVRegion
from headfit.layers.compressor import Compressor
from headfit.layers.indexer import Indexer
from headfit.layers.input_kernels import InputKernels, check_fused, choose_input_kernels
from headfit.layers.linear import FP8_BLOCK, GroupedLinear, ParallelLinear, Quantized
from headfit.layers.norm import RMSNorm
from headfit.layers.rope import RotaryEmbedding, apply_rope
from headfit.model_cache import INDEXED_RATIO, LayerCache

FP8_LINEARS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")
"""Linears whose weights a checkpoint may hold in block-scaled fp8."""
MAX_PADDED_BYTES = 2**27
"""Of the padded queries that one forward holds at a time, and of the padded attention output as much again."""


class MQALayer(nn.Module):
    """Multi-query attention over one shared latent, with a sliding window, compressed entries and a sink per head.

    Parameters carry the checkpoint's names (`wq_a`, `q_norm`, `wq_b`, `wkv`, `kv_norm`, `wo_a`, `wo_b`, `attn_sink`,
    `compressor.*`, `indexer.*`). `wq_b` (by head), `wo_a` (by output group) and `wo_b` (by input) hold this rank's
    part, everything else is whole; `attn_sink` is whole too, float32 [num_heads].

    Args:
        config: the model's.
        layer_id: which layer, which also says its compress ratio.
        backend: runs the attention; its `supported_num_heads` decides the padding.
        group: this rank's place in the attention-TP group.
        dtype: of unquantised weights and activations.
        fp8_linears: names out of `FP8_LINEARS` whose weights are block-scaled fp8.
        fused: True: queries and keys are prepared by Triton kernels (bfloat16 on CUDA, an fp8 cache); False: by
            PyTorch; None: by Triton kernels where they can run.

    Raises:
        ValueError: the heads or output groups do not divide over the group, no supported head count holds a rank's
            heads, an unknown name in `fp8_linears`, a layer_id out of range, `fused` where Triton kernels cannot run.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        layer_id: int,
        backend: AttentionBackend,
        group: AttnTPGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        fp8_linears: frozenset[str] = frozenset(),
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= layer_id < config.num_hidden_layers:
            raise ValueError(f"layer_id: {layer_id}, allowed: 0 to {config.num_hidden_layers - 1}")
        if unknown := sorted(fp8_linears - set(FP8_LINEARS)):
            raise ValueError(f"fp8_linears: {unknown}, allowed: {FP8_LINEARS}")
        check_fused(fused, device=device, dtype=dtype, rope_dim=config.qk_rope_head_dim)
        self.layer_id = layer_id
        self.backend = backend
        self.group = group or AttnTPGroup()
        self.head_layout = plan_heads(
            num_heads=config.num_heads,
            attn_tp_size=self.group.size,
            attn_tp_rank=self.group.rank,
            supported=backend.supported_num_heads,
            o_groups=config.o_groups,
        )
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.softmax_scale = config.head_dim**-0.5
        self.compress_ratio = config.compress_ratios[layer_id]
        self.fused = fused
        self._build(config, dtype=dtype, device=device, fp8_linears=fp8_linears)

    def _build(self, config, *, dtype, device, fp8_linears) -> None:
        heads = self.head_layout.local_slice
        head_rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        groups = self.head_layout.local_groups
        group_rows = slice(groups.start * config.o_lora_rank, groups.stop * config.o_lora_rank)
        self.num_local_groups = groups.stop - groups.start
        self.group_width = config.num_heads * config.head_dim // config.o_groups
        o_rank = config.o_groups * config.o_lora_rank

        def linear(name, in_features, out_features, cls=ParallelLinear, **part):
            return cls(in_features, out_features, dtype=dtype, device=device, fp8=name in fp8_linears, **part)

        def norm(dim):
            return RMSNorm(dim, eps=config.rms_norm_eps, device=device)

        self.rotary = RotaryEmbedding(config.layer_rope(self.layer_id), config.qk_rope_head_dim, device=device)
        self.wq_a = linear("wq_a", config.hidden_size, config.q_lora_rank)
        self.q_norm = norm(config.q_lora_rank)
        self.wq_b = linear("wq_b", config.q_lora_rank, config.num_heads * config.head_dim, rows=head_rows)
        self.wkv = linear("wkv", config.hidden_size, config.head_dim)
        self.kv_norm = norm(config.head_dim)
        self.wo_a = linear("wo_a", self.group_width, o_rank, cls=GroupedLinear, rows=group_rows)
        self.wo_b = linear("wo_b", o_rank, config.hidden_size, cols=group_rows)
        self.sink = AttnSink(
            self,
            num_heads=config.num_heads,
            max_kernel_heads=self.head_layout.kernel_num_heads,
            device=device,
        )
        parts = {"rotary": self.rotary, "dtype": dtype, "device": device}
        self.compressor = (
            Compressor(config, ratio=self.compress_ratio, head_dim=config.head_dim, **parts)
            if self.compress_ratio
            else None
        )
        fp8_indexer = "indexer.wq_b" in fp8_linears
        self.indexer = Indexer(config, fp8=fp8_indexer, **parts) if self.compress_ratio == INDEXED_RATIO else None

    def _apply(self, fn, recurse=True):
        before = self.attn_sink.detach()
        super()._apply(fn, recurse)
        self.sink.after_apply(before)
        return self

    @property
    def _attn_sink_local(self) -> torch.Tensor:
        """This rank's sinks as its kernel takes them: float32 [kernel_num_heads], a view of the parameter."""
        return self.sink.local(self.head_layout)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        x_quant: Quantized | None = None,
    ) -> torch.Tensor:
        """Attend, and bring the cache up to date with this step's tokens.

        Args:
            x: [num_tokens, hidden], normed.
            positions: int [num_tokens], each token's place in its sequence.
            forward_batch: the step's metadata, built for the same tokens.
            x_quant: x as the norm before it quantised it, for fp8 linears: float8_e4m3 values [num_tokens, hidden]
                and float32 scales [num_tokens, hidden / 128].

        Returns:
            [num_tokens, hidden] in x's dtype, summed over the attention-TP group.

        Raises:
            ValueError: a shape that does not fit, or `x_quant` where no linear of this layer takes it.
        """
        self._check(x, positions, forward_batch, x_quant)
        cache = forward_batch.cache.layers[self.layer_id]
        kernels = self._input_kernels(x, cache)
        cos_sin = self.rotary(positions)
        q_lora = self.q_norm(self.wq_a(x, x_quant))
        kernels.store_kv(
            kv=self.wkv(x, x_quant),
            norm_weight=self.kv_norm.weight,
            eps=self.eps,
            cos_sin=cos_sin,
            slots=forward_batch.window_writes,
            pool=cache.window,
        )
        o = self._attend(
            q_lora,
            cos_sin,
            kernels,
            window=KVRegion(cache.window, forward_batch.window_indices, forward_batch.window_lengths),
            compressed=self._compressed(x, q_lora, positions, forward_batch, cache, kernels),
        )
        o = apply_rope(o, cos_sin, inverse=True)
        grouped = o.reshape(x.shape[0], self.num_local_groups, self.group_width)
        return self.group.all_reduce(self.wo_b(self.wo_a(grouped)))

    def _input_kernels(self, x: torch.Tensor, cache: LayerCache) -> InputKernels:
        return choose_input_kernels(
            self.fused,
            device_type=x.device.type,
            dtype=x.dtype,
            kv_format=cache.window.kv_format,
            rope_dim=self.rotary.rope_dim,
        )

    def _attend(self, q_lora: torch.Tensor, cos_sin, kernels: InputKernels, *, window, compressed) -> torch.Tensor:
        """The attention output of this rank's heads, [num_tokens, num_local_heads, head_dim].

        Padded queries and their padded output exist for at most `MAX_PADDED_BYTES` of tokens at a time.
        """
        layout, num_tokens = self.head_layout, q_lora.shape[0]
        step = num_tokens
        if layout.is_padded:
            step = max(1, MAX_PADDED_BYTES // (layout.kernel_num_heads * self.head_dim * q_lora.element_size()))
        parts = []
        for start in range(0, max(1, num_tokens), max(1, step)):
            rows = slice(start, start + step)
            # Whole regions where one part is all: what a backend plans for their tensors is then shared by the layers.
            whole = num_tokens <= step
            o, _ = self.backend.decode(
                q=self._queries(q_lora[rows], tuple(part[rows] for part in cos_sin), kernels),
                window=window if whole else window.rows(rows),
                compressed=compressed if whole or compressed is None else compressed.rows(rows),
                attn_sink=self._attn_sink_local,
                softmax_scale=self.softmax_scale,
            )
            parts.append(o[:, : layout.num_local_heads])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _queries(self, q_lora: torch.Tensor, cos_sin, kernels: InputKernels) -> torch.Tensor:
        """Normed and rotated queries [num_tokens, kernel_num_heads, head_dim]; padding heads are left unwritten."""
        layout = self.head_layout
        q = self.wq_b(q_lora).unflatten(-1, (layout.num_local_heads, self.head_dim))
        out = q.new_empty(q.shape[0], layout.kernel_num_heads, self.head_dim)
        kernels.prepare_q(q=q, eps=self.eps, cos_sin=cos_sin, out=out)
        return out

    def _compressed(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        cache: LayerCache,
        kernels: InputKernels,
    ) -> KVRegion | None:
        """Store the entries that this step completes, and say which ones each token attends to."""
        ratio = self.compress_ratio
        if not ratio:
            return None
        plan = forward_batch.entry_plans[ratio]
        kernels.store_kv(
            kv=self.compressor.pooled(x, cache.state, plan),
            norm_weight=self.compressor.norm.weight,
            eps=self.eps,
            cos_sin=self.rotary(plan.positions),
            slots=plan.slots,
            pool=cache.compressed,
        )
        visible = forward_batch.visible_entries[ratio]
        if self.indexer is not None:
            entries = self.indexer(x, q_lora, positions, forward_batch, cache)
        else:
            entries = torch.arange(forward_batch.max_entries[ratio], device=x.device)
            entries = torch.where(entries < visible[:, None], entries, -1)
        slots = forward_batch.cache.entry_slots(ratio, forward_batch.request_slots[:, None], entries)
        return KVRegion(cache.compressed, slots.int(), forward_batch.entry_lengths[ratio])

    def _check(self, x, positions, forward_batch: ForwardBatch, x_quant: Quantized | None) -> None:
        num_tokens = forward_batch.num_tokens
        if x.shape != (num_tokens, self.hidden_size):
            raise ValueError(f"x: shape {tuple(x.shape)}, allowed: ({num_tokens}, {self.hidden_size})")
        if positions.shape != (num_tokens,):
            raise ValueError(f"positions: shape {tuple(positions.shape)}, allowed: ({num_tokens},)")
        if x_quant is None:
            return
        if not (self.wq_a.fp8 or self.wkv.fp8):
            raise ValueError("x_quant: given, but neither wq_a nor wkv of this layer is fp8; pass x alone")
        scales = (num_tokens, -(-self.hidden_size // FP8_BLOCK))
        if x_quant[0].shape != x.shape or x_quant[1].shape != scales:
            raise ValueError(
                f"x_quant: shapes {tuple(x_quant[0].shape)} and {tuple(x_quant[1].shape)}, "
                f"allowed: {tuple(x.shape)} and {scales}"
            )
