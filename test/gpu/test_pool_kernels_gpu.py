"""`store_kv` and `prepare_q` as Triton kernels on a GPU: the CPU's cases, wide offsets, CUDA graphs, the layer."""

import logging
import math

import pytest
import torch

from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.forward_batch import ForwardBatch
from headfit.kernels import prepare_q_triton as prepare_q_module
from headfit.kernels import store_kv_triton as store_kv_module
from headfit.kernels.prepare_q_ref import prepare_q_ref
from headfit.kernels.prepare_q_triton import prepare_q_triton
from headfit.kernels.store_kv_ref import store_kv_ref
from headfit.kernels.store_kv_triton import store_kv_triton
from headfit.kv_cache import HEAD_DIM, PackedFp8Format, PagedPool
from headfit.layers.input_kernels import choose_input_kernels
from headfit.model_cache import ModelCache
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.cases import poisoned_pool
from headfit.testing.measure import BF16_OUTPUT, assert_close
from headfit.testing.models import hf_config
from headfit.testing.prepare_q_cases import PREPARE_CASES, PrepareCase, check_prepare_case, make_prepare_case
from headfit.testing.store_kv_cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    STORE_CASES,
    StoreCase,
    amax_weights,
    angles,
    check_store_case,
    check_stored,
    edge_case,
    make_store_case,
    on_device,
    rounding_weight,
    row_bytes,
    short,
)
from headfit.testing.timing import capture, count_launches

every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=short)


@pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.id)
def test_store_cases(case):
    for seed in range(4):
        check_store_case(case, seed, store_kv_triton, "cuda")


@pytest.mark.parametrize("case", PREPARE_CASES, ids=lambda case: case.id)
def test_prepare_cases(case):
    for seed in range(4):
        check_prepare_case(case, seed, prepare_q_triton, "cuda")


@every_dtype
def test_scale_and_rounding_at_and_beside_every_border(dtype):
    for weight in (*amax_weights(dtype), rounding_weight(dtype)):
        arguments = edge_case(weight, dtype, "cuda")
        store_kv_triton(**arguments)
        check_stored(arguments, exact=True)


@every_dtype
def test_bytes_equal_the_packer_on_the_cpu(dtype):
    """Exact rows on the GPU against the reference on the CPU, which no GPU arithmetic touches."""
    arguments = make_store_case(StoreCase(dtype=dtype, num_tokens=300, page_size=64), 1)
    pool = poisoned_pool(PackedFp8Format(), arguments["pool"].num_pages, 64, "cuda")
    arguments["eps"] = 2.0**-20
    # One square of 512 * 4**k: a mean of 4**k, whose root any hardware finds; eps is lost beside it.
    arguments["kv"] = torch.full((300, HEAD_DIM), 16.0, dtype=dtype)
    arguments["kv"][:, ::2] *= -1
    arguments["kv"][::7] = 0.0
    store_kv_triton(**on_device(arguments, "cuda") | {"pool": pool})
    store_kv_ref(**arguments)
    written = arguments["slots"][arguments["slots"] >= 0]
    got, expected = row_bytes(pool, written.cuda()), row_bytes(arguments["pool"], written)
    assert all(torch.equal(part.cpu(), other) for part, other in zip(got, expected, strict=True))


def test_row_18_page_offsets_past_two_gib():
    """256-token pages of 149,760 bytes: a 32-bit offset wraps at page 14,340; slots that fit in 32 bits and 64."""
    pool = PagedPool(num_pages=14_341, page_size=256, kv_format=PackedFp8Format(), device="cuda")
    kv = torch.ones(2, HEAD_DIM, dtype=BF16, device="cuda")
    no_turn = (torch.ones(2, 32, device="cuda"), torch.zeros(2, 32, device="cuda"))
    weight = torch.full((HEAD_DIM,), 3.0, device="cuda")
    for dtype in (torch.int32, torch.int64):
        slots = torch.tensor([3_671_040, 3_671_295], dtype=dtype, device="cuda")
        pool.buffer[-2].zero_()
        store_kv_triton(kv=kv, norm_weight=weight, eps=0.0, cos_sin=no_turn, slots=slots, pool=pool)
        assert (pool.load(slots) == 3).all()
        assert not pool.buffer[0].any() and not pool.buffer[14_339].any() and not pool.buffer[-1].any()


def test_query_offsets_past_two_gib():
    """33,000 tokens of 128 heads: 2.16e9 elements, 4.3 GB."""
    num_tokens, num_heads = 33_000, 128
    q = torch.zeros(num_tokens, num_heads, HEAD_DIM, dtype=BF16, device="cuda")
    out = torch.full_like(q, math.nan)
    q[-1] = torch.randint(-100, 101, (num_heads, HEAD_DIM), device="cuda").to(BF16)
    cos_sin = on_device({"cos_sin": angles(num_tokens, torch.Generator().manual_seed(0))}, "cuda")["cos_sin"]
    prepare_q_triton(q=q, eps=EPS, cos_sin=cos_sin, out=out)
    expected = torch.empty_like(q[-1:])
    prepare_q_ref(q=q[-1:], eps=EPS, cos_sin=tuple(part[-1:] for part in cos_sin), out=expected)
    assert expected.any() and torch.equal(out[-1:], expected)
    assert not out[:-1].any()


def test_store_is_captured():
    arguments = on_device(make_store_case(StoreCase(num_tokens=16), 0, "cuda"), "cuda")
    store_kv_triton(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv_triton(**arguments)
    later = on_device(make_store_case(StoreCase(num_tokens=16), 1, "cuda"), "cuda")
    for name in ("kv", "slots"):
        arguments[name].copy_(later[name])
    arguments["pool"].buffer.fill_(0xFF)
    graph.replay()
    check_stored(arguments, exact=True)


def test_prepare_is_captured():
    arguments = on_device(make_prepare_case(PrepareCase(), 0), "cuda")
    prepare_q_triton(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_q_triton(**arguments)

    def replays(*, q, cos_sin, out, eps):
        arguments["q"].copy_(q)
        for part, new in zip(arguments["cos_sin"], cos_sin, strict=True):
            part.copy_(new)
        arguments["out"].fill_(math.nan)
        graph.replay()
        out.copy_(arguments["out"])

    check_prepare_case(PrepareCase(), 1, replays, "cuda")


def binaries(kernel) -> int:
    return len(kernel.device_caches[torch.cuda.current_device()][0])


def test_one_binary_whatever_the_sizes():
    store = store_kv_module._store_kv
    store_kv_triton(**on_device(make_store_case(StoreCase(), 0, "cuda"), "cuda"))
    before = binaries(store)
    for num_tokens, page_size in ((1, 1), (16, 16), (17, 64), (64, 2), (5, 256)):
        case = StoreCase(num_tokens=num_tokens, page_size=page_size, dropped=0)
        arguments = on_device(make_store_case(case, 0, "cuda"), "cuda")
        store_kv_triton(**arguments)
        wide = torch.zeros(num_tokens, HEAD_DIM + 7, dtype=BF16, device="cuda")
        store_kv_triton(**arguments | {"kv": wide[:, :HEAD_DIM]})
    assert before and binaries(store) == before

    prepare = prepare_q_module._prepare_q
    prepare_q_triton(**on_device(make_prepare_case(PrepareCase(), 0), "cuda"))
    before = binaries(prepare)
    for num_tokens, num_heads, kernel_heads in ((1, 1, 1), (16, 16, 64), (17, 8, 8), (3, 13, 16)):
        case = PrepareCase(num_tokens=num_tokens, num_heads=num_heads, num_kernel_heads=kernel_heads)
        prepare_q_triton(**on_device(make_prepare_case(case, 0), "cuda"))
    assert before and binaries(prepare) == before


CONFIG = DeepSeekV4Config.from_pretrained_config(hf_config((0, 4, 128), index_topk=8))
LENGTHS = [126, 5, 250]


def make_layer(layer_id: int, *, fused: bool | None, supported=None) -> MQALayer:
    backend = ReferenceBackend(supported_num_heads=supported)
    layer = MQALayer(CONFIG, layer_id=layer_id, backend=backend, device="cuda", fused=fused)
    generator = torch.Generator("cuda").manual_seed(layer_id)
    for name, param in layer.named_parameters():
        scale = 1.0 if param.dim() == 1 else param.shape[-1] ** -0.5
        param.data.copy_(scale * torch.randn(param.shape, generator=generator, device="cuda") + ("norm" in name))
    return layer


def make_cache() -> ModelCache:
    sizes = {"max_seqs": len(LENGTHS), "max_context": 300, "max_chunk": 300}
    return ModelCache(CONFIG, **sizes, kv_format=PackedFp8Format(), dtype=BF16, device="cuda")


def steps(cache):
    """A prompt and three decode steps."""
    yield ForwardBatch.for_step(cache, request_slots=[0, 1, 2], starts=[0, 0, 0], lengths=LENGTHS)
    for step in range(3):
        positions = torch.tensor([length + step for length in LENGTHS], device="cuda")
        yield ForwardBatch.for_decode(cache, request_slots=torch.arange(3, device="cuda"), positions=positions)


@pytest.mark.parametrize("supported", [None, (64,)], ids=["exact", "padded"])
@pytest.mark.parametrize("layer_id", [0, 1, 2], ids=["window", "ratio4", "ratio128"])
@torch.inference_mode()
def test_fused_layer_equals_the_reference(layer_id, supported, caplog):
    choose_input_kernels.cache_clear()
    caplog.set_level(logging.INFO, logger="headfit.layers.input_kernels")
    outputs = []
    for fused in (None, False):
        layer, cache = make_layer(layer_id, fused=fused, supported=supported), make_cache()
        torch.manual_seed(5)
        inputs = (torch.randn(batch.num_tokens, CONFIG.hidden_size, device="cuda").to(BF16) for batch in steps(cache))
        batches = zip(inputs, steps(cache), strict=True)
        outputs.append(torch.cat([layer(x, batch.positions, batch) for x, batch in batches]))
    assert ["by Triton kernels" in message for message in caplog.messages] == [True, False]
    assert_close(*outputs, BF16_OUTPUT)


def captured_kernels(layer: MQALayer) -> int:
    cache = make_cache()
    x = torch.randn(3, CONFIG.hidden_size, device="cuda").to(BF16)
    positions = torch.zeros(3, dtype=torch.int64, device="cuda")
    batch = ForwardBatch.for_decode(cache, request_slots=torch.arange(3, device="cuda"), positions=positions)
    layer(x, positions, batch)
    return count_launches(capture(lambda: layer(x, positions, batch)))


@torch.inference_mode()
def test_fused_step_has_fewer_kernels_and_none_for_padding():
    fused = captured_kernels(make_layer(0, fused=True))
    assert captured_kernels(make_layer(0, fused=True, supported=(64,))) == fused
    assert captured_kernels(make_layer(0, fused=False)) > fused + 20
