"""Padding is invisible: whatever head count the kernel runs and its padding heads hold, the rank's heads agree.

"Row n" is row n of the list of known faults.
"""

import math

import pytest
import torch

from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.head_layout import plan_heads
from headfit.kv_cache import HEAD_DIM, ModelDtypeFormat
from headfit.layers.linear import ParallelLinear, dequantize_activation
from headfit.model_cache import ModelCache
from headfit.models.deepseek_v4 import FP8_LINEARS, MQALayer
from headfit.testing.cases import KV_FORMATS, Case, constant_case, make_case, reference_float64
from headfit.testing.measure import FLOAT32, Tolerance, assert_close
from headfit.testing.models import hf_config

pytestmark = pytest.mark.usefixtures("nan_empty")

# Matrices of other shapes are summed in another order: a few float32 roundings of 2**-24.
OTHER_SHAPE = Tolerance(absolute=1e-6, relative=1e-6, cosine=1e-12)
FP8 = KV_FORMATS["fp8"]
both_formats = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
every_ratio = pytest.mark.parametrize("ratio", [0, 4, 128])


class Watched(ReferenceBackend):
    """Keeps the queries and results of its calls; writes `poison` into the padding heads first, where it is given."""

    def __init__(self, *, supported=None, poison=None, num_local_heads=None):
        super().__init__(supported_num_heads=supported, checked=True)
        self.poison, self.num_local_heads = poison, num_local_heads
        self.queries, self.outputs = [], []

    def decode(self, *, q, **arguments):
        if self.poison is not None:
            q[:, self.num_local_heads :] = self.poison
        o, lse = super().decode(q=q, **arguments)
        self.queries.append(q)
        self.outputs.append(o)
        return o, lse


def make_config(ratio):
    return DeepSeekV4Config.from_pretrained_config(hf_config([ratio], index_topk=8, sliding_window=16, o_lora_rank=24))


def whole_layer(ratio, backend, **options):
    """One rank that owns all heads, every tensor random."""
    layer = MQALayer(make_config(ratio), layer_id=0, backend=backend, dtype=torch.float32, **options)
    for name, tensor in layer.named_parameters():
        scale = 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        tensor.copy_(scale * torch.randn(tensor.shape) + ("norm" in name))
    return layer


def part_of(whole, rank, size, backend, fp8_linears=frozenset()):
    """The same layer as `rank` of `size` holds it; its output is a partial sum."""
    group = AttnTPGroup(rank, size, reduce_results=False)
    config = make_config(whole.compress_ratio)
    layer = MQALayer(config, layer_id=0, backend=backend, group=group, dtype=torch.float32, fp8_linears=fp8_linears)
    sources = dict(whole.named_modules())
    for path, module in layer.named_modules():
        slices = module.tensor_slices() if isinstance(module, ParallelLinear) else {}
        for name, tensor in module.named_parameters(recurse=False):
            source = getattr(sources[path], name)
            tensor.copy_(source[slices[name][1]] if name in slices else source)
    return layer


def run(layer, tokens, kv_format=None):
    """Two sequences, prompts of 131 and 5 tokens and then one token each: the outputs of both steps in one tensor.

    The prompts complete entries of both ratios, and the step one of ratio 4.
    """
    kv_format = kv_format or ModelDtypeFormat(torch.float32)
    config = make_config(layer.compress_ratio)
    cache = ModelCache(
        config, max_seqs=2, max_context=160, max_chunk=131, kv_format=kv_format, dtype=torch.float32, device="cpu"
    )
    prompt = ForwardBatch.for_step(cache, request_slots=[0, 1], starts=[0, 0], lengths=[131, 5])
    step = ForwardBatch.for_decode(cache, request_slots=torch.tensor([0, 1]), positions=torch.tensor([131, 5]))
    parts = zip(tokens.split([136, 2]), (prompt, step), strict=True)
    return torch.cat([layer(x, batch.positions, batch) for x, batch in parts])


@pytest.fixture
def tokens():
    return torch.randn(138, 64)


@both_formats
@every_ratio
def test_kernel_head_count_is_invisible(ratio, kv_format, tokens):
    exact = Watched()
    whole = whole_layer(ratio, exact)
    expected = run(whole, tokens, kv_format)
    assert expected.isfinite().all()
    for width in (16, 64, 128):
        backend = Watched(supported=(width,))
        layer = part_of(whole, 0, 1, backend)
        assert_close(run(layer, tokens, kv_format), expected, OTHER_SHAPE)
        for o, exact_o in zip(backend.outputs, exact.outputs, strict=True):
            assert o.shape[1] == width
            assert_close(o[:, :16], exact_o, OTHER_SHAPE)


@every_ratio
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_row_02_padding_queries_may_hold_anything(size, ratio, tokens):
    whole = whole_layer(ratio, ReferenceBackend())
    rank, num_local_heads = size - 1, 16 // size
    unwritten = Watched(supported=(64,))
    expected = run(part_of(whole, rank, size, unwritten), tokens)
    assert all(q[:, num_local_heads:].isnan().all() for q in unwritten.queries)  # the layer leaves them as they come
    assert expected.isfinite().all()
    for poison in (0.0, math.nan, math.inf, -math.inf):
        backend = Watched(supported=(64,), poison=poison, num_local_heads=num_local_heads)
        assert torch.equal(run(part_of(whole, rank, size, backend), tokens), expected)
        for o, other in zip(backend.outputs, unwritten.outputs, strict=True):
            assert torch.equal(o[:, :num_local_heads], other[:, :num_local_heads])


@every_ratio
@pytest.mark.parametrize("supported", [None, (64, 128)], ids=["exact", "padded"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_partial_outputs_of_all_ranks_sum_to_the_whole(size, supported, ratio, tokens):
    whole = whole_layer(ratio, ReferenceBackend())
    expected = run(whole, tokens)
    backend = ReferenceBackend(supported_num_heads=supported)
    partials = [run(part_of(whole, rank, size, backend), tokens) for rank in range(size)]
    assert_close(sum(partials), expected, FLOAT32)
    assert not torch.equal(partials[0], partials[1])


@pytest.mark.parametrize("size", [2, 8])
def test_fp8_parts_that_start_inside_a_block_sum_to_the_whole(size, tokens):
    """Of 8 ranks, one holds rows 120 to 143 of wo_a and such columns of wo_b: parts of two blocks of 128."""
    fp8_linears = frozenset(FP8_LINEARS) - {"indexer.wq_b"}
    whole = whole_layer(0, ReferenceBackend(), fp8_linears=fp8_linears)
    partials = [run(part_of(whole, rank, size, ReferenceBackend(), fp8_linears), tokens) for rank in range(size)]
    assert_close(sum(partials), run(whole, tokens), FLOAT32)


def test_row_07_wrong_ranks_sinks_change_the_output(tokens):
    """The check above would see another rank's sinks."""
    whole = whole_layer(0, ReferenceBackend())
    layer = part_of(whole, 1, 8, ReferenceBackend())
    expected = run(layer, tokens)
    layer.attn_sink.copy_(layer.attn_sink.roll(2))
    with pytest.raises(AssertionError, match="differs from its reference"):
        assert_close(run(layer, tokens), expected, FLOAT32)


@both_formats
def test_row_01_32_heads_padded_to_64_and_to_128_agree(kv_format, seed):
    arguments = make_case(Case(num_heads=128), seed, kv_format=kv_format)
    expected, expected_lse = reference_float64(**arguments)
    for width in (32, 64, 128):
        sizes = {"q": arguments["q"][:, :width], "attn_sink": arguments["attn_sink"][:width]}
        o, lse = ReferenceBackend(supported_num_heads=(width,)).decode(**arguments | sizes)
        assert_close(o[:, :32], expected[:, :32], FLOAT32)
        assert_close(lse[:, :32], expected_lse[:, :32], FLOAT32)


@both_formats
@pytest.mark.parametrize("num_local_heads", [8, 16, 32])
def test_row_02_padding_heads_of_a_call_may_hold_anything(num_local_heads, kv_format, seed):
    arguments = make_case(Case(num_heads=64, lengths="ragged"), seed, kv_format=kv_format)
    results = []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        q, sinks = arguments["q"].clone(), arguments["attn_sink"].clone()
        q[:, num_local_heads:], sinks[num_local_heads:] = poison, poison
        o, lse = ReferenceBackend().decode(**arguments | {"q": q, "attn_sink": sinks})
        results.append((o[:, :num_local_heads], lse[:, :num_local_heads]))
    assert results[0][0].isfinite().all()
    assert all(torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1]) for o, lse in results)


@both_formats
@pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 24, 40, 48, 63, 64, 65, 100, 127])
def test_row_04_odd_head_counts_fit_a_padding_kernel(num_heads, kv_format, seed):
    width = plan_heads(num_heads=num_heads, attn_tp_size=1, attn_tp_rank=0, supported=(64, 128)).kernel_num_heads
    assert width == (64 if num_heads <= 64 else 128)
    arguments = make_case(Case(num_heads=num_heads, num_keys=(9, 5)), seed, kv_format=kv_format)
    q = torch.full((3, width, HEAD_DIM), math.nan)
    q[:, :num_heads] = arguments["q"]
    sinks = torch.cat([arguments["attn_sink"], torch.full((width - num_heads,), math.nan)])
    o, lse = ReferenceBackend(supported_num_heads=(64, 128)).decode(**arguments | {"q": q, "attn_sink": sinks})
    expected_o, expected_lse = reference_float64(**arguments)
    assert_close(o[:, :num_heads], expected_o, FLOAT32)
    assert_close(lse[:, :num_heads], expected_lse, FLOAT32)


def test_unsupported_head_count_names_the_supported_ones():
    arguments = constant_case([1.0], torch.zeros(16), kv_format=FP8)
    with pytest.raises(ValueError, match=r"q: 16 heads, allowed by backend reference: \(64, 128\)"):
        ReferenceBackend(supported_num_heads=(64, 128)).decode(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_id": -1}, "layer_id: -1, allowed: 0 to 0"),
        ({"layer_id": 1}, "layer_id: 1, allowed: 0 to 0"),
        ({"fp8_linears": frozenset({"wq_c", "wkv"})}, r"fp8_linears: \['wq_c'\], allowed: .*'wq_a'"),
        ({"group": AttnTPGroup(0, 3)}, "attn_tp_size 3 .* 16 and o_groups 8; allowed attn_tp_size: 1, 2, 4, 8"),
        ({"group": AttnTPGroup(0, 16)}, "attn_tp_size 16 .* allowed attn_tp_size: 1, 2, 4, 8"),
        ({"backend": ReferenceBackend(supported_num_heads=(8,))}, "16 local heads .* supported: 8"),
    ],
)
def test_layer_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MQALayer(make_config(0), **{"layer_id": 0, "backend": ReferenceBackend()} | options)


def quantized(num_tokens, scales=1):
    values = torch.randn(num_tokens, 64).to(torch.float8_e4m3fn)
    return values, torch.rand(num_tokens, scales) + 0.5


def one_step(layer, x, positions=None, x_quant=None):
    config, kv_format = make_config(layer.compress_ratio), ModelDtypeFormat(torch.float32)
    cache = ModelCache(config, max_seqs=1, max_context=8, max_chunk=8, kv_format=kv_format, dtype=torch.float32)
    batch = ForwardBatch.for_step(cache, request_slots=[0], starts=[0], lengths=[3])
    return layer(x, batch.positions if positions is None else positions, batch, x_quant)


@pytest.mark.parametrize(
    ("fp8", "arguments", "message"),
    [
        ((), {"x": torch.zeros(4, 64)}, r"x: shape \(4, 64\), allowed: \(3, 64\)"),
        ((), {"x": torch.zeros(3, 63)}, r"x: shape \(3, 63\), allowed: \(3, 64\)"),
        ((), {"x": torch.zeros(1, 3, 64)}, r"x: shape \(1, 3, 64\), allowed: \(3, 64\)"),
        ((), {"positions": torch.zeros(2, dtype=torch.int64)}, r"positions: shape \(2,\), allowed: \(3,\)"),
        ((), {"x_quant": quantized(3)}, "x_quant: given, but neither wq_a nor wkv"),
        (("wq_b", "wo_b"), {"x_quant": quantized(3)}, "x_quant: given, but neither wq_a nor wkv"),
        (
            ("wq_a",),
            {"x_quant": quantized(2)},
            r"x_quant: shapes \(2, 64\) and \(2, 1\), allowed: \(3, 64\) and \(3, 1\)",
        ),
        (("wkv",), {"x_quant": quantized(3, scales=2)}, r"x_quant: shapes .*\(3, 2\), allowed: \(3, 64\) and \(3, 1\)"),
    ],
)
def test_input_that_does_not_fit_is_refused(fp8, arguments, message):
    layer = whole_layer(0, ReferenceBackend(), fp8_linears=frozenset(fp8))
    with pytest.raises(ValueError, match=message):
        one_step(layer, **{"x": torch.zeros(3, 64)} | arguments)


def test_x_quant_takes_the_place_of_x():
    layer = whole_layer(0, ReferenceBackend(), fp8_linears=frozenset({"wq_a", "wkv"}))
    x_quant = quantized(3)
    expected = one_step(layer, dequantize_activation(x_quant, torch.float32))
    assert torch.equal(one_step(layer, torch.full((3, 64), math.nan), x_quant=x_quant), expected)
