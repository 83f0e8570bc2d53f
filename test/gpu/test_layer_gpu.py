"""MQALayer on a GPU: against transformers in float32, and its decode step under a captured CUDA graph."""

import math

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from headfit import backends
from headfit.attn_sink import sink_addresses
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.kv_cache import HEAD_DIM, ModelDtypeFormat, PackedFp8Format
from headfit.model_cache import ModelCache
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.cases import constant_case
from headfit.testing.measure import BF16_OUTPUT, assert_close, relative_norm
from headfit.testing.models import hf_config, random_model
from headfit.testing.timing import capture, count_launches

CONFIG = DeepSeekV4Config.from_pretrained_config(hf_config((0, 4, 128), index_topk=8))
NUM_SEQS, CONTEXT = 3, 300


def make_layer(
    layer_id: int, *, rank: int = 0, size: int = 1, supported=None, dtype=torch.bfloat16, backend=None
) -> MQALayer:
    group = AttnTPGroup(rank, size, reduce_results=False)
    backend = backend or ReferenceBackend(supported_num_heads=supported)
    layer = MQALayer(CONFIG, layer_id=layer_id, backend=backend, group=group, dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(layer_id)
    for name, param in layer.named_parameters():
        scale = 1.0 if "norm" in name or param.dim() == 1 else param.shape[-1] ** -0.5
        param.data.copy_(scale * torch.randn(param.shape, generator=generator, device="cuda"))
    return layer


def make_cache(kv_format=None, dtype=torch.bfloat16) -> ModelCache:
    return ModelCache(
        CONFIG,
        max_seqs=NUM_SEQS,
        max_context=CONTEXT,
        max_chunk=CONTEXT,
        kv_format=kv_format or PackedFp8Format(),
        dtype=dtype,
        device="cuda",
    )


def prefill(layer: MQALayer, cache: ModelCache, lengths) -> None:
    batch = ForwardBatch.for_step(cache, request_slots=range(len(lengths)), starts=[0] * len(lengths), lengths=lengths)
    x = torch.randn(sum(lengths), CONFIG.hidden_size, dtype=torch.bfloat16, device="cuda")
    layer(x, batch.positions, batch)


class Captured:
    """One layer's decode step in a CUDA graph, its metadata computed inside."""

    def __init__(self, layer: MQALayer, cache: ModelCache, positions) -> None:
        self.layer, self.cache = layer, cache
        self.slots = torch.arange(NUM_SEQS, device="cuda")
        self.positions = torch.tensor(positions, device="cuda")
        self.x = torch.randn(NUM_SEQS, CONFIG.hidden_size, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.eager(torch.full_like(self.positions, -1), self.x)  # warm-up on padding rows: changes nothing
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = capture(self._step)

    def _step(self):
        self.out = self.eager(self.positions, self.x)

    def eager(self, positions, x):
        batch = ForwardBatch.for_decode(self.cache, request_slots=self.slots, positions=positions)
        return self.layer(x, positions, batch)

    def replay(self, positions, x):
        self.positions.copy_(positions)
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()


def make_backend(name: str):
    return ReferenceBackend(supported_num_heads=(64, 128)) if name == "padded" else backends.create(name, device="cuda")


@pytest.mark.parametrize("backend", ["reference", "padded", "unified_kv_triton", "sparse_mqa_cuda"])
@pytest.mark.parametrize("layer_id", [0, 1, 2], ids=["window", "ratio4", "ratio128"])
@torch.inference_mode()
def test_replay_equals_eager_as_sequences_grow(layer_id, backend):
    layer = make_layer(layer_id, rank=3, size=4, backend=make_backend(backend))
    cache, twin = make_cache(), make_cache()
    lengths = [126, 5, 250]
    torch.manual_seed(1)
    prefill(layer, cache, lengths)
    torch.manual_seed(1)
    prefill(layer, twin, lengths)
    captured = Captured(layer, cache, lengths)
    for step in range(6):  # over the borders of 4, 128 and the window
        positions = torch.tensor([length + step for length in lengths], device="cuda")
        x = torch.randn_like(captured.x)
        batch = ForwardBatch.for_decode(twin, request_slots=captured.slots, positions=positions)
        assert torch.equal(captured.replay(positions, x), layer(x, positions, batch))


@pytest.mark.parametrize("backend", ["unified_kv_triton", "sparse_mqa_cuda"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layer_id", [0, 1, 2], ids=["window", "ratio4", "ratio128"])
@torch.inference_mode()
def test_layer_equals_the_reference_layer(layer_id, size, backend):
    for rank in range(size):
        outputs = []
        for name in ("reference", backend):
            layer = make_layer(layer_id, rank=rank, size=size, backend=make_backend(name))
            cache = make_cache()
            torch.manual_seed(rank)
            prefill(layer, cache, [126, 5, 250])
            slots, positions = torch.arange(NUM_SEQS, device="cuda"), torch.tensor([126, 5, 250], device="cuda")
            batch = ForwardBatch.for_decode(cache, request_slots=slots, positions=positions)
            x = torch.randn(NUM_SEQS, CONFIG.hidden_size, dtype=torch.bfloat16, device="cuda")
            outputs.append(layer(x, positions, batch))
        assert relative_norm(outputs[1], outputs[0]) < 1e-2, f"rank {rank}"


def check_rank_sinks(backend, rank: int) -> None:
    """Row 7: of 128 heads over 8 ranks, sink i is 0.05 i; four keys of ones give 4 / (4 + exp(sink))."""
    config = DeepSeekV4Config.from_pretrained_config(hf_config([0], num_attention_heads=128, o_groups=16))
    group = AttnTPGroup(rank, 8, reduce_results=False)
    layer = MQALayer(config, layer_id=0, backend=backend, group=group, device="cuda")
    layer.attn_sink.data.copy_(0.05 * torch.arange(128))
    arguments = constant_case([1.0] * 4, layer._attn_sink_local, kv_format=PackedFp8Format())
    o, _ = backend.decode(**arguments | {"q": arguments["q"].bfloat16()})
    expected = 4 / (4 + torch.exp(0.05 * (16 * rank + torch.arange(16))))
    assert_close(o[0, :16], expected[:, None].expand(16, HEAD_DIM), BF16_OUTPUT)


@pytest.mark.parametrize("backend", ["reference", "padded", "unified_kv_triton", "sparse_mqa_cuda"])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_row_07_each_rank_has_its_own_sinks(rank, backend):
    check_rank_sinks(make_backend(backend), rank)


UPDATES = {
    "copy_": lambda layer, new: layer.attn_sink.copy_(new),
    "data.copy_": lambda layer, new: layer.attn_sink.data.copy_(new),
    "load_state_dict": lambda layer, new: layer.load_state_dict(layer.state_dict() | {"attn_sink": new}),
    "rebind": lambda layer, new: setattr(layer.attn_sink, "data", new),
}


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("supported", [None, (64, 128)], ids=["exact", "padded"])
@pytest.mark.parametrize("update", UPDATES)
@torch.no_grad()
def test_row_08_a_replay_sees_new_sinks(update, supported, rank):
    layer = make_layer(0, rank=rank, size=4, supported=supported)
    layer.attn_sink.fill_(math.log(4))
    layer.wq_b.weight.zero_()  # equal scores: the sink's share depends on it and the key count alone
    captured = Captured(layer, make_cache(), [0, 0, 0])
    addresses = sink_addresses(layer)
    positions, x = torch.zeros(NUM_SEQS, dtype=torch.int64, device="cuda"), captured.x.clone()
    old = captured.replay(positions, x)
    UPDATES[update](layer, torch.full_like(layer.attn_sink, -math.inf))
    if update == "rebind":
        assert sink_addresses(layer) != addresses  # what a runner compares before it replays
        captured = Captured(layer, make_cache(), [0, 0, 0])
    else:
        assert sink_addresses(layer) == addresses
    # One key a query: its share rises from 1 / (1 + 4) to 1.
    assert relative_norm(captured.replay(positions, x), 5 * old) < 1e-2


@torch.no_grad()
def test_row_08_a_replay_follows_a_flat_weight_buffer():
    """Bound to memory without room for padding, the sink is copied inside the graph: a replay reads that memory."""
    layer = make_layer(0, rank=3, size=4, supported=(64, 128))
    layer.wq_b.weight.zero_()
    flat = torch.full((CONFIG.num_heads,), math.log(4), device="cuda")
    layer.attn_sink.data = flat
    captured = Captured(layer, make_cache(), [0, 0, 0])
    positions, x = torch.zeros(NUM_SEQS, dtype=torch.int64, device="cuda"), captured.x.clone()
    old = captured.replay(positions, x)
    flat.fill_(-math.inf)
    assert relative_norm(captured.replay(positions, x), 5 * old) < 1e-2


@pytest.mark.parametrize("supported", [None, (64, 128)], ids=["exact", "padded"])
def test_row_27_no_kernel_of_the_captured_step_builds_the_sink(supported):
    """The nodes of a captured step: as many as with no padding, since q is prepared in its padded buffer."""

    @torch.inference_mode()
    def kernels(layer) -> int:
        return count_launches(Captured(layer, make_cache(), [0, 0, 0]).graph)

    tp1 = make_layer(0)
    assert tp1._attn_sink_local is tp1.attn_sink
    assert kernels(make_layer(0, rank=1, size=4, supported=supported)) == kernels(make_layer(0, rank=1, size=4))


@torch.inference_mode()
def test_a_first_copy_while_a_graph_is_captured_is_refused():
    layer = make_layer(0, rank=3, size=4, supported=(64, 128))
    captured = Captured(layer, make_cache(), [0, 0, 0])
    layer.attn_sink.data = layer.attn_sink.data.clone()
    with pytest.raises(RuntimeError, match="attn_sink: rebound"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured.eager(captured.positions, captured.x)


def test_logits_equal_transformers(tmp_path):
    from headfit.hosts.transformers import forward, load_model

    random_model(hf_config((0, 4, 128), index_topk=8), seed=3).save_pretrained(tmp_path)
    oracle = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).cuda().eval()
    model = load_model(tmp_path, backend=ReferenceBackend(), device="cuda")
    ids = torch.randint(0, CONFIG.vocab_size, (CONTEXT,), device="cuda")
    cache = make_cache(ModelDtypeFormat(torch.float32), torch.float32)
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
        batch = ForwardBatch.for_step(cache, request_slots=[1], starts=[0], lengths=[280])
        errors = [relative_norm(forward(model, ids[:280], batch), expected[:280])]
        for position in range(280, CONTEXT):
            batch = ForwardBatch.for_decode(
                cache,
                request_slots=torch.tensor([1], device="cuda"),
                positions=torch.tensor([position], device="cuda"),
            )
            errors.append(relative_norm(forward(model, ids[position : position + 1], batch), expected[position:][:1]))
    assert max(errors) <= 1e-4, errors
