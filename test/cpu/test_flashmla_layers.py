"""Layers over the FlashMLA backend: metadata once a ratio and step, and padded copies of bounded size (row 6)."""

import pytest
import torch
from test_flashmla_backend import library  # noqa: F401

from headfit.backends.flashmla import FlashMLABackend
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.kv_cache import PackedFp8Format
from headfit.model_cache import ModelCache
from headfit.models import deepseek_v4
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.measure import relative_norm
from headfit.testing.models import hf_config

BF16 = torch.bfloat16


def make_layers(ratios, backend):
    config = DeepSeekV4Config.from_pretrained_config(hf_config(ratios, index_topk=8))
    group = AttnTPGroup(1, 4, reduce_results=False)
    layers = [MQALayer(config, layer_id=i, backend=backend, group=group) for i in range(len(ratios))]
    for layer in layers:
        for param in layer.parameters():
            param.data.copy_(torch.randn(param.shape) * (1.0 if param.dim() == 1 else param.shape[-1] ** -0.5))
    cache = ModelCache(
        config, max_seqs=2, max_context=300, max_chunk=290, kv_format=PackedFp8Format(), dtype=BF16, device="cpu"
    )
    return layers, cache


@torch.inference_mode()
def test_one_plan_a_ratio_and_step(library):  # noqa: F811
    backend = FlashMLABackend(device="cpu", checked=True)
    layers, cache = make_layers([0, 4, 128, 4, 128, 0], backend)
    for positions in ([130, 7], [131, 8]):
        library.metadata.clear()
        batch = ForwardBatch.for_decode(cache, request_slots=torch.arange(2), positions=torch.tensor(positions))
        with backend.step():
            for layer in layers:
                layer(torch.randn(2, 64, dtype=BF16), batch.positions, batch)
        assert len(library.metadata) == 3


@pytest.mark.parametrize("ratio", [0, 4, 128])
@torch.inference_mode()
def test_row_06_padded_copies_are_bounded(ratio, library, monkeypatch):  # noqa: F811
    """270 tokens in parts of 100: the outputs of the reference, and of one part."""
    (layer,), cache = make_layers([ratio], FlashMLABackend(device="cpu"))
    x = torch.randn(270, 64, dtype=BF16)

    def prefill():
        batch = ForwardBatch.for_step(cache, request_slots=[0, 1], starts=[0, 0], lengths=[200, 70])
        return layer(x, batch.positions, batch)

    whole = prefill()
    assert [len(call["q"]) for call in library.calls] == [270]
    monkeypatch.setattr(deepseek_v4, "MAX_PADDED_BYTES", 100 * 64 * 512 * 2)
    parts = prefill()
    assert [len(call["q"]) for call in library.calls[1:]] == [100, 100, 70]
    exact = make_layers([ratio], ReferenceBackend())[0][0]
    layer.backend, layer.head_layout = exact.backend, exact.head_layout
    expected = prefill()
    assert relative_norm(whole, expected) < 1e-2 and relative_norm(parts, whole) < 1e-3
