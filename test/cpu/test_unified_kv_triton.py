"""The Triton backend, interpreted, against the oracles; the plans that choose its launches."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import pytest
import torch

from headfit import backends
from headfit.backends.unified_kv_triton import SUPPORT, UnifiedKVTritonBackend
from headfit.kernels import sparse_mqa_triton as kernel
from headfit.kernels import sparse_mqa_triton_plan as plans
from headfit.kernels.packed_regions import MAX_SOFTMAX_SCALE
from headfit.kernels.sparse_mqa_triton import prewarm_triton, sparse_mqa_triton
from headfit.kernels.sparse_mqa_triton_plan import choose_launch, plan_splits
from headfit.kv_cache import HEAD_DIM, KVRegion, PagedPool
from headfit.testing import backend_checks
from headfit.testing.backend_checks import BF16, CHECKS, FP8, assert_bit_equal, check_case, check_reference
from headfit.testing.cases import CASES, HEAD_COUNTS, Case, constant_case, make_case
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close

if not kernel.INTERPRETED:
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; test/cpu/conftest.py must set it")

pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # NumPy's, on Inf and NaN
]

BACKEND = UnifiedKVTritonBackend(checked=True)
INVARIANT = UnifiedKVTritonBackend(batch_invariant=True)
QUICK_CASES = [case for case in CASES if case.num_tokens <= 8]  # the interpreter takes 0.2 s a token


def split_into(monkeypatch, num_splits):
    monkeypatch.setattr(kernel, "plan_splits", lambda **_: num_splits)


def test_the_quick_cases_hold_every_head_count():
    assert {case.num_heads for case in QUICK_CASES} == set(HEAD_COUNTS)
    assert len(CASES) - len(QUICK_CASES) == 1


@pytest.mark.parametrize("case", QUICK_CASES, ids=lambda case: case.id)
def test_case(case, seed):
    check_case(BACKEND, case, seed, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", [Case(num_heads=40, lengths="ragged"), Case(sinks="mixed", strided=True)], ids=lambda c: c.id
)
def test_other_query_dtypes(case, dtype, seed):
    check_case(BACKEND, case, seed, "cpu", dtype)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check):
    check(BACKEND, "cpu")


def test_index_past_the_pool():
    backend_checks.check_index_past_the_pool(BACKEND, "cpu")


def test_out():
    backend_checks.check_out(sparse_mqa_triton, "cpu")


def test_the_operator_refuses_by_itself(monkeypatch):
    monkeypatch.setattr(kernel, "_launch", None)
    backend_checks.check_wrong_arguments(sparse_mqa_triton, "cpu")


def test_the_largest_softmax_scale_is_taken():
    arguments = constant_case([1.0] * 4, torch.full((8,), float("-inf")), kv_format=FP8)
    o, _ = BACKEND.decode(**arguments | {"q": arguments["q"].to(BF16), "softmax_scale": MAX_SOFTMAX_SCALE})
    assert_close(o, torch.ones(1, 8, HEAD_DIM), FLOAT32)


@pytest.mark.parametrize("num_splits", [2, 3, 7, 32])
def test_splits_agree(num_splits, seed, monkeypatch):
    arguments = make_case(Case(num_keys=(128, 70), lengths="ragged", sinks="mixed"), seed, kv_format=FP8, dtype=BF16)
    split_into(monkeypatch, 1)
    o, lse = check_reference(BACKEND, arguments)
    split_into(monkeypatch, num_splits)
    split_o, split_lse = check_reference(BACKEND, arguments)
    assert_close(split_o, o, BF16_OUTPUT)
    assert_close(split_lse, lse, FLOAT32)


@pytest.mark.parametrize("check", [c for c in CHECKS if "rows" in c.__name__ or "corrupt" in c.__name__])
def test_check_of_several_splits(check, monkeypatch):
    split_into(monkeypatch, 3)
    check(BACKEND, "cpu")


def test_batch_invariant():
    backend_checks.check_batch_invariant(INVARIANT, "cpu", num_tokens=4)


def test_scratch_is_bounded_and_changes_nothing(seed, monkeypatch):
    arguments = make_case(Case(num_tokens=3, num_keys=(70, None)), seed, kv_format=FP8, dtype=BF16)
    whole = INVARIANT.decode(**arguments)
    launched = []
    launch = kernel._launch
    monkeypatch.setattr(kernel, "_launch", lambda *values: (launched.append(len(values[2])), launch(*values)))
    monkeypatch.setattr(kernel, "MAX_SCRATCH_BYTES", 2 * plans.BATCH_INVARIANT_SPLITS * 16 * HEAD_DIM * 4)
    assert_bit_equal(INVARIANT.decode(**arguments), whole)
    assert launched == [2, 1]


def test_pages_of_another_allocator(seed):
    """Page strides of 8-byte multiples, pages with gaps; others are refused."""
    case = Case(num_heads=8, page_sizes=(1, 3))
    arguments = make_case(case, seed, kv_format=FP8, dtype=BF16)
    for name in ("window", "compressed"):
        region = arguments[name]
        cache = region.pool.kernel_view()
        for gap in (0, 24):
            space = torch.full((len(cache), cache[0].numel() + gap + 8), 0xFF, dtype=torch.uint8)
            moved = space[:, 8:].as_strided(cache.shape, (space.stride(0), *cache.stride()[1:]), 8).copy_(cache)
            pool = PagedPool.from_packed_cache(name, moved)
            check_reference(BACKEND, arguments | {name: KVRegion(pool, region.indices, region.lengths)})
        odd = space.as_strided(cache.shape, (space.stride(0), *cache.stride()[1:]), 3)
        pool = PagedPool.from_packed_cache(name, odd)
        with pytest.raises(ValueError, match=rf"{name}\.pool: first page at .*, allowed: multiples of 8 bytes"):
            BACKEND.decode(**arguments | {name: KVRegion(pool, region.indices, region.lengths)})


@pytest.mark.parametrize("num_pages", [1, 2])
def test_the_stride_of_a_single_page_does_not_matter(num_pages):
    arguments = make_case(Case(num_heads=8), 1, kv_format=FP8, dtype=BF16)
    indices, page_size = arguments["window"].indices, arguments["window"].pool.page_size
    page = int(indices.max()) // page_size
    bytes_of_page = page_size * 584
    stored = torch.zeros(num_pages * (bytes_of_page + 1), dtype=torch.uint8)
    stored[:bytes_of_page] = arguments["window"].pool.buffer[page, :bytes_of_page]
    strides = (bytes_of_page + 1, 584, 584, 1)
    pool = PagedPool.from_packed_cache("window", stored.as_strided((num_pages, page_size, 1, 584), strides))
    of_page = torch.where(indices // page_size == page, indices - page * page_size, -1)
    assert (of_page >= 0).any()
    arguments["window"] = KVRegion(pool, of_page, arguments["window"].lengths)
    if num_pages == 1:
        check_reference(BACKEND, arguments)
    else:
        with pytest.raises(ValueError, match=rf"window\.pool: .*page stride {bytes_of_page + 1}, allowed: multiples"):
            BACKEND.decode(**arguments)


@pytest.mark.parametrize("name", ["window", "compressed"])
def test_pages_past_two_gib_are_refused(name):
    """Their keys would be read from another place: page_size * 576 wraps in 32 bits."""
    assert kernel.MAX_PAGE_SIZE * 576 < 2**31 <= (kernel.MAX_PAGE_SIZE + 1) * 576
    arguments = make_case(Case(num_heads=8), 0, kv_format=FP8, dtype=BF16)
    region = arguments[name]
    for page_size in (kernel.MAX_PAGE_SIZE, kernel.MAX_PAGE_SIZE + 1):
        pool = PagedPool.from_packed_cache(name, torch.empty(0, page_size, 1, 584, dtype=torch.uint8))
        arguments[name] = KVRegion(pool, torch.full_like(region.indices, -1), region.lengths)
        if page_size == kernel.MAX_PAGE_SIZE:
            check_reference(BACKEND, arguments)
        else:
            with pytest.raises(ValueError, match=rf"{name}\.pool: page_size 3728271, allowed: up to 3728270 by the"):
                BACKEND.decode(**arguments)


def test_strided_sinks_indices_and_lengths(seed):
    arguments = make_case(Case(num_heads=8), seed, kv_format=FP8, dtype=BF16)
    expected = BACKEND.decode(**arguments)
    arguments["attn_sink"] = arguments["attn_sink"].repeat_interleave(2)[::2]
    for name in ("window", "compressed"):
        region = arguments[name]
        indices, lengths = region.indices.repeat_interleave(2, dim=1)[:, ::2], region.lengths.repeat_interleave(3)[::3]
        assert indices.stride(1) == 2 and lengths.stride(0) == 3
        arguments[name] = KVRegion(region.pool, indices, lengths)
    assert_bit_equal(BACKEND.decode(**arguments), expected)


def test_nothing_is_launched_for_no_tokens(monkeypatch):
    monkeypatch.setattr(kernel, "_launch", None)
    for num_heads in (1, 16, 128):
        arguments = make_case(Case(num_tokens=0, num_heads=num_heads), 0, kv_format=FP8, dtype=BF16)
        o, lse = BACKEND.decode(**arguments)
        assert o.shape == (0, num_heads, HEAD_DIM) and lse.shape == (0, num_heads)


def changed(name, change):
    return lambda arguments: {name: change(arguments[name])}


WRONG = {
    "q_columns": (changed("q", lambda q: q.mT.contiguous().mT), r"q: strides .*, allowed: \(any, any, 1\)"),
    "no_heads": (lambda a: {"q": a["q"][:, :0], "attn_sink": a["attn_sink"][:0]}, r"q: no heads, allowed: at least 1"),
    "out_shape": (lambda a: {"out": a["q"][:, :4].clone()}, r"out: torch\.bfloat16 \(3, 4, 512\), allowed: q's"),
    "out_dtype": (lambda a: {"out": a["q"].float()}, r"out: torch\.float32 \(3, 8, 512\), allowed: q's"),
    "out_columns": (lambda a: {"out": a["q"].mT.contiguous().mT}, r"out: strides .*, allowed: \(any, any, 1\)"),
    "device": (changed("attn_sink", lambda s: s.to("meta")), r"attn_sink: on meta, allowed: q's cpu"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_argument_is_named(fault):
    arguments = make_case(Case(num_heads=8), 0, kv_format=FP8, dtype=BF16)
    change, message = WRONG[fault]
    with pytest.raises(ValueError, match=message):
        BACKEND.decode(**arguments | change(arguments))


def test_three_regions_are_refused():
    arguments = make_case(Case(num_heads=8), 0, kv_format=FP8, dtype=BF16)
    regions = (arguments.pop("window"), arguments.pop("compressed"))
    for wrong in ((), (*regions, regions[0])):
        with pytest.raises(ValueError, match=rf"regions: {len(wrong)} of them, allowed: 1 or 2"):
            sparse_mqa_triton(**arguments, regions=wrong)


def test_prewarm_runs_both_kernels(monkeypatch):
    run = []
    for name in ("_attend", "_merge"):
        monkeypatch.setattr(kernel, name, Recorder(getattr(kernel, name), run, name))
    for num_regions in (1, 2):
        run.clear()
        prewarm_triton(8, num_regions, "cpu")
        assert run == [("_attend", num_regions), ("_merge", None)]


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self, launched, run, name):
        self.launched, self.run, self.name = launched, run, name

    def __getitem__(self, grid):
        def launch(*values, **flags):
            self.run.append((self.name, flags.get("NUM_REGIONS")))
            self.launched[grid](*values, **flags)

        return launch


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 7, 63, 64, 65, 100, 255, 256, 1000, 4096, 2**20 + 1, 2**30 + 1])
def test_pages_of_slots_by_multiplication(page_size):
    pool = PagedPool(num_pages=0, page_size=1, kv_format=FP8, device="cpu")
    pool.page_size = page_size
    region = KVRegion(pool, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    _, _, _, magic, shift, *_ = kernel._region_arguments(region)
    assert 2**31 <= magic < 2**32
    multiples = [k * page_size for k in (1, 2, 3, 1000, (2**31 - 1) // page_size)]
    slots = {0, 1, 2, 2**31 - 1, *(m + d for m in multiples for d in (-1, 0, 1))}
    for slot in (slot for slot in slots if 0 <= slot < 2**31):
        assert (2 * slot * magic >> 32) >> shift == slot // page_size


@pytest.mark.parametrize(
    ("shared_kib", "stages"), [(228, {16: 5, 32: 5}), (164, {16: 3, 32: 3}), (100, {16: 5, 32: 3})]
)
def test_launch_holds_the_heads_and_fits(shared_kib, stages):
    for num_heads in HEAD_COUNTS:
        launch = choose_launch(num_heads, BF16, shared_kib * 1024)
        assert launch.block_h == (16 if num_heads <= 16 else 32)
        assert launch.shared_bytes + plans.RESERVED_SHARED_BYTES <= shared_kib * 1024
        assert launch.num_stages == stages[launch.block_h]
        assert choose_launch(num_heads, torch.float32, shared_kib * 1024) == plans.FLOAT32_LAUNCH


def test_plan_splits():
    def plan(num_tokens, num_keys=640, head_blocks=1, num_sms=132):
        return plan_splits(num_tokens=num_tokens, head_blocks=head_blocks, num_keys=num_keys, num_sms=num_sms)

    assert plan(1) > plan(32) > 1 == plan(264) == plan(24_576)
    assert plan(1, num_keys=0) == plan(1, num_keys=32) == 1
    assert plan(1, num_keys=10**6) <= plans.MAX_SPLITS
    assert plan(8, head_blocks=8) == plan(64)
    for num_tokens in range(1, 600, 7):
        splits = plan(num_tokens)
        assert 1 <= splits <= 20 and (splits == 1 or num_tokens * splits <= 4 * 132)
        assert plan(num_tokens) <= plan(max(1, num_tokens // 4))


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]
)
def test_ampere_and_later_are_supported(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert backends.choose("unified_kv_triton", "cuda") == ("unified_kv_triton", "asked for")


def test_earlier_architectures_are_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"backend unified_kv_triton: needs sm80 or .* or sm121, the GPU is sm75"):
        backends.choose("unified_kv_triton", "cuda")


def test_support():
    assert SUPPORT.name == BACKEND.name == "unified_kv_triton"
    assert SUPPORT.num_heads is BACKEND.supported_num_heads is None
