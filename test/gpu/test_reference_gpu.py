"""The reference backend and the caches on a GPU: the same cases as on the CPU."""

import pytest
import torch

from headfit.backends.reference import ReferenceBackend
from headfit.kv_cache import HEAD_DIM, PackedFp8Format, PagedPool
from headfit.testing.cases import CASES, KV_FORMATS, make_case, reference_float64
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_cases(kv_format, dtype):
    for seed, case in enumerate(CASES):
        arguments = make_case(case, seed, kv_format=kv_format, device="cuda", dtype=dtype)
        o, lse = ReferenceBackend(checked=True).decode(**arguments)
        expected_o, expected_lse = reference_float64(**arguments)
        assert o.is_cuda and o.dtype == dtype
        assert_close(o, expected_o, FLOAT32 if dtype == torch.float32 else BF16_OUTPUT, str(case))
        assert_close(lse, expected_lse, FLOAT32, str(case))


def test_row_18_offsets_past_two_gib():
    """256-token pages of 149,760 bytes: a 32-bit offset wraps at page 14,340."""
    pool = PagedPool(num_pages=14_341, page_size=256, kv_format=PackedFp8Format(), device="cuda")
    slots = torch.tensor([3_671_040, 3_671_295], device="cuda")
    pool.store(slots, torch.full((2, HEAD_DIM), 3.0, device="cuda"))
    assert (pool.load(slots) == 3).all()
    assert not pool.buffer[0].any() and not pool.buffer[14_339].any()


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_store_and_load_are_captured(kv_format):
    pool = PagedPool(num_pages=4, page_size=64, kv_format=kv_format, device="cuda")
    slots = torch.tensor([0, 64, -1, 255], device="cuda")
    rows = torch.ones(4, HEAD_DIM, device="cuda")
    pool.store(slots, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.store(slots, rows)
        loaded = pool.load(slots)
    slots.copy_(torch.tensor([5, -1, 200, 70]))
    rows.copy_(torch.arange(1, 5)[:, None].expand(4, HEAD_DIM))
    graph.replay()
    assert loaded[:, 0].tolist() == [1, 0, 3, 4]
    assert pool.load(torch.tensor([0, 255, 70], device="cuda"))[:, 5].tolist() == [1, 1, 4]
