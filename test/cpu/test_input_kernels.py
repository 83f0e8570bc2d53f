"""Which form of `prepare_q` and `store_kv` a layer runs, and the layer itself with the Triton form, interpreted."""

import logging
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import pytest
import torch

from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.forward_batch import ForwardBatch
from headfit.kernels.prepare_q_triton import prepare_q_triton
from headfit.kernels.store_kv_triton import store_kv_triton
from headfit.kv_cache import ModelDtypeFormat, PackedFp8Format
from headfit.layers import input_kernels
from headfit.layers.input_kernels import REFERENCE, InputKernels, choose_input_kernels
from headfit.model_cache import ModelCache
from headfit.models import deepseek_v4
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.measure import BF16_OUTPUT, assert_close
from headfit.testing.models import hf_config

TRITON = InputKernels("triton", prepare_q_triton, store_kv_triton)
FUSABLE = {"device_type": "cuda", "dtype": torch.bfloat16, "kv_format": PackedFp8Format(), "rope_dim": 64}
OBSTACLES = [
    ({"device_type": "cpu"}, "the device is cpu"),
    ({"dtype": torch.float16}, "activations are torch.float16"),
    ({"kv_format": ModelDtypeFormat(torch.bfloat16)}, "the cache's KV format is 'model'"),
    ({"rope_dim": 32}, "qk_rope_head_dim is 32"),
]


@pytest.fixture(autouse=True)
def log(caplog):
    """No choice made yet; the messages of the test's own."""
    choose_input_kernels.cache_clear()
    caplog.set_level(logging.INFO, logger=input_kernels.__name__)
    yield caplog
    choose_input_kernels.cache_clear()


def test_triton_where_it_can_run(log):
    assert choose_input_kernels(None, **FUSABLE) == choose_input_kernels(True, **FUSABLE) == TRITON
    assert [record.getMessage() for record in log.records] == [
        "query and key preparation by Triton kernels: torch.bfloat16 on cuda, fp8 pages",
        "query and key preparation by Triton kernels: asked for",
    ]


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES)
def test_reference_elsewhere_with_the_reason_logged_once(changes, reason, log):
    for _ in range(3):
        assert choose_input_kernels(None, **FUSABLE | changes) is REFERENCE
    (record,) = log.records
    assert record.levelno == logging.INFO and reason in record.getMessage()


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES)
def test_fused_is_refused_where_it_cannot_run(changes, reason, log):
    for _ in range(2):
        with pytest.raises(ValueError, match=f"fused: True, but {reason}.*; allowed here: None, False"):
            choose_input_kernels(True, **FUSABLE | changes)
    assert not log.records


def test_triton_that_does_not_import_is_a_reason(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_input_kernels(None, **FUSABLE) is REFERENCE
    assert "triton does not import" in log.records[0].getMessage()
    with pytest.raises(ValueError, match="fused: True, but triton does not import"):
        choose_input_kernels(True, **FUSABLE)


def test_reference_is_forced(log):
    assert choose_input_kernels(False, **FUSABLE) is REFERENCE
    assert log.records[0].getMessage() == "query and key preparation by the reference: asked for"


def make_layer(ratio, *, supported=None, **options):
    config = DeepSeekV4Config.from_pretrained_config(hf_config([ratio], index_topk=8, sliding_window=16))
    return MQALayer(config, layer_id=0, backend=ReferenceBackend(supported_num_heads=supported), **options), config


def run(layer, config, tokens):
    """A prompt of 9 tokens, then two steps; ratio 4 completes an entry in the prompt and one in the last step."""
    sizes = {"max_seqs": 1, "max_context": 12, "max_chunk": 9}
    cache = ModelCache(config, **sizes, kv_format=PackedFp8Format(), dtype=tokens.dtype, device="cpu")
    batches = [ForwardBatch.for_step(cache, request_slots=[0], starts=[0], lengths=[9])]
    for position in (9, 10, 11):
        slots, positions = torch.tensor([0]), torch.tensor([position])
        batches.append(ForwardBatch.for_decode(cache, request_slots=slots, positions=positions))
    parts = tokens.split([9, 1, 1, 1])
    return torch.cat([layer(x, batch.positions, batch) for x, batch in zip(parts, batches, strict=True)])


@pytest.mark.usefixtures("nan_empty")
@pytest.mark.parametrize("supported", [None, (64,)], ids=["exact", "padded"])
@pytest.mark.parametrize("ratio", [0, 4])
def test_layer_with_triton_kernels_equals_the_reference(ratio, supported, monkeypatch):
    layer, config = make_layer(ratio, supported=supported)
    for name, tensor in layer.named_parameters():
        scale = 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        tensor.copy_(scale * torch.randn(tensor.shape) + ("norm" in name))
    tokens = torch.randn(12, 64, dtype=torch.bfloat16)
    expected = run(layer, config, tokens)
    calls = []

    def choose(fused, **kind):
        calls.append((fused, kind))
        return TRITON

    monkeypatch.setattr(deepseek_v4, "choose_input_kernels", choose)
    assert_close(run(layer, config, tokens), expected, BF16_OUTPUT)
    assert calls == [(None, FUSABLE | {"device_type": "cpu"})] * 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "the device is cpu"), ({"device": "cuda", "dtype": torch.float32}, "activations are torch.float32")],
)
def test_a_layer_that_cannot_be_fused_is_refused_when_built(options, reason):
    with pytest.raises(ValueError, match=f"fused: True, but {reason}"):
        make_layer(0, fused=True, **options)


def test_a_layer_from_the_meta_device_is_refused_when_it_runs():
    layer, config = make_layer(0, fused=True, device="meta")
    with pytest.raises(ValueError, match="fused: True, but the device is cpu"):
        run(layer.to_empty(device="cpu"), config, torch.zeros(12, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("fused", [None, False])
def test_a_layer_on_the_cpu_runs_the_reference(fused, log):
    layer, config = make_layer(0, fused=fused)
    for tensor in layer.parameters():
        tensor.zero_()
    assert not run(layer, config, torch.zeros(12, 64, dtype=torch.bfloat16)).any()
    (record,) = log.records
    assert record.getMessage().endswith("asked for" if fused is False else "the Triton kernels run on cuda")
