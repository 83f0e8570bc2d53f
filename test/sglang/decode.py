"""One decode step through a real layer's forward and the real backend's forward, down to the kernel's function."""

import functools
import importlib
import types

import torch

from headfit.kv_cache import HEAD_DIM, KVRegion, PackedFp8Format
from headfit.testing.cases import poisoned_pool

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
PAGE_SIZES = {0: 256, 4: 64, 128: 2}  # of the window and of the two compressed caches


class _Done(Exception):
    pass


class Mode:
    """A decode step."""

    def __getattr__(self, name):
        return lambda: name in ("is_decode", "is_decode_or_idle")


class Step:
    """`num_tokens` query tokens over random keys; `window` and `compressed` are headfit's view of the same caches."""

    def __init__(self, *, num_tokens: int, compress_ratio: int, seed: int, num_keys: int = 64) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_tokens, self.compress_ratio, self.num_keys = num_tokens, compress_ratio, num_keys
        self.window = self._region(PAGE_SIZES[0])
        self.compressed = self._region(PAGE_SIZES[compress_ratio]) if compress_ratio else None

    def queries(self, num_heads: int) -> torch.Tensor:
        return 3 * torch.randn(self.num_tokens, num_heads, HEAD_DIM, generator=self.generator).bfloat16()

    def run(self, layer: torch.nn.Module, q: torch.Tensor) -> torch.Tensor:
        """The attention output of the layer's own heads, [num_tokens, num_local_heads, 512]."""
        x = torch.zeros(self.num_tokens, 64, dtype=torch.bfloat16)
        layer.compress_ratio, layer.test_q = self.compress_ratio, q
        batch = types.SimpleNamespace(forward_mode=Mode())
        positions = torch.arange(self.num_tokens)
        with _Stubbed(layer, self):
            try:
                if type(layer).__name__ == "DSparkAttention":
                    layer(positions, x, batch)
                else:
                    layer(x, positions, batch)
            except _Done as done:
                return done.args[0]
        raise AssertionError("the forward ended without an attention output")

    def _region(self, page_size: int) -> KVRegion:
        pool = poisoned_pool(PackedFp8Format(), 2 + 2 * self.num_keys // page_size, page_size)
        order = torch.rand(self.num_tokens, pool.num_slots - page_size, generator=self.generator).argsort(dim=1)
        indices = page_size + order[:, : self.num_keys]
        indices[:, 3] = -1
        lengths = torch.randint(4, self.num_keys + 1, (self.num_tokens,), generator=self.generator)
        past = torch.arange(self.num_keys) >= lengths[:, None]
        attended = indices[~past & (indices >= 0)].unique()
        pool.store(attended, torch.randn(len(attended), HEAD_DIM, generator=self.generator))
        return KVRegion(pool, indices.int(), lengths.int())

    def call_backend(self, *, q, layer, attn_sink, forward_batch, compress_ratio, **rest) -> torch.Tensor:
        module = importlib.import_module(BACKEND)
        module.DeepSeekV4TokenToKVPool, module.DSV4AttnMetadata = _Pool, types.SimpleNamespace
        module.get_platform = lambda: types.SimpleNamespace(is_sm100=False, is_sm120=False)
        extra = self.compressed
        core = types.SimpleNamespace(
            swa_page_indices=self.window.indices,
            swa_topk_lengths=self.window.lengths,
            c4_sparse_page_indices=extra and extra.indices,
            c4_sparse_topk_lengths=extra and extra.lengths,
            c128_page_indices=extra and extra.indices,
            c128_topk_lengths_clamp1=extra and extra.lengths,
            sparse_page_indices=lambda ratio: extra.indices,
            sparse_topk_lengths=lambda ratio: extra.lengths,
            get_flashmla_metadata=lambda ratio: _scheduling_metadata(),
        )
        backend = types.SimpleNamespace(
            mtp_enabled=False,
            is_dsv41=False,
            trtllm_attn=False,
            forward_metadata=types.SimpleNamespace(core_attn_metadata=core),
            token_to_kv_pool=_Pool(self),
            head_dim_v=HEAD_DIM,
            softmax_scale=HEAD_DIM**-0.5,
            _use_sparse_prefill=lambda batch, num_qo_tokens: False,
            _mega_paged_prefill=lambda *args, **kwargs: False,
            _swa_interleaved=False,
        )
        real = module.DeepseekV4AttnBackend
        if hasattr(real, "_forward_attention"):
            interface = importlib.import_module("sglang.kernels.ops.attention.flash_mla_interface")
            backend._flash_mla_with_kvcache = functools.partial(interface.flash_mla_with_kvcache, use_legacy=True)
        forward = getattr(real, "_forward_attention", real.forward)
        return forward(
            backend,
            q=q,
            layer=layer,
            attn_sink=attn_sink,
            forward_batch=forward_batch,
            compress_ratio=compress_ratio,
            **rest,
        )


class _Pool:
    page_size = PAGE_SIZES[0]
    swa_window_size = PAGE_SIZES[0]

    def __init__(self, step: Step) -> None:
        self._step = step
        self.swa_kv_pool = types.SimpleNamespace(kv_cache_total_dim=584)
        self.uniform_fp8 = False

    def get_swa_key_buffer_radix(self, layer_id):
        return self._step.window.pool.buffer[: self._step.window.pool.num_pages]

    def get_extra_key_buffer(self, layer_id):
        return self._step.compressed.pool.buffer[: self._step.compressed.pool.num_pages]

    def get_swa_key_page_size(self):
        return PAGE_SIZES[0]

    def get_extra_key_page_size(self, layer_id):
        return PAGE_SIZES[self._step.compress_ratio]

    def get_swa_key_bytes_per_token(self):
        return 584

    def get_extra_key_bytes_per_token(self, layer_id):
        return 584


def _scheduling_metadata():
    import flash_mla.flash_mla_interface as interface

    return interface.FlashMLASchedMeta()


class _Stubbed:
    """Within, the layer's GPU parts are stubs: q comes from `layer.test_q`, and the output ends the forward."""

    def __init__(self, layer, step: Step) -> None:
        self.layer, self.step = layer, step

    def __enter__(self):
        layer, step = self.layer, self.step
        module = importlib.import_module(type(layer).__module__)
        context = importlib.import_module("sglang.srt.model_executor.forward_context")
        backend = types.SimpleNamespace(forward=step.call_backend, forward_metadata=None)
        for owner in (module, context):
            owner.get_attn_backend = lambda: backend
        module.get_token_to_kv_pool = lambda: types.SimpleNamespace(uniform_fp8=False)
        module.fused_rope_inplace = _finish
        module._resolve_dspark_pool = lambda: types.SimpleNamespace(uniform_fp8=False)
        layer._use_fast_kernel = True
        layer._forward_prepare = lambda *args, **kwargs: (_write_q(layer, args[4]), None)
        layer._compute_q = lambda x, positions, q_out=None: _write_q(layer, q_out)
        layer.kv_proj_only = lambda x: x
        layer._store_block_kv = lambda **kwargs: None

    def __exit__(self, *error):
        for name in ("_forward_prepare", "_compute_q", "kv_proj_only", "_store_block_kv"):
            self.layer.__dict__.pop(name, None)


def _write_q(layer, q_out):
    if q_out is None:
        return layer.test_q
    q_out.copy_(layer.test_q)
    return q_out


def _finish(rope, *args, **kwargs):
    """The server rotates the output's last 64 channels back: `rope` is a view of the rank's rows of it."""
    start = rope.storage_offset() - (HEAD_DIM - rope.shape[-1])
    raise _Done(rope.as_strided((*rope.shape[:-1], HEAD_DIM), rope.stride(), start).clone())
