"""The Triton backend on a GPU: every backend's checks, CUDA graphs, pools past 2 GiB, what is compiled and when."""

from dataclasses import replace

import pytest
import torch

from headfit.backends.unified_kv_triton import UnifiedKVTritonBackend
from headfit.kernels import sparse_mqa_triton as kernel
from headfit.kernels.sparse_mqa_triton import prewarm_triton, sparse_mqa_triton
from headfit.testing import backend_checks
from headfit.testing.backend_checks import BF16, CHECKS, FP8, PAGES_PAST_TWO_GIB, check_case, check_reference
from headfit.testing.cases import CASES, Case, make_case
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close

CHECKED = UnifiedKVTritonBackend(checked=True)
BACKEND = UnifiedKVTritonBackend()
INVARIANT = UnifiedKVTritonBackend(batch_invariant=True)
both_modes = pytest.mark.parametrize("backend", [BACKEND, INVARIANT], ids=["default", "invariant"])
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@both_modes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case, backend):
    for seed in range(2):
        check_case(backend, case, seed, "cuda")


# Of a score that is a float32 sum over 512 channels one after the other: lse of these cases is then up to 1.1e-5 off.
RUNNING_SUM = replace(FLOAT32, absolute=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[:14:4], ids=lambda case: case.id)
def test_other_query_dtypes(case, dtype, monkeypatch):
    if dtype == torch.float32:
        monkeypatch.setitem(backend_checks.LSE_TOLERANCES, CHECKED.name, RUNNING_SUM)
    check_case(CHECKED, case, 0, "cuda", dtype)


@each_check
@both_modes
def test_check(check, backend):
    check(backend, "cuda")


@each_check
def test_check_of_integer_decoding(check, monkeypatch):
    """What Ampere runs, which cannot convert e4m3 itself."""
    monkeypatch.setattr(kernel, "has_native_e4m3", lambda _: False)
    check(CHECKED, "cuda")


def test_index_past_the_pool():
    backend_checks.check_index_past_the_pool(CHECKED, "cuda")


def test_out():
    backend_checks.check_out(sparse_mqa_triton, "cuda")


def test_batch_invariant():
    backend_checks.check_batch_invariant(INVARIANT, "cuda")


@pytest.mark.parametrize(("page_size", "num_pages"), PAGES_PAST_TWO_GIB)
def test_row_18_offsets_past_two_gib(page_size, num_pages):
    backend_checks.check_wide_offsets(BACKEND, "cuda", page_size, num_pages)


@both_modes
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 8), (8, 16), (8, 40), (300, 16)])
def test_captured(num_tokens, num_heads, backend):
    backend_checks.check_captured(backend, num_tokens, num_heads)


@pytest.mark.parametrize("num_splits", [2, 3, 7, 32])
def test_splits_agree(num_splits, monkeypatch):
    for num_heads in (8, 32):
        case = Case(num_tokens=5, num_heads=num_heads, num_keys=(128, 512), lengths="ragged", sinks="mixed")
        arguments = make_case(case, num_splits, kv_format=FP8, device="cuda", dtype=BF16)
        monkeypatch.setattr(kernel, "plan_splits", lambda **_: 1)
        o, lse = check_reference(BACKEND, arguments)
        monkeypatch.setattr(kernel, "plan_splits", lambda **_: num_splits)
        split_o, split_lse = check_reference(BACKEND, arguments)
        assert_close(split_o, o, BF16_OUTPUT)
        assert_close(split_lse, lse, FLOAT32)


def compiled():
    """How many kernels have been compiled or loaded in this process."""
    return sum(
        len(caches[0]) for name in ("_attend", "_merge") for caches in getattr(kernel, name).device_caches.values()
    )


@pytest.mark.parametrize("num_heads", [8, 40])
def test_nothing_is_compiled_after_prewarm(num_heads):
    prewarm_triton(num_heads, 2, "cuda")
    prewarm_triton(num_heads, 1, "cuda")
    before = compiled()
    assert before >= 2
    for num_tokens in (1, 2, 16, 17, 300):
        for num_keys, page_sizes in (((1, 16), (1, 256)), ((133, None), (64, 2)), ((128, 512), (3, 64))):
            case = Case(num_tokens=num_tokens, num_heads=num_heads, num_keys=num_keys, page_sizes=page_sizes)
            arguments = make_case(case, num_tokens, kv_format=FP8, device="cuda", dtype=BF16)
            BACKEND.decode(**arguments)
            padded = torch.zeros(num_tokens, 64, 512, dtype=BF16, device="cuda")[:, :num_heads]
            BACKEND.decode(**arguments | {"q": padded})
    assert compiled() == before


def test_a_cpu_tensor_is_refused():
    arguments = make_case(Case(num_heads=8), 0, kv_format=FP8, dtype=BF16)
    with pytest.raises(ValueError, match=r"q: on cpu, allowed: a CUDA device of capability 8\.0 or later"):
        BACKEND.decode(**arguments)
