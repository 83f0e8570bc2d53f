"""The reference backend against oracles: CONST (keys of one value), MARK (a value a key) and REF (float64).

"Row n" is row n of the list of known faults.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headfit.backends.reference import ReferenceBackend
from headfit.kernels import sparse_mqa_ref
from headfit.kv_cache import HEAD_DIM, KVRegion
from headfit.testing.cases import (
    CASES,
    HEAD_COUNTS,
    KV_FORMATS,
    Case,
    constant_case,
    make_case,
    poisoned_pool,
    reference_float64,
)
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close

pytestmark = pytest.mark.usefixtures("nan_empty")

BACKEND = ReferenceBackend(checked=True)
FP8 = KV_FORMATS["fp8"]
both_formats = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)


def check(arguments, tolerance=FLOAT32, backend=BACKEND):
    """Run the backend, then its reference; both results must be right."""
    o, lse = backend.decode(**arguments)
    expected_o, expected_lse = reference_float64(**arguments)
    assert o.dtype == arguments["q"].dtype and lse.dtype == torch.float32
    assert_close(o, expected_o.float(), tolerance, "o")  # below float32's range the right result is 0
    assert_close(lse.exp(), expected_lse.exp(), FLOAT32, "exp(lse)")  # lse itself may be next to 0
    return o, lse


def test_cases_are_distinct():
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.num_heads for case in CASES} == set(HEAD_COUNTS)


@both_formats
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference(case, kv_format, seed):
    o, lse = check(make_case(case, seed, kv_format=kv_format))
    assert o.isfinite().all() and not lse.isnan().any()


@both_formats
@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.id)
def test_bfloat16_queries(case, kv_format, seed):
    check(make_case(case, seed, kv_format=kv_format, dtype=torch.bfloat16), BF16_OUTPUT)


def rewindowed(indices=lambda i: i, lengths=lambda n: n):
    def change(arguments):
        window = arguments["window"]
        return {"window": KVRegion(window.pool, indices(window.indices), lengths(window.lengths))}

    return change


FAULTS = {
    "wrong_slots": rewindowed(indices=lambda i: i.roll(1, dims=0)),
    "one_key_less": rewindowed(lengths=lambda n: n - 1),
    "no_compressed": lambda arguments: {"compressed": None},
    "neighbours_sink": lambda arguments: {"attn_sink": arguments["attn_sink"].roll(1)},
    "no_sink": lambda arguments: {"attn_sink": torch.full_like(arguments["attn_sink"], -math.inf)},
    "scale": lambda arguments: {"softmax_scale": arguments["softmax_scale"] * 1.001},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_oracle_sees_a_fault(fault, seed):
    arguments = make_case(Case(), seed, kv_format=FP8)
    expected, _ = reference_float64(**arguments)
    with pytest.raises(AssertionError, match="differs from its reference"):
        assert_close(BACKEND.decode(**arguments | fault(arguments))[0], expected, FLOAT32)


@both_formats
@pytest.mark.parametrize("num_keys", [1, 4, 65, 200])
@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_const(num_keys, page_size, kv_format):
    sinks = torch.tensor([math.log(num_keys), 0.0, -math.inf, math.inf, 100.0])
    o, lse = BACKEND.decode(**constant_case([1.0] * num_keys, sinks, kv_format=kv_format, page_size=page_size))
    expected = torch.tensor([0.5, num_keys / (num_keys + 1), 1.0, 0.0, 0.0])
    assert_close(o, expected[:, None].expand(1, -1, HEAD_DIM), FLOAT32)
    assert_close(lse, torch.full((1, 5), math.log(num_keys)), FLOAT32)


def test_const_from_literal_bytes():
    """Keys of e4m3 1.0 (0x38), scale 2**0 (byte 127) and bfloat16 1.0 (0x3F80), written here byte by byte."""
    arguments = constant_case([7.0] * 4, torch.tensor([math.log(4), 0.0]), kv_format=FP8, page_size=64)
    page = arguments["window"].pool.buffer[1]
    for t in range(4):
        page[t * 576 : t * 576 + 448] = 0x38
        page[t * 576 + 448 : (t + 1) * 576] = torch.tensor([0x80, 0x3F], dtype=torch.uint8).repeat(64)
        page[64 * 576 + 8 * t : 64 * 576 + 8 * t + 7] = 127
    o, _ = BACKEND.decode(**arguments)
    assert_close(o, torch.tensor([0.5, 0.8])[:, None].expand(1, 2, HEAD_DIM), FLOAT32)


@both_formats
def test_mark(kv_format, seed):
    """Each key holds its own number; the output is the mean of the numbers that the row names."""
    values = [float(2 ** (t % 7) * (1 + t % 3)) for t in range(100)]
    arguments = constant_case(values, torch.full((2,), -math.inf), kv_format=kv_format, num_tokens=20, page_size=3)
    window = arguments["window"]
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(20, 100, generator=generator).argsort(dim=1)[:, :9]
    arguments["window"] = KVRegion(window.pool, (3 + picks).int(), torch.full((20,), 9, dtype=torch.int32))
    expected = torch.tensor(values)[picks].double().mean(dim=1)
    o, lse = BACKEND.decode(**arguments)
    assert_close(o, expected[:, None, None].expand(20, 2, HEAD_DIM), FLOAT32)
    assert_close(lse, torch.full((20, 2), math.log(9)), FLOAT32)


def test_row_11_backend_refuses_narrow_sinks():
    arguments = constant_case([1.0], torch.zeros(4, dtype=torch.bfloat16), kv_format=FP8)
    with pytest.raises(TypeError, match=r"attn_sink: dtype torch\.bfloat16, allowed: torch\.float32"):
        BACKEND.decode(**arguments)


@both_formats
def test_row_12_the_sink_is_not_dropped(kv_format):
    o, lse = BACKEND.decode(**constant_case([1.0] * 4, torch.zeros(8), kv_format=kv_format))
    assert_close(o, torch.full((1, 8, HEAD_DIM), 0.8), FLOAT32)
    assert_close(lse, torch.full((1, 8), math.log(4)), FLOAT32)


@pytest.mark.parametrize("split", [(8,), (8, 0), (3, 5), (0, 3, 5), (1,) * 8], ids=str)
def test_row_14_sink_joins_sharded_partials_once(split):
    sink_free = torch.full((4,), -math.inf)
    partials = [BACKEND.decode(**constant_case([1.0] * num_keys, sink_free, kv_format=FP8)) for num_keys in split]
    outputs, lses = (torch.stack(part) for part in zip(*partials, strict=True))
    largest = lses.amax(dim=0)
    weights = (lses - largest).exp()
    denominator = weights.sum(dim=0) + (math.log(8) - largest).exp()
    merged = (weights[..., None] * outputs).sum(dim=0) / denominator[..., None]
    assert_close(merged, torch.full((1, 4, HEAD_DIM), 0.5), FLOAT32)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def with_row(arguments, row, length):
    """The case's pool, read through one index row."""
    return arguments | {"window": KVRegion(arguments["window"].pool, int32([row]).view(1, -1), int32([length]))}


@both_formats
def test_row_15_absent_first_tile_and_empty_rows(kv_format):
    arguments = constant_case([1.0] * 4, torch.full((8,), math.log(4)), kv_format=kv_format)
    keys = [64, 65, 66, 67]
    for row in ([-1] * 64 + keys, keys + [-1] * 64, [-1, 64, -1, 65, 66, -1, 67]):
        o, lse = BACKEND.decode(**with_row(arguments, row, len(row)))
        assert_close(o, torch.full((1, 8, HEAD_DIM), 0.5), FLOAT32)
        assert_close(lse, torch.full((1, 8), math.log(4)), FLOAT32)
    sinks = torch.tensor([0.0, math.inf, -math.inf, 5.0] * 2)
    for row, length in (([-1] * 64, 64), (keys, 0), (keys, -1), ([], 0), ([-1] * 4 + keys, 4)):
        o, lse = BACKEND.decode(**with_row(arguments, row, length) | {"attn_sink": sinks})
        assert torch.equal(o, torch.zeros(1, 8, HEAD_DIM)) and torch.equal(lse, torch.full((1, 8), -math.inf))


@both_formats
def test_row_16_poisoned_page_0_is_never_read(kv_format, seed):
    arguments = make_case(Case(absent=0.5), seed, kv_format=kv_format)
    pools = [arguments[name].pool for name in ("window", "compressed")]
    assert all(pool.load(torch.arange(pool.page_size)).isnan().all() for pool in pools)
    o, lse = check(arguments)
    for pool in pools:
        pool.buffer[0].view(torch.uint8).fill_(0)
    clean_o, clean_lse = BACKEND.decode(**arguments)
    assert o.isfinite().all() and torch.equal(o, clean_o) and torch.equal(lse, clean_lse)


@both_formats
@pytest.mark.parametrize("region", ["window", "compressed"])
@pytest.mark.parametrize("beyond", [0, 1, 63, 10**6])
def test_row_17_index_past_the_pool_is_named(beyond, region, kv_format, seed):
    arguments = make_case(Case(num_keys=(8, 8), page_sizes=(64, 2)), seed, kv_format=kv_format)
    row = arguments[region]
    row.indices[2, 5] = row.pool.num_slots + beyond
    with pytest.raises(IndexError, match=rf"{region}\.indices\[row 2, column 5\] is {row.pool.num_slots + beyond}"):
        BACKEND.decode(**arguments)
    row.lengths[2] = 5
    check(arguments)


def test_row_17_a_negative_index_other_than_absent_is_named(seed):
    arguments = make_case(Case(num_keys=(8, 8), page_sizes=(64, 2)), seed, kv_format=KV_FORMATS["model"])
    arguments["window"].indices[0, 1] = -7
    with pytest.raises(IndexError, match=r"window\.indices\[row 0, column 1\] is -7"):
        BACKEND.decode(**arguments)


@both_formats
@pytest.mark.parametrize("num_keys", [(0, None), (24, None), (24, 40), (0, 0)], ids=str)
def test_row_19_no_tokens(num_keys, kv_format, seed):
    arguments = make_case(Case(num_tokens=0, num_keys=num_keys), seed, kv_format=kv_format)
    o, lse = BACKEND.decode(**arguments)
    assert o.shape == (0, 16, HEAD_DIM) and lse.shape == (0, 16)


@both_formats
@pytest.mark.parametrize("padded_to", [133, 192])
def test_row_20_133_indices(padded_to, kv_format, seed):
    arguments = make_case(Case(num_tokens=6, tokens_per_seq=6, num_keys=(133, None)), seed, kv_format=kv_format)
    o, lse = check(arguments)
    window = arguments["window"]
    indices = torch.nn.functional.pad(window.indices, (0, padded_to - 133), value=-1)
    wide_o, wide_lse = BACKEND.decode(**arguments | {"window": KVRegion(window.pool, indices, window.lengths)})
    assert_close(wide_o, o, FLOAT32)
    assert_close(wide_lse, lse, FLOAT32)


@both_formats
def test_blocks_of_tokens_and_what_lies_past_a_length_change_nothing(kv_format, seed, monkeypatch):
    arguments = make_case(Case(num_tokens=7, lengths="ragged"), seed, kv_format=kv_format)
    o, lse = BACKEND.decode(**arguments)
    window = arguments["window"]
    past = torch.arange(window.indices.shape[1]) >= window.lengths[:, None]
    window.indices[past] = torch.iinfo(torch.int32).max
    monkeypatch.setattr(sparse_mqa_ref, "MAX_BLOCK_BYTES", 2 * 4 * HEAD_DIM * 64)
    blocked_o, blocked_lse = BACKEND.decode(**arguments)
    assert torch.equal(blocked_o, o) and torch.equal(blocked_lse, lse)


POOLS = {name: poisoned_pool(kv_format, 3, 2) for name, kv_format in KV_FORMATS.items()}
for pool in POOLS.values():
    pool.store(torch.arange(1, 6), torch.linspace(-4, 4, 5 * HEAD_DIM).sin().view(5, HEAD_DIM))

slots = st.sampled_from([-1, -1, 1, 2, 3, 4, 5, 6, 2**31 - 1])  # 0 is never written; from 6 on, past the pool
sinks = st.sampled_from([math.inf, -math.inf, 0.0, 200.0, -200.0]) | st.floats(-5, 5, width=32)


@st.composite
def regions(draw, num_tokens):
    num_keys = draw(st.integers(0, 5))
    rows = draw(
        st.lists(st.lists(slots, min_size=num_keys, max_size=num_keys), min_size=num_tokens, max_size=num_tokens)
    )
    lengths = draw(st.lists(st.integers(-1, num_keys + 1), min_size=num_tokens, max_size=num_tokens))
    return rows, lengths, int32(rows).view(num_tokens, num_keys)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(POOLS)), num_tokens=st.integers(0, 3))
def test_any_index_rows_are_right_or_a_clear_error(data, name, num_tokens):
    num_heads = data.draw(st.integers(1, 8))
    attn_sink = torch.tensor(data.draw(st.lists(sinks, min_size=num_heads, max_size=num_heads)))
    drawn = [data.draw(regions(num_tokens)) for _ in range(data.draw(st.integers(1, 2)))]
    window, compressed = [*(KVRegion(POOLS[name], index, int32(lengths)) for _, lengths, index in drawn), None][:2]
    q = torch.randn(num_tokens, num_heads, HEAD_DIM)
    arguments = {"q": q, "window": window, "compressed": compressed, "attn_sink": attn_sink, "softmax_scale": 0.1}
    read = [
        slot for rows, lengths, _ in drawn for row, n in zip(rows, lengths, strict=True) for slot in row[: max(n, 0)]
    ]
    if max(read, default=-1) >= 6:
        with pytest.raises(IndexError, match=r"indices\[row \d, column \d\] is \d+; allowed: -1 \(absent\) to 5"):
            BACKEND.decode(**arguments)
        return
    o, lse = check(arguments)
    assert o.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("q", lambda t: t[0], ValueError),
        ("q", lambda t: t[..., :256], ValueError),
        ("q", lambda t: t[:2], ValueError),
        ("q", lambda t: t.to(torch.int32), TypeError),
        ("attn_sink", lambda t: t[:15], ValueError),
        ("attn_sink", lambda t: t.double(), TypeError),
        ("attn_sink", lambda t: t[None], ValueError),
    ],
)
def test_wrong_argument_is_named(name, change, error, seed):
    arguments = make_case(Case(), seed, kv_format=FP8)
    with pytest.raises(error, match=rf"{name}|window"):
        BACKEND.decode(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("field", ["indices", "lengths"])
@pytest.mark.parametrize(
    "change", [lambda t: t.long(), lambda t: t[:2], lambda t: t[None]], ids=["int64", "short", "3d"]
)
@pytest.mark.parametrize("region", ["window", "compressed"])
def test_wrong_region_is_named(region, change, field, seed):
    arguments = make_case(Case(), seed, kv_format=FP8)
    parts = {name: getattr(arguments[region], name) for name in ("pool", "indices", "lengths")}
    with pytest.raises((ValueError, TypeError), match=rf"{region}\.{field}: "):
        BACKEND.decode(**arguments | {region: KVRegion(**parts | {field: change(parts[field])})})
