"""The FlashMLA backend over a stand-in for the library, which has its signature, its checks and its traps.

The stand-in runs the reference. Like the library it checks shapes against its metadata but not length values, so stale
metadata gives wrong results; it gives +inf as lse where a row has no valid key, and garbage as output there. "Row n" is
row n of the list of known faults.
"""

import dataclasses
import json
import math
import sys
import types

import pytest
import torch

from headfit import backends
from headfit.backends import flashmla
from headfit.backends.flashmla import FlashMLABackend, load_kernel, measured_num_heads
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.kernels.sparse_mqa_ref import sparse_mqa_ref
from headfit.kv_cache import HEAD_DIM, TOKEN_BYTES, KVRegion, PackedFp8Format, PagedPool
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing import backend_checks
from headfit.testing.backend_checks import BF16, CHECKS, FP8, assert_bit_equal, check_case, rows_of, with_window
from headfit.testing.cases import CASES, Case, constant_case, make_case
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close
from headfit.testing.models import hf_config
from headfit.testing.padded_backend import PaddedBackend

pytestmark = pytest.mark.usefixtures("nan_empty")
SUPPORTED = (64, 128)


@dataclasses.dataclass
class Metadata:
    """Filled by the first call, as the library's FlashMLASchedMeta is."""

    shapes: tuple | None = None
    lengths: tuple | None = None


class StandIn:
    """The module's functions, and what they were called with."""

    def __init__(self):
        self.calls, self.metadata = [], []

    def get_mla_metadata(self, *args, **kwargs):
        self.metadata.append(Metadata())
        return self.metadata[-1], None

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
        enable_batch_invariant=False,
        use_legacy=False,
        kv_format=None,
        descale_q=None,
        descale_k=None,
    ):
        assert use_legacy and is_fp8_kvcache and not causal and not enable_batch_invariant and kv_format is None
        assert block_table is None and cache_seqlens is None and num_splits is None and head_dim_v == HEAD_DIM
        num_tokens, one, num_heads, head_dim = q.shape
        assert q.dtype == BF16 and q.stride(-1) == 1 and (one, head_dim) == (1, HEAD_DIM) and num_heads in SUPPORTED
        assert num_tokens > 0, "batch size must be positive"
        assert attn_sink.dtype == torch.float32 and attn_sink.shape == (num_heads,) and attn_sink.is_contiguous()
        regions = [self._region(k_cache, indices, topk_length, num_tokens)]
        if extra_k_cache is not None:
            regions.append(self._region(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, num_tokens))
        self.calls.append({"q": q, "regions": regions, "metadata": tile_scheduler_metadata})
        regions = self._planned(tile_scheduler_metadata, num_heads, regions)
        o, lse = sparse_mqa_ref(q=q[:, 0], regions=tuple(regions), attn_sink=attn_sink, softmax_scale=softmax_scale)
        absent = lse == -math.inf
        o, lse = o.masked_fill(absent[..., None], math.nan), lse.masked_fill(absent, math.inf)
        return o[:, None], lse[:, :, None]

    @staticmethod
    def _region(cache, indices, lengths, num_tokens):
        assert cache.dtype in (torch.float8_e4m3fn, torch.uint8) and cache.shape[2:] == (1, TOKEN_BYTES)
        assert cache.stride(0) % 576 == 0
        assert indices.dtype == torch.int32 and indices.shape[:2] == (num_tokens, 1) and indices.is_contiguous()
        assert indices.shape[2] % 64 == 0 and indices.shape[2] > 0
        assert lengths.dtype == torch.int32 and lengths.shape == (num_tokens,) and lengths.is_contiguous()
        assert ((lengths >= 0) & (lengths <= indices.shape[2])).all(), "read past the row"
        pool = PagedPool.from_packed_cache("cache", cache)
        assert ((indices >= -1) & (indices < pool.num_slots)).all(), "illegal address"
        return KVRegion(pool, indices[:, 0], lengths)

    @staticmethod
    def _planned(metadata, num_heads, regions):
        shapes = (num_heads, *((tuple(r.indices.shape), r.pool.page_size) for r in regions))
        if metadata.shapes is None:
            metadata.shapes, metadata.lengths = shapes, tuple(region.lengths.clone() for region in regions)
        assert metadata.shapes == shapes, "inconsistent with sched_meta"
        return [
            KVRegion(region.pool, region.indices, torch.minimum(region.lengths, planned))
            for region, planned in zip(regions, metadata.lengths, strict=True)
        ]

    @staticmethod
    def has_legacy():
        return True


@pytest.fixture
def library(monkeypatch):
    """The stand-in as the module `flash_mla`, on a "Hopper CPU"."""
    stand_in = StandIn()
    install(monkeypatch, "flash_mla", stand_in)
    monkeypatch.setattr(flashmla, "architecture", lambda device: "sm90")
    return stand_in


def install(monkeypatch, name, functions, *without):
    module = types.ModuleType(name)
    for function in ("get_mla_metadata", "flash_mla_with_kvcache", "has_legacy"):
        if function not in without:
            setattr(module, function, getattr(functions, function))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def backend(library):
    return FlashMLABackend(device="cpu", checked=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case, backend, seed):
    check_case(PaddedBackend(backend), case, seed, "cpu")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check, backend):
    check(PaddedBackend(backend), "cpu")


def test_row_17_index_past_the_pool(backend):
    backend_checks.check_index_past_the_pool(PaddedBackend(backend), "cpu")


@pytest.mark.parametrize("kernel_heads", [(64,), (128,)], ids=str)
def test_row_01_both_widths_agree_on_the_local_heads(library, kernel_heads):
    backend = PaddedBackend(FlashMLABackend(device="cpu", num_heads=kernel_heads))
    check_case(backend, Case(num_heads=32, num_keys=(128, 133), lengths="ragged", absent=0.2), 1, "cpu")
    assert library.calls[-1]["q"].shape[2] == kernel_heads[0]


def test_row_15_rows_without_a_key(backend, library):
    arguments = constant_case([1.0] * 4, torch.full((64,), math.log(4)), kv_format=FP8)
    arguments["q"] = arguments["q"].to(BF16)
    late = with_window(arguments, indices=[[-1] * 64 + [64, 65, 66, 67]], lengths=[68])
    o, lse = backend.decode(**arguments | late)
    assert_close(o, torch.full((1, 64, HEAD_DIM), 0.5), FLOAT32)
    assert_close(lse, torch.full((1, 64), math.log(4)), FLOAT32)
    for sink in (0.0, math.inf, -math.inf):
        absent = with_window(arguments, indices=[[-1] * 64], lengths=[64]) | {"attn_sink": torch.full((64,), sink)}
        o, lse = backend.decode(**arguments | absent)
        assert not o.any() and (lse == -math.inf).all()
    assert library.calls[-1]["regions"][0].indices.shape == (1, 64)


def test_row_19_an_empty_batch_is_not_launched(backend, library):
    arguments = make_case(Case(num_tokens=0, num_heads=64), 0, kv_format=FP8, dtype=BF16)
    o, lse = backend.decode(**arguments)
    assert o.shape == (0, 64, HEAD_DIM) and o.dtype == BF16 and lse.shape == (0, 64) and lse.dtype == torch.float32
    assert library.calls == [] and library.metadata == []


def test_row_20_133_indices_become_192(backend, library):
    arguments = make_case(Case(num_heads=64, num_keys=(133, 5), strided=True), 2, kv_format=FP8, dtype=BF16)
    backend_checks.check_reference(backend, arguments)
    window, extra = library.calls[-1]["regions"]
    assert window.indices.shape == (3, 192) and extra.indices.shape == (3, 64)
    assert (window.indices[:, 133:] == -1).all() and torch.equal(window.indices[:, :133], arguments["window"].indices)


def test_an_empty_compressed_region_is_left_out(backend, library):
    backend_checks.check_reference(
        backend, make_case(Case(num_heads=64, num_keys=(64, 0)), 3, kv_format=FP8, dtype=BF16)
    )
    assert len(library.calls[-1]["regions"]) == 1


def full_then_short(backend):
    """Row 25: full lengths, then others in the same tensors; the second result must be a fresh plan's."""
    case = Case(num_tokens=4, num_heads=64, num_keys=(128, 512), page_sizes=(256, 64))
    arguments = make_case(case, 4, kv_format=FP8, dtype=BF16)
    backend_checks.check_reference(backend, arguments)
    for lengths in ([64, 512, 1, 0], [512, 3, 512, 512]):
        for name in ("window", "compressed"):
            region = arguments[name]
            region.lengths.copy_(torch.tensor(lengths).clamp(max=region.indices.shape[1]))
        backend_checks.check_reference(backend, arguments)


@pytest.mark.parametrize("inference", [False, True])
def test_row_25_metadata_is_not_reused_with_other_lengths(backend, library, inference):
    with torch.inference_mode(inference):
        full_then_short(backend)
    assert len({id(call["metadata"]) for call in library.calls}) == len(library.calls) == 3


def test_row_25_nor_within_a_step(backend, library):
    with backend.step():
        full_then_short(backend)
    assert len({id(call["metadata"]) for call in library.calls}) == 3


def test_the_stand_in_shows_stale_metadata(backend, library):
    """The test above can fail: one metadata object for both gives a wrong result."""
    stale = library.get_mla_metadata()[0]
    backend.plans._new_metadata = lambda: stale
    with pytest.raises(AssertionError, match="differs from its reference"):
        for lengths in ([3] * 4, [512] * 4):
            arguments = make_case(Case(num_tokens=4, num_heads=64, num_keys=(512, None)), 4, kv_format=FP8, dtype=BF16)
            arguments["window"].lengths.copy_(torch.tensor(lengths))
            backend_checks.check_reference(backend, arguments)


def test_layers_of_a_step_share_what_belongs_to_their_lengths(backend, library):
    case = Case(num_heads=64, num_keys=(133, 40), lengths="ragged")
    first = make_case(case, 5, kv_format=FP8, dtype=BF16)
    with backend.step():
        for layer in range(3):
            compressed = first["compressed"]
            other = KVRegion(compressed.pool, compressed.indices.roll(layer, dims=1), compressed.lengths)
            backend.decode(**first | {"compressed": other, "q": torch.randn(3, 64, HEAD_DIM).to(BF16)})
            backend.decode(**first | {"compressed": None})
    calls = library.calls
    assert len(library.metadata) == 2 and {id(call["metadata"]) for call in calls[::2]} == {id(calls[0]["metadata"])}
    for call in calls[2::2]:
        assert call["regions"][0].indices.data_ptr() == calls[0]["regions"][0].indices.data_ptr()  # prepared once
        assert not torch.equal(call["regions"][1].indices, calls[0]["regions"][1].indices)
    with backend.step():
        backend.decode(**first)
    assert len(library.metadata) == 3  # nothing outlives a step


def test_equal_lengths_in_another_tensor_are_not_taken_for_the_same(backend, library):
    arguments = make_case(Case(num_heads=64), 6, kv_format=FP8, dtype=BF16)
    with backend.step():
        backend.decode(**arguments)
        backend.decode(**arguments | with_window(arguments, lengths=arguments["window"].lengths.clone()))
        assert len(library.metadata) == 2
        with pytest.raises(RuntimeError, match="step: opened within another one"), backend.step():
            pass


def test_a_plan_from_outside_a_capture_is_not_used_inside(backend, library, monkeypatch):
    arguments = make_case(Case(num_heads=64), 6, kv_format=FP8, dtype=BF16)
    with backend.step():
        backend.decode(**arguments)
        monkeypatch.setattr(flashmla, "_capturing", lambda q: True)
        backend.decode(**arguments)
    assert len(library.metadata) == 2


def test_row_06_long_batches_run_in_bounded_launches(backend, library, monkeypatch):
    monkeypatch.setattr(flashmla, "MAX_LAUNCH_BYTES", 8 * 64 * HEAD_DIM * 2)
    arguments = make_case(Case(num_tokens=20, num_heads=64, lengths="ragged"), 7, kv_format=FP8, dtype=BF16)
    whole = backend_checks.check_reference(backend, arguments)
    assert [len(call["q"]) for call in library.calls] == [8, 8, 4]
    assert all(call["q"].numel() * 2 <= flashmla.MAX_LAUNCH_BYTES for call in library.calls)
    assert_bit_equal(backend.decode(**rows_of(arguments, slice(8, 16))), tuple(part[8:16] for part in whole))
    with backend.step():
        for _ in range(2):
            assert_bit_equal(backend.decode(**arguments), whole)
    assert len(library.metadata) == 3 + 1 + 3
    monkeypatch.undo()
    assert flashmla.MAX_LAUNCH_BYTES == 128 * 2**20


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_row_07_each_rank_has_its_own_sinks(backend, rank):
    config = DeepSeekV4Config.from_pretrained_config(hf_config([0], num_attention_heads=128, o_groups=16))
    layer = MQALayer(config, layer_id=0, backend=backend, group=AttnTPGroup(rank, 8, reduce_results=False))
    layer.attn_sink.data.copy_(0.05 * torch.arange(128))
    arguments = constant_case([1.0] * 4, layer._attn_sink_local, kv_format=FP8)
    o, _ = backend.decode(**arguments | {"q": arguments["q"].to(BF16)})
    expected = 4 / (4 + torch.exp(0.05 * (16 * rank + torch.arange(16))))
    assert o.shape[1] == 64
    assert_close(o[0, :16], expected[:, None].expand(16, HEAD_DIM), BF16_OUTPUT)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": torch.zeros(3, 16, HEAD_DIM, dtype=BF16), "attn_sink": torch.zeros(16)},
            ValueError,
            "16 heads, allowed",
        ),
        ({"q": torch.zeros(3, 64, HEAD_DIM)}, TypeError, "q: dtype torch.float32, allowed by backend flashmla"),
        ({"q": torch.zeros(3, 64, HEAD_DIM, dtype=BF16, device="meta")}, ValueError, "q: on meta, allowed: cpu"),
        ({"q": torch.zeros(3, HEAD_DIM, 64, dtype=BF16).mT}, ValueError, "contiguous last axis"),
        ({"attn_sink": torch.zeros(128)[::2]}, ValueError, "contiguous last axis"),
    ],
    ids=["heads", "dtype", "device", "q strides", "sink strides"],
)
def test_what_the_kernels_do_not_take_is_refused_before_a_launch(backend, library, changes, error, message):
    arguments = make_case(Case(num_heads=64), 8, kv_format=FP8, dtype=BF16)
    with pytest.raises(error, match=message):
        backend.decode(**arguments | changes)
    assert library.calls == []


def test_row_21_pages_that_are_not_the_packed_format_are_refused(backend, library):
    arguments = make_case(Case(num_heads=64, num_keys=(8, None)), 9, kv_format=FP8, dtype=BF16)
    for page_size, stride in ((64, 64 * TOKEN_BYTES), (2, 1729)):
        cache = torch.zeros(4 * stride, dtype=torch.uint8).as_strided(
            (4, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1)
        )
        pool = PagedPool.from_packed_cache("cache", cache)
        region = KVRegion(pool, torch.zeros(3, 8, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
        with pytest.raises(ValueError, match=f"window.pool: 4 pages, {stride} bytes apart; .* a multiple of 576"):
            backend.decode(**arguments | {"window": region})
    empty = PagedPool(num_pages=0, page_size=64, kv_format=PackedFp8Format(), device="cpu")
    region = KVRegion(empty, torch.full((3, 8), -1, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"window\.pool: 0 pages"):
        backend.decode(**arguments | {"window": region})
    assert library.calls == []


def test_row_28_batch_invariance_is_refused_at_construction(library):
    with pytest.raises(ValueError, match="batch_invariant: True, allowed by backend flashmla: False"):
        FlashMLABackend(device="cpu", batch_invariant=True)


@pytest.mark.parametrize("counts", [(), (16,), (64, 96)], ids=str)
def test_head_counts_that_the_kernels_lack_are_refused(library, counts):
    with pytest.raises(ValueError, match=r"num_heads: .*allowed: some of \(64, 128\)"):
        FlashMLABackend(device="cpu", num_heads=counts)


def test_a_device_without_the_kernels_is_refused(library, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="device: cpu is cpu, allowed by backend flashmla: a GPU of sm90 or sm100"):
        FlashMLABackend(device="cpu")
    for found in ("sm80", "sm120"):
        monkeypatch.setattr(flashmla, "architecture", lambda device, found=found: found)
        with pytest.raises(ValueError, match=f"is {found}, allowed"):
            FlashMLABackend(device="cuda")


def test_the_library_is_asked_what_it_can_do(library, monkeypatch):
    assert load_kernel().module == "flash_mla" and load_kernel().fixed == {"use_legacy": True}
    install(monkeypatch, "flash_mla", library).has_legacy = lambda: False
    with pytest.raises(ImportError, match=r"flash_mla has no legacy kernels \(has_legacy\(\) is False\)"):
        FlashMLABackend(device="cpu")
    install(monkeypatch, "flash_mla", library, "get_mla_metadata")
    with pytest.raises(ImportError, match="flash_mla has no sparse decode"):
        load_kernel()
    install(monkeypatch, "flash_mla", library).flash_mla_with_kvcache = lambda q, k_cache, indices: None
    with pytest.raises(ImportError, match="has no argument attn_sink, topk_length, extra_k_cache"):
        load_kernel()


def test_sgl_kernel_stands_in_where_flash_mla_is_absent(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setattr(flashmla, "import_module", absent("flash_mla", "sgl_kernel"))
    with pytest.raises(ImportError, match=r"flash_mla and sgl_kernel\.flash_mla are not installed"):
        load_kernel()
    monkeypatch.setattr(flashmla, "import_module", absent("flash_mla"))
    install(monkeypatch, "sgl_kernel.flash_mla", library, "has_legacy")
    assert load_kernel().module == "sgl_kernel.flash_mla"


def test_a_library_that_does_not_load_is_named_not_passed_over(library, monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(flashmla, "import_module", broken)
    with pytest.raises(ImportError, match=r"flash_mla does not load: libcudart"):
        FlashMLABackend(device="cpu")


def absent(*packages):
    def import_module(name):
        if name.partition(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return sys.modules[name]

    return import_module


def test_names_and_auto(library, monkeypatch):
    assert "flashmla" in backends.BACKEND_NAMES and backends.support("flashmla").num_heads == SUPPORTED
    with pytest.raises(ValueError, match="backend flashmla: needs a CUDA GPU, the device is cpu"):
        backends.choose("flashmla", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert backends.choose("auto", "cuda")[0] == "flashmla"
    assert backends.choose("flashmla", "cuda") == ("flashmla", "asked for")
    with pytest.raises(ValueError, match="'fp8' caches"):
        backends.choose("flashmla", "cuda", kv_format="model")
    monkeypatch.setattr(flashmla, "import_module", absent("flash_mla", "sgl_kernel"))
    name, reason = backends.choose("auto", "cuda")
    assert (
        name == "unified_kv_triton" and "not flashmla: flash_mla and sgl_kernel.flash_mla are not installed" in reason
    )
    with pytest.raises(ValueError, match="backend flashmla: flash_mla and"):
        backends.choose("flashmla", "cuda")


def test_auto_takes_exact_heads_on_hopper(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "_installed", lambda module: module == "triton")
    name, reason = backends.choose("auto", "cuda")
    assert (
        name == "unified_kv_triton"
        and "not flashmla: padded heads, slower than exact ones at 8 and 16 heads a rank" in reason
    )
    assert backends.choose("flashmla", "cuda") == ("flashmla", "asked for")


def test_the_measured_table_serves_auto_only(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(flashmla, "measured_num_heads", lambda architecture, batch: (128,))
    created = {
        (name, batch): backends.create(name, device="cuda", max_batch=batch).supported_num_heads
        for name in ("auto", "flashmla")
        for batch in (None, 64)
    }
    assert created.pop(("auto", 64)) == (128,) and set(created.values()) == {SUPPORTED}
    wrong = (
        (0, "max_batch: 0, allowed: 1 or more"),
        (1.5, "max_batch: 1.5, allowed: int"),
        (True, "True, allowed: int"),
    )
    for batch, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            backends.create("reference", max_batch=batch)


def test_measured_padding():
    """On Hopper 128 rows beat 64 at batch 64, and lose at 32, 128 and 256."""
    assert measured_num_heads("sm90", 64) == measured_num_heads("sm90", 33) == (128,)
    assert (
        measured_num_heads("sm90", 32)
        == measured_num_heads("sm90", 128)
        == measured_num_heads("sm90", 999)
        == SUPPORTED
    )
    assert measured_num_heads("sm100", 64) == SUPPORTED  # not measured
    with pytest.raises(ValueError, match="batch: 0, allowed: 1 or more"):
        measured_num_heads("sm90", 0)


def test_the_table_says_where_it_comes_from():
    path = flashmla.files("headfit.backends").joinpath("flashmla_padding.json")
    for architecture, entry in json.loads(path.read_text())["architectures"].items():
        assert architecture in flashmla.SUPPORT.architectures
        assert all(entry[name] for name in ("gpu", "torch", "flash_mla", "commit", "date", "command"))
        assert all(set(row["us"]) == {"64", "128"} and min(row["us"].values()) > 0 for row in entry["rows"])
