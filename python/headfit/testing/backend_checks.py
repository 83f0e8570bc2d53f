"""What every exact-head backend over the packed fp8 cache must do, on any device: shared by its CPU and GPU tests.

A check takes the backend and a device, and raises AssertionError. Queries are bfloat16. "Row n" is row n of the list
of known faults.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headfit.backends.base import AttentionBackend
from headfit.kv_cache import GROUP_SIZE, HEAD_DIM, NOPE_DIM, NUM_GROUPS, KVRegion, PackedFp8Format, PagedPool
from headfit.testing.cases import KV_FORMATS, Case, constant_case, make_case, poisoned_pool, reference_float64
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, Tolerance, assert_close

BF16 = torch.bfloat16
FP8 = KV_FORMATS["fp8"]
# Hopper's tensor cores add fp8 products to about 14 bits: up to 2**-13 of the largest product of 32 channels a score,
# a few 1e-3 in lse on queries three times the unit norm. The others compute scores of exact keys in float32.
LSE_TOLERANCES = {"sparse_mqa_cuda": Tolerance(absolute=2e-2, relative=1e-2, cosine=5e-5)}
PAGES_PAST_TWO_GIB = ((256, 14_341), (64, 57_360))  # page size and count: a 32-bit offset wraps inside the last page


def check_case(
    backend: AttentionBackend, case: Case, seed: int, device: torch.device | str, dtype: torch.dtype = BF16
) -> None:
    """The case's result against float64."""
    check_reference(backend, make_case(case, seed, kv_format=FP8, device=device, dtype=dtype), case.id)


def check_reference(backend: AttentionBackend, arguments: dict[str, Any], label: str = "o") -> tuple[Tensor, Tensor]:
    """Run the backend, then float64; both results must agree, and hold no NaN."""
    o, lse = backend.decode(**arguments)
    expected_o, expected_lse = reference_float64(**arguments)
    q = arguments["q"]
    assert o.dtype == q.dtype and o.device == q.device and lse.dtype == torch.float32
    assert o.isfinite().all() and not lse.isnan().any()
    # Below float32's range the right result is 0.
    assert_close(o, expected_o.float(), FLOAT32 if q.dtype == torch.float32 else BF16_OUTPUT, label)
    # exp(), since lse itself may be next to 0
    assert_close(lse.exp(), expected_lse.exp(), LSE_TOLERANCES.get(backend.name, FLOAT32), f"exp(lse) of {label}")
    return o, lse


def check_const(backend: AttentionBackend, device: torch.device | str) -> None:
    """CONST: n keys of ones give n / (n + exp(sink)), a sink of its own for each head (rows 7, 11 and 12)."""
    for num_keys, page_size in ((1, 1), (4, 2), (65, 64), (200, 256)):
        sinks = torch.tensor([math.log(num_keys), 0.0, -math.inf, math.inf, 100.0, 0.05, 1.0, 2.0])
        expected = num_keys / (num_keys + sinks.exp())
        o, lse = backend.decode(**_constant([1.0] * num_keys, sinks.to(device), page_size=page_size))
        assert_close(o, expected[:, None].expand(1, -1, HEAD_DIM), BF16_OUTPUT, f"CONST of {num_keys} keys")
        assert_close(lse, torch.full((1, 8), math.log(num_keys)), FLOAT32)


def check_mark(backend: AttentionBackend, device: torch.device | str) -> None:
    """MARK: each key holds its own number; the output is the mean of the numbers that the row names."""
    num_keys, num_tokens = 9, 5
    values = [float(2 ** (t % 7) * (1 + t % 3)) for t in range(100)]
    for page_size in (1, 3, 64):
        sink_free = torch.full((8,), -math.inf, device=device)
        arguments = _constant(values, sink_free, num_tokens=num_tokens, page_size=page_size)
        picks = torch.rand(num_tokens, 100).argsort(dim=1)[:, :num_keys]
        arguments |= with_window(arguments, indices=(page_size + picks).int().to(device))
        expected = torch.tensor(values)[picks].double().mean(dim=1)
        arguments["window"].lengths.fill_(num_keys)
        o, lse = backend.decode(**arguments)
        assert_close(o, expected[:, None, None].expand(num_tokens, 8, HEAD_DIM), BF16_OUTPUT, f"pages of {page_size}")
        assert_close(lse, torch.full((num_tokens, 8), math.log(num_keys)), FLOAT32)


def check_every_code(backend: AttentionBackend, device: torch.device | str, scale_bytes: range = range(247)) -> None:
    """Every finite e4m3 code under every scale byte up to the last that keeps all of them finite, bit for bit.

    Token t attends to key t alone, without a sink, so its output is the key. Under scale bytes below 105 only codes of
    at least 2.0, because bfloat16's subnormals are not promised.
    """
    scales = torch.tensor([*scale_bytes] + [127] * (-len(scale_bytes) % NUM_GROUPS)).view(-1, NUM_GROUPS)
    num_tokens = len(scales)
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    data = codes[(torch.arange(num_tokens)[:, None] * GROUP_SIZE + torch.arange(NOPE_DIM)) % len(codes)]
    tiny = (scales < 105).repeat_interleave(GROUP_SIZE, dim=1) & (data & 0x7F < 0x40)
    data = torch.where(tiny, (data & ~1) | 0x40, data)
    pool = poisoned_pool(FP8, 2 + num_tokens // 4, 4)
    slots = 4 + torch.arange(num_tokens)
    pool.store(slots, torch.randn(num_tokens, HEAD_DIM))
    rows, scale_rows = FP8._views(pool.buffer, 4)
    place = slots // 4, slots % 4
    rows[place[0], place[1], :NOPE_DIM] = data.to(torch.uint8)
    scale_rows[place[0], place[1], :NUM_GROUPS] = scales.to(torch.uint8)
    expected = pool.load(slots).to(BF16)
    assert expected.isfinite().all()
    pool.buffer = pool.buffer.to(device)
    ones = torch.ones(num_tokens, dtype=torch.int32, device=device)
    o, _ = backend.decode(
        q=torch.zeros(num_tokens, 8, HEAD_DIM, dtype=BF16, device=device),
        window=KVRegion(pool, slots[:, None].int().to(device), ones),
        compressed=None,
        attn_sink=torch.full((8,), -math.inf, device=device),
        softmax_scale=1.0,
    )
    assert torch.equal(o.cpu(), expected[:, None].expand(-1, 8, -1))


def check_corrupt_key(backend: AttentionBackend, device: torch.device | str) -> None:
    """A key with a NaN code, or with scale byte 255, makes its token NaN, and no other token."""
    for corrupt in ("code", "negative code", "scale"):
        arguments = make_case(Case(num_tokens=2, num_heads=8, num_keys=(24, None)), 1, kv_format=FP8, device=device)
        arguments["q"] = arguments["q"].to(BF16)
        window = arguments["window"]
        slot = next(slot for slot in window.indices[0].tolist() if slot not in window.indices[1].tolist())
        page, offset = divmod(slot, window.pool.page_size)
        rows, scales = FP8._views(window.pool.buffer, window.pool.page_size)
        if corrupt == "scale":
            # As Inf instead of NaN it would give a score of -Inf: the key would vanish from all channels but its own.
            scales[page, offset, 3] = 0xFF
            rows[page, offset, 3 * GROUP_SIZE : 4 * GROUP_SIZE] = 0x38
            arguments["q"][0] = -1.0
        else:
            rows[page, offset, 200] = 0x7F if corrupt == "code" else 0xFF
        o, lse = backend.decode(**arguments)
        assert o[0].isnan().all() and lse[0].isnan().all(), corrupt
        assert o[1].isfinite().all() and lse[1].isfinite().all(), corrupt


def check_empty_rows(backend: AttentionBackend, device: torch.device | str) -> None:
    """Row 15: absent first tiles change nothing; without a key o = 0 and lse = -inf, whatever the sink."""
    arguments = _constant([1.0] * 4, torch.full((8,), math.log(4), device=device))
    keys = [64, 65, 66, 67]
    for row in ([-1] * 64 + keys, keys + [-1] * 64, [-1, 64, -1, 65, 66, -1, 67], [*keys, 2**31 - 1]):
        length = len(row) - (row[-1] == 2**31 - 1)
        o, lse = backend.decode(**arguments | with_window(arguments, indices=[row], lengths=[length]))
        assert_close(o, torch.full((1, 8, HEAD_DIM), 0.5), FLOAT32, str(row))
        assert_close(lse, torch.full((1, 8), math.log(4)), FLOAT32, str(row))
    sinks = torch.tensor([0.0, math.inf, -math.inf, 5.0] * 2, device=device)
    for row, length in (([-1] * 64, 64), (keys, 0), (keys, -1), ([], 0), ([-1] * 4 + keys, 4)):
        changed = with_window(arguments, indices=[row], lengths=[length]) | {"attn_sink": sinks}
        o, lse = backend.decode(**arguments | changed)
        assert not o.any() and (lse == -math.inf).all(), (row, length)


def check_lengths_beyond_the_row(backend: AttentionBackend, device: torch.device | str) -> None:
    """A length past its index row counts as the row's, a negative one as 0: bit-equal to the clamped ones."""
    arguments = make_case(Case(num_tokens=4, num_heads=8), 2, kv_format=FP8, device=device, dtype=BF16)
    lengths = torch.tensor([25, 2**31 - 1, -300, 24], dtype=torch.int32, device=device)
    results = [
        backend.decode(**arguments | with_window(arguments, lengths=value)) for value in (lengths, lengths.clamp(0, 24))
    ]
    assert_bit_equal(*results)


def check_poison_is_never_read(backend: AttentionBackend, device: torch.device | str) -> None:
    """Row 16: NaN in page 0 and in slots that no index names changes no bit."""
    arguments = make_case(Case(num_heads=8, absent=0.5), 3, kv_format=FP8, device=device, dtype=BF16)
    poisoned = check_reference(backend, arguments)
    for name in ("window", "compressed"):
        pool, indices = arguments[name].pool, arguments[name].indices
        named = torch.zeros(pool.num_slots, dtype=torch.bool)
        named[indices[indices >= 0].long().cpu()] = True
        unread = (~named).nonzero().flatten().to(device)
        pool.store(unread, torch.ones(len(unread), HEAD_DIM, device=device))
    assert_bit_equal(backend.decode(**arguments), poisoned)


def check_padded_queries(backend: AttentionBackend, device: torch.device | str) -> None:
    """Row 2: queries cut out of a buffer padded with NaN, out of one padded with zeros, and alone are bit-equal."""
    for num_heads in (8, 16, 32):
        arguments = make_case(Case(num_tokens=2, num_heads=num_heads), 4, kv_format=FP8, device=device, dtype=BF16)
        plain = backend.decode(**arguments)
        for padding in (math.nan, 0.0):
            buffer = torch.full((2, 64, HEAD_DIM), padding, dtype=BF16, device=device)
            buffer[:, :num_heads] = arguments["q"]
            assert_bit_equal(backend.decode(**arguments | {"q": buffer[:, :num_heads]}), plain)


def check_out(operator: Callable[..., tuple[Tensor, Tensor]], device: torch.device | str) -> None:
    """`out`, a slice of a padded buffer, is written and returned; what surrounds it keeps its bytes.

    Args:
        operator: a kernel form, `sparse_mqa_<form>`.
    """
    for num_heads in (8, 12, 40):
        arguments = make_case(Case(num_tokens=2, num_heads=num_heads), 5, kv_format=FP8, device=device, dtype=BF16)
        regions = (arguments.pop("window"), arguments.pop("compressed"))
        o, lse = operator(**arguments, regions=regions)
        buffer = torch.full((4, 64, HEAD_DIM), 7.0, dtype=BF16, device=device)
        out = buffer[1:3, 8 : 8 + num_heads]
        written, out_lse = operator(**arguments, regions=regions, out=out)
        assert written is out
        assert_bit_equal((out, out_lse), (o, lse))
        out.fill_(7.0)
        assert (buffer == 7).all()


def check_wrong_arguments(operator: Callable[..., tuple[Tensor, Tensor]], device: torch.device | str) -> None:
    """A kernel form refuses by itself, without a backend around it, what it cannot run; also for no tokens.

    Args:
        operator: as for `check_out`.
    """
    for num_tokens in (3, 0):
        arguments = make_case(Case(num_tokens=num_tokens, num_heads=8), 5, kv_format=FP8, device=device, dtype=BF16)
        window, compressed = arguments.pop("window"), arguments.pop("compressed")
        arguments["regions"] = (window, compressed)

        def other(indices=compressed.indices, lengths=compressed.lengths, regions=arguments["regions"]):
            return {"regions": (regions[0], KVRegion(regions[1].pool, indices, lengths))}

        more = num_tokens + 1
        sinks, q = arguments["attn_sink"], arguments["q"]
        wrong = [
            ({"q": q[0] if num_tokens else q[:, 0]}, ValueError, r"q: shape \(\d, 512\), allowed"),
            ({"q": q[..., :256]}, ValueError, "q: |allowed: q's 256"),
            ({"q": q.to(torch.int32)}, TypeError, "q: dtype torch.int32, allowed"),
            ({"out": q[:, 0].clone()}, ValueError, r"out: .*\(\d, 512\), allowed"),
            ({"attn_sink": sinks.to(BF16)}, TypeError, "attn_sink: dtype torch.bfloat16, allowed: torch.float32"),
            ({"attn_sink": sinks[:1]}, ValueError, r"attn_sink: shape \(1,\), allowed: \(8,\)"),
            (other(indices=compressed.indices.long()), TypeError, r"compressed\.indices: dtype torch\.int64"),
            (other(indices=compressed.indices.new_zeros(more, 4)), ValueError, r"compressed\.indices: shape \(\d, 4\)"),
            (other(indices=compressed.indices[:, 0]), ValueError, r"compressed\.indices: shape \(\d,\), allowed"),
            (other(lengths=compressed.lengths.float()), TypeError, r"compressed\.lengths: dtype torch\.float32"),
            (other(lengths=compressed.lengths.new_zeros(more)), ValueError, r"compressed\.lengths: shape \(\d,\)"),
            ({"regions": (window,) * 3}, ValueError, "regions: 3 of them, allowed: 1 or 2"),
        ]
        for scale in (1e39, 3e38, -1e39, math.inf, math.nan):  # 3e38 is float32's, but not in base 2
            wrong.append(({"softmax_scale": scale}, ValueError, f"softmax_scale: {re.escape(str(scale))}, allowed"))
        for change, error, message in wrong:
            with pytest.raises(error, match=message):
                operator(**arguments | change)


def check_batch_invariant(backend: AttentionBackend, device: torch.device | str, num_tokens: int = 32) -> None:
    """Row 28: each of a backend's rows in batch-invariant mode is the same bits alone, in pairs and in the batch."""
    case = Case(num_tokens=num_tokens, num_keys=(128, 200), lengths="ragged", absent=0.1)
    arguments = make_case(case, 6, kv_format=FP8, device=device, dtype=BF16)
    o, lse = check_reference(backend, arguments)
    for rows in (slice(0, 1), slice(num_tokens - 1, num_tokens), slice(1, 3)):
        assert_bit_equal(backend.decode(**rows_of(arguments, rows)), (o[rows], lse[rows]))


def check_unified_form(backend: AttentionBackend, device: torch.device | str) -> None:
    """One pool and one index row, window then compressed with -1 between, against the two regions they came from."""
    case = Case(num_heads=8, num_keys=(24, 40), page_sizes=(4, 4), absent=0.2)
    arguments = make_case(case, 7, kv_format=FP8, device=device, dtype=BF16)
    window, compressed = arguments["window"], arguments["compressed"]
    pool = PagedPool(
        num_pages=window.pool.num_pages + compressed.pool.num_pages, page_size=4, kv_format=FP8, device=device
    )
    pages = [part.buffer[: part.num_pages] for part in (window.pool, compressed.pool)]
    pool.buffer[: pool.num_pages] = torch.cat(pages)
    second = torch.where(compressed.indices < 0, -1, compressed.indices + window.pool.num_slots)
    gap = torch.full_like(second[:, :5], -1)
    row = torch.cat([window.indices, gap, second], dim=1)
    unified = KVRegion(pool, row, torch.full_like(window.lengths, row.shape[1]))
    o, lse = backend.decode(**arguments)
    unified_o, unified_lse = check_reference(backend, arguments | {"window": unified, "compressed": None})
    assert_close(unified_o, o, BF16_OUTPUT)
    assert_close(unified_lse, lse, FLOAT32)


def check_wrong_format(backend: AttentionBackend, device: torch.device | str) -> None:
    """Pools of another format are refused by name."""
    for region in ("window", "compressed"):
        arguments = make_case(Case(num_heads=8), 8, kv_format=FP8, device=device, dtype=BF16)
        arguments[region] = make_case(Case(num_heads=8), 8, kv_format=KV_FORMATS["model"], device=device)[region]
        with pytest.raises(ValueError, match=rf"{region}\.pool: kv_format 'model', allowed.*'fp8'"):
            backend.decode(**arguments)


def check_index_past_the_pool(backend: AttentionBackend, device: torch.device | str) -> None:
    """Row 17: in checked mode the region, row and column are named."""
    for region in ("window", "compressed"):
        arguments = make_case(Case(num_heads=8, num_keys=(8, 8)), 9, kv_format=FP8, device=device, dtype=BF16)
        num_slots = arguments[region].pool.num_slots
        arguments[region].indices[2, 5] = num_slots
        with pytest.raises(IndexError, match=rf"{region}\.indices\[row 2, column 5\] is {num_slots}"):
            backend.decode(**arguments)


def check_wide_offsets(backend: AttentionBackend, device: torch.device | str, page_size: int, num_pages: int) -> None:
    """Row 18: MARK in the last page of a pool of over 2 GiB; page 0, where a 32-bit offset may wrap to, is NaN."""
    pool = PagedPool(num_pages=num_pages, page_size=page_size, kv_format=PackedFp8Format(), device=device)
    pool.buffer[:2] = 0xFF
    assert pool.buffer.stride(0) * (num_pages - 1) > 2**31 - 1
    slots = torch.tensor([num_pages * page_size - offset for offset in (page_size, 7, 1)], device=device)
    pool.store(slots, torch.tensor([1.0, 2.0, 6.0], device=device)[:, None].expand(3, HEAD_DIM))
    o, _ = backend.decode(
        q=torch.zeros(1, 8, HEAD_DIM, dtype=BF16, device=device),
        window=KVRegion(pool, slots[None].int(), torch.full((1,), 3, dtype=torch.int32, device=device)),
        compressed=None,
        attn_sink=torch.full((8,), -math.inf, device=device),
        softmax_scale=1.0,
    )
    assert (o == 3).all()


def check_captured(backend: AttentionBackend, num_tokens: int = 8, num_heads: int = 16) -> None:
    """Rows 25 and 26: a graph captured with full rows serves other lengths, indices, queries and sinks, bit for bit."""
    case = Case(num_tokens=num_tokens, num_heads=num_heads, num_keys=(128, 512), page_sizes=(256, 64))
    arguments = make_case(case, 10, kv_format=FP8, device="cuda", dtype=BF16)
    backend.decode(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.decode(**arguments)
    graph.replay()
    assert_bit_equal(captured, check_reference(backend, arguments))
    for seed, lengths in enumerate(([512] * 8, [64, 512, 1, 0, 200, 33, 511, 31], [1] * 8)):
        arguments["q"].copy_(torch.randn(arguments["q"].shape))
        arguments["attn_sink"].copy_(torch.randn(num_heads))
        for name in ("window", "compressed"):
            region = arguments[name]
            region.indices.copy_(region.indices.roll(seed, dims=0))
            limits = torch.tensor([lengths[t % 8] for t in range(num_tokens)])
            region.lengths.copy_(limits.clamp(max=region.indices.shape[1]))
        # An eager call of another size between capture and replay, as prefill between two decode steps.
        backend.decode(**rows_of(arguments, slice(0, 1)))
        graph.replay()
        torch.cuda.synchronize()
        assert_bit_equal(captured, check_reference(backend, arguments, f"replay {seed}"))


CHECKS = (
    check_const,
    check_mark,
    check_every_code,
    check_corrupt_key,
    check_empty_rows,
    check_lengths_beyond_the_row,
    check_poison_is_never_read,
    check_padded_queries,
    check_unified_form,
    check_wrong_format,
)
"""The checks of any backend over packed caches on any device, that need no more than both."""


def assert_bit_equal(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """o and lse are the same values (NaN nowhere)."""
    for name, value, wanted in zip(("o", "lse"), result, expected, strict=True):
        assert torch.equal(value, wanted), f"{name}: {(value != wanted).sum()} of {value.numel()} elements differ"


def with_window(arguments: dict[str, Any], **changes: Any) -> dict[str, KVRegion]:
    """The case's window with other `indices` or `lengths`: tensors, or lists that become int32 tensors."""
    window = arguments["window"]
    parts = {"pool": window.pool, "indices": window.indices, "lengths": window.lengths}
    for name, value in changes.items():
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.int32, device=window.indices.device)
        parts[name] = value
    return {"window": KVRegion(**parts)}


def rows_of(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The case's tokens `rows` alone."""
    cut = dict(arguments, q=arguments["q"][rows])
    for name in ("window", "compressed"):
        region = arguments[name]
        cut[name] = region and KVRegion(region.pool, region.indices[rows], region.lengths[rows])
    return cut


def _constant(values: list[float], sinks: Tensor, **sizes: int) -> dict[str, Any]:
    arguments = constant_case(values, sinks, kv_format=FP8, **sizes)
    return arguments | {"q": arguments["q"].to(BF16)}
