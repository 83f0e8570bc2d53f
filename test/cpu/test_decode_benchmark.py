"""benchmark/decode_kernel.py without a GPU: its inputs, checks, peer call and command line."""

import importlib
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headfit import kv_cache
from headfit.kernels.sparse_mqa_ref import sparse_mqa_ref
from headfit.kv_cache import KVRegion, PagedPool
from headfit.testing.cases import reference_float64
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close
from headfit.testing.timing import ColdTimer, Timing, copy_bandwidth, null_launch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
bench = importlib.import_module("decode_kernel")
data = importlib.import_module("decode_kernel_inputs")

ROW_FIELDS = ["keys_window", "keys_extra", "compress_ratio", "batch", "num_heads", "backend", "kernel_num_heads"]
ROW_FIELDS += ["us_median", "us_min", "us_max", "floor_us", "rel_err"]
# Small enough for a CPU: a window with 256-token pages and a region of 2-token pages.
SMALL = data.Keys(8, 12, 128, 2)


@pytest.fixture
def pools():
    sizes = {page_size: 2**10 for _, page_size in SMALL.regions}
    return {page_size: data.random_packed_pool(num_slots, page_size, "cpu") for page_size, num_slots in sizes.items()}


def fake_timer(launches):
    for launch in launches:
        launch()
    return Timing(us_median=2.0, us_min=1.0, us_max=float(len(launches)))


def right(*, q, regions, attn_sink, softmax_scale):
    return sparse_mqa_ref(q=q, regions=regions, attn_sink=attn_sink, softmax_scale=softmax_scale)


# --- inputs


@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_random_pool_owns_finite_keys_only(page_size):
    pool = data.random_packed_pool(2**9, page_size, "cpu")
    keys = pool.load(torch.arange(pool.num_slots))
    assert pool.num_slots == 2**9 and pool.find_corrupt_slots(torch.arange(pool.num_slots)) == []
    assert keys.isfinite().all() and 0.8 < keys.square().mean().sqrt() < 1.25
    assert len(keys.unique(dim=0)) == pool.num_slots
    middle, end = page_size * kv_cache.DATA_BYTES, page_size * kv_cache.TOKEN_BYTES
    codes = pool.buffer[: pool.num_pages, :middle].unflatten(1, (page_size, -1))[..., : kv_cache.NOPE_BYTES]
    assert len(codes.unique()) == 254 and not (codes & 0x7F == 0x7F).any()
    scales = pool.buffer[: pool.num_pages, middle:end].unflatten(1, (page_size, -1))
    assert scales[..., : kv_cache.NUM_GROUPS].unique().tolist() == [118, 119, 120, 121]
    # What no token owns: the eighth scale byte, the end of the page and the spare page.
    assert (scales[..., kv_cache.NUM_GROUPS :] == 0xFF).all()
    assert (pool.buffer[:, end:] == 0xFF).all() and (pool.buffer[pool.num_pages :] == 0xFF).all()


def test_timed_inputs_share_no_slot_and_are_full(pools):
    launches = data.num_launches(SMALL, batch=4, pools=pools)
    assert launches == 1024 // (4 * 12)
    inputs = data.draw_inputs(SMALL, batch=4, launches=launches, pools=pools)
    for region, num_keys in zip(range(2), (8, 12), strict=True):
        indices = torch.stack([one.regions[region].indices for one in inputs])
        assert indices.shape == (launches, 4, num_keys) and indices.dtype == torch.int32
        assert indices.unique().numel() == indices.numel() and indices.min() >= 0
        assert all(one.regions[region].lengths.tolist() == [num_keys] * 4 for one in inputs)
    assert not torch.equal(inputs[0].q, inputs[1].q)


def test_checked_inputs_are_uneven_and_every_row_has_a_key(pools):
    (inputs,) = data.draw_inputs(SMALL, batch=32, launches=1, pools=pools, uneven=True)
    for region in inputs.regions:
        assert len(region.lengths.unique()) > 3 and region.lengths.min() >= 1
        assert (region.indices == -1).any() and (region.indices[:, 0] >= 0).all()


@pytest.mark.parametrize(
    ("keys", "batch", "launches"),
    [
        *(("128", 1, 128), ("128", 64, 128), ("128", 256, 32), ("128+512@4", 64, 42), ("128+512@4", 256, 16)),
        *(("128+1024@4", 128, 16), ("128+1024@4", 256, 8), ("128+1024@128", 256, 8), ("128+1024@128", 1024, 2)),
    ],
)
def test_launches_of_a_graph_fill_it_as_far_as_the_pools_reach(keys, batch, launches):
    full = {page_size: SimpleNamespace(num_slots=slots) for page_size, slots in data.POOL_SLOTS.items()}
    assert data.num_launches(data.KEYS[keys], batch=batch, pools=full) == launches


@pytest.mark.parametrize("page_size", data.POOL_SLOTS)
def test_pools_stay_under_two_gib(page_size):
    num_pages = data.POOL_SLOTS[page_size] // page_size
    assert (num_pages + 1) * kv_cache.PackedFp8Format().page_stride(page_size) < 2**31


def test_float64_reference_agrees_with_the_one_token_at_a_time_one(pools):
    (inputs,) = data.draw_inputs(SMALL, batch=5, launches=1, pools=pools, uneven=True)
    sink = torch.randn(3)
    tokens = torch.tensor([4, 0, 2])
    window, compressed = inputs.regions
    arguments = inputs.arguments(sink)
    arguments.pop("regions")
    expected = reference_float64(**arguments, window=window, compressed=compressed)
    short = data.Inputs(inputs.q[:, :3], inputs.regions)
    for out, ref in zip(data.reference_float64(short, sink, tokens), expected, strict=True):
        assert out.dtype == torch.float64
        assert_close(out, ref[tokens], FLOAT32)


# --- checks and rows


def measure(pools, kernels, heads=(2, 4), batch=3):
    problem = data.make_problem(SMALL, batch=batch, pools=pools)
    how = {"heads": heads, "timer": fake_timer, "copy_gb_per_s": 4000.0}
    return bench.measure_shape(SMALL, batch=batch, kernels=kernels, problem=problem, **how)


def test_rows_hold_the_fields_of_the_result(pools):
    rows = measure(pools, [bench.Kernel("unified_kv_triton", lambda: right)])
    assert [list(one) for one in rows] == [ROW_FIELDS] * 2
    assert [(one["num_heads"], one["kernel_num_heads"], one["backend"]) for one in rows] == [
        (2, 2, "unified_kv_triton"),
        (4, 4, "unified_kv_triton"),
    ]
    launches = 1024 // (3 * 12)
    for one in rows:
        assert (one["us_median"], one["us_min"], one["us_max"]) == (2.0, 1.0, float(launches))
        assert 0 < one["rel_err"] < bench.ERROR_LIMIT
        assert one["floor_us"] == round(20 * 3 * 584 / 4000 / 1e3, 4)
        assert (one["keys_window"], one["keys_extra"], one["compress_ratio"], one["batch"]) == (8, 12, 128, 3)


def ignores_absent(**inputs):
    """Reads the last slot for -1."""
    regions = tuple(KVRegion(r.pool, r.indices % r.pool.num_slots, r.lengths) for r in inputs.pop("regions"))
    return right(**inputs, regions=regions)


def ignores_lengths(**inputs):
    regions = tuple(
        KVRegion(r.pool, r.indices, torch.full_like(r.lengths, r.indices.shape[1])) for r in inputs.pop("regions")
    )
    return right(**inputs, regions=regions)


def wrong_lse(**inputs):
    o, lse = right(**inputs)
    return o, lse + 0.5


def nan_output(**inputs):
    o, lse = right(**inputs)
    return o.index_fill(0, torch.tensor([1]), math.nan), lse


@pytest.mark.parametrize("operator", [ignores_absent, ignores_lengths, wrong_lse, nan_output])
def test_wrong_kernels_get_no_time(pools, operator, capsys):
    calls = []

    def counted(**inputs):
        calls.append(1)
        return operator(**inputs)

    rows = measure(pools, [bench.Kernel("sparse_mqa_cuda", lambda: counted)], heads=(2,), batch=32)
    assert len(calls) == 1
    assert [rows[0][name] for name in ("us_median", "us_min", "us_max")] == [None] * 3
    assert rows[0]["rel_err"] is None if operator is nan_output else rows[0]["rel_err"] > bench.ERROR_LIMIT
    assert "RED: {'keys_window': 8" in capsys.readouterr().out
    json.dumps(rows, allow_nan=False)


def test_a_launch_that_goes_wrong_in_the_graph_only_is_red(pools):
    state = {"calls": 0}

    def disturbed(**inputs):
        state["calls"] += 1
        o, lse = right(**inputs)
        return (o, lse) if state["calls"] < 5 else (o * 1.01, lse)

    (one,) = measure(pools, [bench.Kernel("sparse_mqa_cuda", lambda: disturbed)], heads=(2,))
    assert one["us_median"] is None and one["rel_err"] > bench.ERROR_LIMIT


def fake_flash_mla(calls):
    """The peer's interface, its arguments checked, over the reference."""

    def with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *, softmax_scale, is_fp8_kvcache,
        indices, attn_sink, topk_length, use_legacy, extra_k_cache=None, extra_indices_in_kvcache=None,
        extra_topk_length=None,
    ):  # fmt: skip
        calls.append((tile_scheduler_metadata, q.shape[2]))
        assert block_table is None and cache_seqlens is None and head_dim_v == 512 and use_legacy and is_fp8_kvcache
        assert q.dim() == 4 and q.shape[1] == 1 and q.is_contiguous() and q.shape[2] in (64, 128)
        lengths = tile_scheduler_metadata.setdefault("lengths", topk_length.clone())
        assert torch.equal(lengths, topk_length), "metadata reused for other lengths"
        regions = []
        for cache, rows, length in (
            (k_cache, indices, topk_length),
            (extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
        ):
            if cache is not None:
                assert cache.dtype == torch.float8_e4m3fn and rows.shape[:2] == q.shape[:2]
                pool = PagedPool.from_packed_cache("cache", cache)
                regions.append(KVRegion(pool, rows[:, 0], length))
        o, lse = right(q=q[:, 0], regions=tuple(regions), attn_sink=attn_sink, softmax_scale=softmax_scale)
        return o[:, None], lse[..., None]

    return SimpleNamespace(
        get_mla_metadata=lambda: ({}, None), flash_mla_with_kvcache=with_kvcache, __version__="1.0.0"
    )


@pytest.mark.parametrize("keys", [SMALL, data.Keys(8)], ids=["two regions", "window only"])
def test_peer_is_timed_once_a_padding_and_written_for_every_head_count(pools, monkeypatch, keys):
    calls = []
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla(calls))
    problem = data.make_problem(keys, batch=32, pools=pools)
    (peer,) = bench.load_kernels(["flashmla"], None)
    how = {"heads": (8, 64, 100), "timer": fake_timer, "copy_gb_per_s": 4000.0}
    rows = bench.measure_shape(keys, batch=32, kernels=[peer], problem=problem, **how)
    assert [(one["num_heads"], one["kernel_num_heads"]) for one in rows] == [
        *((8, 64), (64, 64), (8, 128), (64, 128), (100, 128))
    ]
    assert all(one["us_median"] == 2.0 and one["backend"] == "flashmla" for one in rows)
    timed = len(problem.timed)
    assert [num_heads for _, num_heads in calls] == [64] * (1 + timed) + [128] * (1 + timed)
    # Fresh metadata for the checked call, one for all timed ones.
    changes = [a[0] is not b[0] for a, b in pairwise(calls[: 1 + timed])]
    assert changes == [True] + [False] * (timed - 1)


def test_padded_result_equals_the_exact_one(pools):
    """What lets one peer measurement stand for all head counts: padding heads do not touch the others."""
    problem = data.make_problem(SMALL, batch=3, pools=pools)
    results = [right(**problem.checked.arguments(problem.attn_sink[:n].contiguous())) for n in (8, 64)]
    assert_close(results[1][0][:, :8], results[0][0], BF16_OUTPUT)


# --- choosing kernels


def kernel_module(monkeypatch, function):
    monkeypatch.setitem(sys.modules, "headfit.kernels.sparse_mqa_cuda", SimpleNamespace(sparse_mqa_cuda=function))


@pytest.mark.parametrize(("asked", "given"), [(None, True), (True, True), (False, False)])
def test_pdl_reaches_a_kernel_that_has_it(monkeypatch, asked, given):
    kernel_module(monkeypatch, lambda *, q, pdl=True: (q, pdl))
    (kernel,) = bench.load_kernels(["sparse_mqa_cuda"], asked)
    assert kernel.pdl is given and kernel.make()(q=1) == (1, given)


def test_pdl_that_reaches_no_kernel_is_refused(monkeypatch):
    kernel_module(monkeypatch, lambda *, q: q)
    (kernel,) = bench.load_kernels(["sparse_mqa_cuda"], None)
    assert kernel.pdl is None and kernel.make()(q=1) == 1
    with pytest.raises(ValueError, match=r"--pdl, --no-pdl: none of \['sparse_mqa_cuda'\]"):
        bench.load_kernels(["sparse_mqa_cuda"], False)


def test_absent_backend_is_an_error_only_when_asked_for(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "headfit.kernels.sparse_mqa_cuda", None)
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla([]))
    names = [kernel.backend for kernel in bench.load_kernels(None, None)]
    assert "flashmla" in names and "sparse_mqa_cuda" not in names
    assert "left out: sparse_mqa_cuda: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="--backends: 'sparse_mqa_cuda' cannot be imported here"):
        bench.load_kernels(["sparse_mqa_cuda"], None)


def test_no_backend_at_all_is_an_error(monkeypatch):
    for module in ("headfit.kernels.sparse_mqa_cuda", "headfit.kernels.sparse_mqa_triton", "flash_mla"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="no backend can be imported here, allowed: sparse_mqa_cuda"):
        bench.load_kernels(None, None)


# --- command line and result


def test_defaults_are_every_shape():
    args = bench.parse_arguments([])
    assert args.whole and args.keys == ["128", "128+512@4", "128+1024@4", "128+1024@128"]
    assert (args.batch, args.heads) == ([1, 8, 32, 64, 128, 256], [8, 16, 32, 64])


def test_options_restrict_and_override_quick():
    args = bench.parse_arguments(["--quick", "--heads", "8", "8", "--no-pdl"])
    assert not args.whole and (args.heads, args.batch, args.pdl) == ([8], [1, 32, 128], False)
    assert not bench.parse_arguments(["--pdl"]).whole


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--heads", "129"], "'129', allowed: an integer from 1 to 128"),
        (["--heads", "0"], "'0', allowed: an integer from 1 to 128"),
        (["--batch", "2000"], "'2000', allowed: an integer from 1 to 1024"),
        (["--batch", "x"], "'x', allowed: an integer"),
        (["--keys", "64"], "128+512@4"),
        (["--backends", "auto"], "sparse_mqa_cuda"),
    ],
)
def test_bad_arguments_name_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_code:
        bench.parse_arguments(argv)
    assert exit_code.value.code == 2 and message in capsys.readouterr().err


def test_a_run_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "a run needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4 80GB", "a100-sxm4-80gb")])
def test_default_path_names_the_gpu(gpu, slug):
    assert bench.default_path(gpu).parts[-3:] == ("benchmark", "results", f"decode_kernel-{slug}.json")


@pytest.fixture
def run_on_cpu(monkeypatch, pools):
    """`main` with everything that needs a GPU replaced, and one small key set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(bench, "ColdTimer", lambda: fake_timer)
    monkeypatch.setattr(bench, "null_launch", lambda: lambda: None)
    monkeypatch.setattr(bench, "random_packed_pool", lambda num_slots, page_size, device: pools[page_size])
    monkeypatch.setattr(bench, "KEYS", {"8+12@128": SMALL})
    monkeypatch.setattr(bench, "BATCHES", (1, 3))
    monkeypatch.setattr(bench, "HEADS", (8,))
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla([]))


@pytest.mark.parametrize("green", [True, False])
def test_main_writes_the_result_and_ends_in_one_json_line(run_on_cpu, monkeypatch, tmp_path, capsys, green):
    kernel_module(monkeypatch, lambda **inputs: right(**inputs) if green else wrong_lse(**inputs))
    path = tmp_path / "results" / "out.json"
    argv = ["--backends", "sparse_mqa_cuda", "flashmla", "--commit", "abc", "--seed", "5", "--out", str(path)]
    assert bench.main(argv) == (0 if green else 1)
    result, lines = json.loads(path.read_text()), capsys.readouterr().out.splitlines()
    assert list(result) == [
        *("benchmark", "gpu", "torch", "triton", "flash_mla", "commit", "date", "command", "seed", "pdl"),
        *("copy_gb_per_s", "null_us", "rows"),
    ]
    told = [result[name] for name in ("benchmark", "gpu", "flash_mla", "commit", "seed")]
    assert told == ["decode_kernel", "NVIDIA H200", "1.0.0", "abc", 5]
    assert len(result["rows"]) == 2 * 3 and all(list(one) == ROW_FIELDS for one in result["rows"])
    assert lines[0].startswith("NVIDIA H200: copies 4000.0 GB/s")
    assert sum(line.startswith("8+12@128 ") for line in lines) == 2
    last = json.loads(lines[-1])
    assert "rows" not in last and last["null_us"] == 2.0
    figures = last["summary"]["sparse_mqa_cuda"]["8"]
    assert (figures["geomean"], figures["red"]) == ((1.0, 0) if green else (None, 2))


def test_a_restricted_run_is_not_written_over_the_whole_one(run_on_cpu, monkeypatch, tmp_path, capsys):
    kernel_module(monkeypatch, right)
    monkeypatch.setattr(bench, "default_path", lambda gpu: tmp_path / "whole.json")
    assert bench.main(["--batch", "3", "--backends", "sparse_mqa_cuda"]) == 0
    assert "not written" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_before_the_run(run_on_cpu, monkeypatch, tmp_path, capsys):
    kernel_module(monkeypatch, right)
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert bench.main(["--backends", "sparse_mqa_cuda", "--out", str(tmp_path / "file" / "out.json")]) == 2
    assert bench.main(["--backends", "sparse_mqa_cuda", "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"benchmark": "tiny_accuracy"}', "is not a result of this benchmark"),
        ("[]", "is not a result of this benchmark"),
        ('{"benchmark": "decode_kernel"}', "is not a result of this benchmark"),
        ('{"benchmark": "decode_kernel", "gpu": "", "commit": "", "null_us": 1, "rows": [{}]}', "is not a result"),
        ("{", "Expecting property name"),
        (None, "No such file"),
    ],
)
def test_plot_refuses_another_file(tmp_path, capsys, text, message):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    assert bench.main(["--plot", str(path)]) == 2
    assert message in capsys.readouterr().err


# --- the timer


def test_timing_of_samples():
    assert Timing.of([3.0, 1.0, 8.0, 2.0]) == Timing(us_median=2.5, us_min=1.0, us_max=8.0)
    with pytest.raises(ValueError, match="0 samples, allowed: at least 1"):
        Timing.of([])


def test_timer_refuses_bad_counts_and_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="replays, warm_up: 0, 3"):
        ColdTimer(replays=0)
    with pytest.raises(ValueError, match="num_bytes, copies: 0, 10"):
        copy_bandwidth(num_bytes=0)
    for call in (ColdTimer, copy_bandwidth, null_launch):
        with pytest.raises(RuntimeError, match="timing needs a CUDA device"):
            call()
