"""Packed fp8 pages, unquantised pages, paged pools, and the comparer. Sizes are literals here, on purpose: kv_cache.py
derives them, this file states them. "Row n" is row n of the list of known faults."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from headfit import kv_cache
from headfit.kv_cache import ModelDtypeFormat, PackedFp8Format, PagedPool, check_packed_cache, check_slots, pack, unpack
from headfit.testing import measure

PAGE_SIZES = [1, 2, 3, 64, 256]
FORMATS = {"fp8": PackedFp8Format(), "model": ModelDtypeFormat(torch.float32, 512)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(2024)


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def kv_format(request):
    return request.param


def make_pool(kv_format, num_pages=3, page_size=4):
    return PagedPool(num_pages=num_pages, page_size=page_size, kv_format=kv_format, device="cpu")


def poison(pool):
    """Every byte 0xFF: NaN as e4m3fn, as e8m0, as bfloat16 and as float32."""
    pool.buffer.view(torch.uint8).fill_(0xFF)
    return pool


# The independent packer: the byte table written again in plain Python, over doubles.


def e4m3_values():
    """Value of each finite non-negative e4m3fn byte 0..126, ascending."""
    return [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]


def naive_e4m3(x):
    magnitude = min(abs(x), 448.0)
    # Nearest value; a tie goes to the even byte.
    byte = min(range(127), key=lambda b: (abs(E4M3[b] - magnitude), b % 2))
    return byte | (0x80 if math.copysign(1, x) < 0 else 0)


E4M3 = e4m3_values()


def naive_bf16_bytes(x):
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def naive_pack(row):
    data, scales = b"", b""
    for start in range(0, 448, 64):
        group = row[start : start + 64]
        amax = max(1e-4, *(abs(x) for x in group))
        exponent = -40
        while 448.0 * 2.0**exponent < amax:
            exponent += 1
        data += bytes(naive_e4m3(x / 2.0**exponent) for x in group)
        scales += bytes([exponent + 127])
    return data + b"".join(naive_bf16_bytes(x) for x in row[448:]), scales + b"\0"


def interesting_rows(dtype):
    spread = torch.randn(4, 512) * torch.exp2(torch.randint(-20, 20, (4, 512)).float())
    ties = torch.arange(512).float().sub(200.5).expand(1, 512)
    edges = torch.tensor([448.0, 448.0 * 2, 449.0, 224.0, 1e-4, 2.0**-22, 1.0, -0.0]).repeat_interleave(64)[None]
    tiny = torch.full((1, 512), 2.0**-140)
    return torch.cat([spread, torch.randn(2, 512), ties, edges, tiny, torch.zeros(1, 512)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_pack_equals_the_naive_packer(dtype):
    kv = interesting_rows(dtype)
    data, scales = pack(kv)
    for n, row in enumerate(kv.double().tolist()):
        assert (bytes(data[n].tolist()), bytes(scales[n].tolist())) == naive_pack(row), f"row {n}"


def test_unpack_reads_every_scale_and_every_e4m3_byte():
    data, scales = torch.zeros(256, 576, dtype=torch.uint8), torch.zeros(256, 8, dtype=torch.uint8)
    data[:, :64] = 0x38  # e4m3 1.0
    scales[:, 0] = torch.arange(256)
    data[:, 64] = torch.arange(256)
    scales[:, 1] = 127
    scales[:, 7] = 255  # padding: not read
    rows = unpack(data, scales)
    assert rows[:255, 0].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert rows.isnan().nonzero().tolist() == [[127, 64], *([255, c] for c in range(65))]  # e4m3 NaNs: 0x7F, 0xFF
    assert rows[:127, 64].tolist() == E4M3 and rows[128:255, 64].tolist() == [-v for v in E4M3]


@pytest.mark.parametrize("exponent", range(-13, 120))
def test_scales_are_exact_at_powers_of_two(exponent):
    """448 * 2**e takes scale 2**e and the next float above it 2**(e + 1); powers of two survive unchanged."""
    top = torch.tensor(448.0) * 2.0**exponent
    kv = torch.zeros(3, 512)
    kv[0, 0], kv[1, 0], kv[2, :448] = top, torch.nextafter(top, torch.tensor(math.inf)), 2.0**exponent
    data, scales = pack(kv)
    assert scales[:2, 0].tolist() == [127 + exponent, 128 + exponent]
    rows = unpack(data, scales)
    assert torch.equal(rows[0], kv[0]) and torch.equal(rows[2], kv[2])


def test_smallest_scale_and_zero_rows():
    data, scales = pack(torch.zeros(2, 512))
    assert scales.tolist() == [[127 - 22] * 7 + [0]] * 2
    assert not data.any() and torch.equal(unpack(data, scales), torch.zeros(2, 512))


any_float32 = hnp.arrays(np.float32, (2, 512), elements=st.floats(width=32), fill=st.floats(width=32))
finite = st.floats(-(2.0**127), 2.0**127, width=32)  # above, rounding may reach Inf
finite_float32 = hnp.arrays(np.float32, (2, 512), elements=finite, fill=finite)


@settings(max_examples=60, deadline=None)
@given(any_float32)
def test_any_input_packs_and_bad_groups_are_nan_as_a_whole(array):
    kv = torch.from_numpy(array)
    data, scales = pack(kv)
    bad = ~kv[:, :448].reshape(2, 7, 64).isfinite().all(-1)
    rows = unpack(data, scales)
    assert torch.equal(scales[:, :7] == 255, bad)
    assert torch.equal(rows[:, :448].reshape(2, 7, 64).isnan(), bad[..., None].expand(2, 7, 64))
    assert torch.equal(rows[:, 448:].isnan(), kv[:, 448:].isnan())
    # The data bytes of a bad group say NaN by themselves, so a reader that ignores the scale is not fooled.
    assert ((data[:, :448].reshape(2, 7, 64)[bad] & 0x7F) == 0x7F).all()


@settings(max_examples=60, deadline=None)
@given(finite_float32)
def test_round_trip_error_row_24(array):
    """Relative error at most 2**-4 where the scaled value is e4m3-normal, half a subnormal step below; bf16 as bf16."""
    kv = torch.from_numpy(array)
    data, scales = pack(kv)
    rows = unpack(data, scales)
    scale = torch.exp2(scales[:, :7].double() - 127).repeat_interleave(64, dim=1)
    x = kv[:, :448].double()
    error = (rows[:, :448].double() - x).abs()
    assert (x.abs() <= 448 * scale).all()
    assert (error <= torch.where(x.abs() >= 2**-6 * scale, x.abs() * 2**-4, 2**-10 * scale)).all()
    assert torch.equal(rows[:, 448:], kv[:, 448:].bfloat16().float())


@settings(max_examples=60, deadline=None)
@given(finite_float32)
def test_packing_what_was_unpacked_changes_nothing(array):
    """Values never change again. Bytes may once: where a group's largest value rounded down to 224, half the scale and
    448 say the same."""
    first = pack(torch.from_numpy(array))
    rows = unpack(*first)
    assert rows.isfinite().all()
    second = pack(rows)
    assert torch.equal(unpack(*second), rows)
    assert all(torch.equal(a, b) for a, b in zip(pack(unpack(*second)), second, strict=True))
    top = rows[:, :448].reshape(2, 7, 64).abs().amax(-1)
    stable = top != 224 * torch.exp2(first[1][:, :7].float() - 127)
    assert torch.equal(first[1][:, :7][stable], second[1][:, :7][stable])
    nope = [data[:, :448].reshape(2, 7, 64)[stable] for data, _ in (first, second)]
    assert torch.equal(*nope) and torch.equal(first[0][:, 448:], second[0][:, 448:])


def test_finite_values_beyond_the_last_rounding_read_as_inf():
    kv = torch.full((1, 512), torch.finfo(torch.float32).max)
    kv[0, 1:] = 247 * 2.0**120
    data, scales = pack(kv)
    rows = unpack(data, scales)
    assert scales[0].tolist() == [120 + 127, *[120 + 127] * 6, 0]
    assert rows[0, 0] == math.inf and (rows[0, 1:448] == 240 * 2.0**120).all()


def test_strided_and_leading_shapes():
    kv = torch.randn(6, 3, 1024, dtype=torch.bfloat16)[::2, :, ::2]
    data, scales = pack(kv)
    flat = pack(kv.reshape(-1, 512).contiguous())
    assert data.shape == (3, 3, 576) and scales.shape == (3, 3, 8)
    assert torch.equal(data.flatten(0, 1), flat[0]) and torch.equal(scales.flatten(0, 1), flat[1])
    odd = torch.zeros(9 * 577 + 1, dtype=torch.uint8)[1:].view(9, 577)[:, :576].copy_(flat[0])
    assert torch.equal(unpack(odd, flat[1]), unpack(*flat))
    assert torch.equal(unpack(odd[:1], flat[1][:1]), unpack(*flat)[:1])
    assert unpack(*pack(torch.zeros(0, 512))).shape == (0, 512)


@pytest.mark.parametrize(("page_size", "stride"), [(256, 149_760), (64, 37_440), (2, 1_728), (1, 1_152), (3, 2_304)])
def test_page_bytes_row_23(page_size, stride):
    pool = make_pool(PackedFp8Format(), num_pages=2, page_size=page_size)
    assert PackedFp8Format().page_stride(page_size) == stride
    assert pool.buffer.shape == (3, stride) and pool.buffer.dtype == torch.uint8  # two pages and the spare one
    view = pool.kernel_view()
    assert view.shape == (2, page_size, 1, 584) and view.stride() == (stride, 584, 584, 1)
    assert view.data_ptr() == pool.buffer.data_ptr()


def test_model_page_bytes():
    assert ModelDtypeFormat(torch.bfloat16, 128).page_stride(64) == 64 * 128 * 2
    assert make_pool(ModelDtypeFormat(torch.bfloat16, 128)).buffer.shape == (4, 4, 128)
    assert (kv_cache.DATA_BYTES, kv_cache.TOKEN_BYTES) == (576, 584)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_planar_page_mark_row_22(page_size):
    """Bytes placed by hand: token t is 1.0 with scale 2**(t % 32), so it reads as that constant."""
    pool = poison(make_pool(PackedFp8Format(), num_pages=2, page_size=page_size))
    page = pool.buffer[1]
    mark = [2.0 ** (t % 32) for t in range(page_size)]
    for t in range(page_size):
        page[t * 576 : t * 576 + 448] = 0x38
        page[t * 576 + 448 : t * 576 + 576] = torch.tensor(list(naive_bf16_bytes(mark[t])) * 64)
        page[page_size * 576 + 8 * t : page_size * 576 + 8 * t + 7] = 127 + t % 32
    rows = pool.load(torch.arange(page_size, 2 * page_size))
    assert torch.equal(rows, torch.tensor(mark)[:, None].expand(page_size, 512))
    assert torch.equal(rows.double().mean(0), torch.full((512,), sum(mark) / page_size, dtype=torch.float64))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_store_writes_its_own_bytes_and_no_others(page_size, dtype):
    pool = poison(make_pool(PackedFp8Format(), num_pages=3, page_size=page_size))
    slots = torch.tensor([2 * page_size, -1, page_size - 1, -1])
    kv = torch.randn(4, 1024, dtype=dtype)[:, ::2]
    pool.store(slots, kv)
    expected = torch.full_like(pool.buffer[:3], 0xFF)
    for n in (0, 2):
        page, t = divmod(slots[n].item(), page_size)
        data, scales = naive_pack(kv[n].double().tolist())
        expected[page, t * 576 : t * 576 + 576] = torch.tensor(list(data))
        expected[page, page_size * 576 + 8 * t : page_size * 576 + 8 * t + 8] = torch.tensor(list(scales))
    assert torch.equal(pool.buffer[:3], expected)
    assert torch.equal(pool.load(slots)[[0, 2]], unpack(*pack(kv))[[0, 2]])


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_absent_slots_give_zeros_beside_nan_row_16(kv_format, slot_dtype):
    """Page 0 is NaN and never indexed: what is read stays finite, and a dropped row lands nowhere addressable."""
    pool = poison(make_pool(kv_format))
    kv = torch.randn(2, 512)
    pool.store(torch.tensor([5, 11], dtype=slot_dtype), kv)
    before = pool.buffer[: pool.num_pages].clone().view(torch.uint8)
    pool.store(torch.tensor([-1, -1], dtype=slot_dtype), kv)
    assert torch.equal(pool.buffer[: pool.num_pages].view(torch.uint8), before)
    rows = pool.load(torch.tensor([[-1, 5, -1], [11, -1, -1]], dtype=slot_dtype))
    stored = kv if kv_format.name == "model" else unpack(*pack(kv))
    assert rows.shape == (2, 3, 512) and rows.dtype == torch.float32
    assert torch.equal(rows[0, 1], stored[0]) and torch.equal(rows[1, 0], stored[1])
    assert torch.equal(rows[[0, 0, 1, 1], [0, 2, 1, 2]], torch.zeros(4, 512))
    assert pool.load(torch.tensor([0])).isnan().all()


def test_model_format_keeps_its_dtype_exactly():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pool = make_pool(ModelDtypeFormat(dtype, 512))
        kv = torch.randn(5, 512)
        pool.store(torch.tensor([0, 3, 4, 7, 11]), kv.requires_grad_())
        assert pool.buffer.dtype == dtype and not pool.buffer.requires_grad
        assert torch.equal(pool.load(torch.tensor([11, 7, 4, 3, 0])), kv.to(dtype).float().flip(0))


def test_empty_work(kv_format):
    pool = poison(make_pool(kv_format))
    pool.store(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 512))
    assert (pool.buffer.view(torch.uint8) == 0xFF).all()
    assert pool.load(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 512)
    nothing = make_pool(kv_format, num_pages=0)
    nothing.store(torch.tensor([-1]), torch.ones(1, 512))
    assert nothing.num_slots == 0 and torch.equal(nothing.load(torch.tensor([-1])), torch.zeros(1, 512))


class OpRecorder(TorchDispatchMode):
    """Names of the operators run inside, and the largest allocation among their results, in bytes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        if isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


HOST_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique_dim", "_unique2"}


def test_store_and_load_never_wait_for_the_device_nor_copy_the_pool(kv_format):
    pool = make_pool(kv_format, num_pages=2000, page_size=16)
    with OpRecorder() as recorder:
        pool.store(torch.tensor([3, -1]), torch.randn(2, 512))
        pool.load(torch.tensor([3, -1]))
    assert not recorder.names & HOST_SYNCS and recorder.names & {"index_put_"}
    assert 0 < recorder.largest < 20_000 < pool.buffer.nbytes
    with OpRecorder() as recorder:
        pool.find_corrupt_slots(torch.tensor([3]))
    assert recorder.names & HOST_SYNCS  # the recorder does see them


@pytest.mark.parametrize(("page_size", "page", "stride"), [(256, 14_340, 149_760), (64, 57_359, 37_440)])
def test_byte_offsets_beyond_32_bits_row_18(page_size, page, stride):
    """Each page is the first to start beyond 2**31 bytes. The memory is uninitialised: few pages are touched."""
    assert (page - 1) * stride < 2**31 < page * stride
    buffer = torch.empty(page + 1, stride, dtype=torch.uint8)
    cache = buffer.as_strided((page + 1, page_size, 1, 584), (stride, 584, 584, 1))
    pool = PagedPool.from_packed_cache("cache", cache)
    buffer[0], buffer[page] = 0xFF, 0xFF
    slots = torch.tensor([page * page_size, page * page_size + page_size - 1], dtype=torch.int32)
    pool.store(slots, torch.tensor([[7.0], [9.0]]).expand(2, 512))
    assert torch.equal(pool.load(slots), torch.tensor([[7.0], [9.0]]).expand(2, 512))
    assert (buffer[0] == 0xFF).all()
    assert (buffer[page] != 0xFF).sum() == 2 * 584
    assert page_size != 256 or slots[0] == 3_671_040


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=["uint8", "float8"])
def test_packed_cache_is_wrapped_without_a_copy_row_21(dtype):
    owner = poison(make_pool(PackedFp8Format(), num_pages=2, page_size=64))
    owner.store(torch.tensor([64, 127]), torch.ones(2, 512))
    view = owner.kernel_view()
    pool = PagedPool.from_packed_cache("k_cache", view.view(dtype))
    assert (pool.num_pages, pool.page_size, pool.num_slots) == (2, 64, 128)
    slots = torch.tensor([127, -1, 64])
    assert torch.equal(pool.load(slots), torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 512))
    pool.store(torch.tensor([-1, 5]), torch.tensor([[3.0], [4.0]]).expand(2, 512))
    assert torch.equal(owner.load(torch.tensor([5, 127])), torch.tensor([[4.0], [1.0]]).expand(2, 512))
    assert owner.find_corrupt_slots(torch.arange(128)) == [s for s in range(128) if s not in (5, 64, 127)]
    assert pool.kernel_view().data_ptr() == view.data_ptr() and pool.kernel_view().stride() == view.stride()
    assert check_packed_cache("k_cache", torch.zeros(2, 64, 1, 584, dtype=dtype)).dtype == torch.uint8


@pytest.mark.parametrize(
    ("cache", "error", "words"),
    [
        (torch.zeros(2, 64, 1, 512, dtype=torch.uint8), ValueError, ["k_cache", "(2, 64, 1, 512)", "584"]),
        (torch.zeros(2, 64, 584, dtype=torch.uint8), ValueError, ["k_cache", "(2, 64, 584)", "584"]),
        (torch.zeros(2, 64, 2, 584, dtype=torch.uint8), ValueError, ["k_cache", "(2, 64, 2, 584)"]),
        (torch.zeros(2, 0, 1, 584, dtype=torch.uint8), ValueError, ["k_cache", "(2, 0, 1, 584)"]),
        (torch.zeros(2, 64, 1, 656, dtype=torch.uint8)[..., :584], ValueError, ["k_cache", "strides", "656"]),
        (torch.zeros(1, 64, 1, 584, dtype=torch.uint8).expand(2, -1, -1, -1), ValueError, ["k_cache", "strides"]),
        (torch.zeros(2, 64, 1, 584), TypeError, ["k_cache", "float32", "uint8", "float8_e4m3fn"]),
    ],
)
def test_wrong_packed_cache_is_refused_row_21(cache, error, words):
    with pytest.raises(error) as caught:
        check_packed_cache("k_cache", cache)
    assert all(word in str(caught.value) for word in words)


def test_corrupt_slots_are_named():
    pool = make_pool(PackedFp8Format())
    pool.store(torch.arange(12), torch.ones(12, 512))
    pool.buffer[1, 4 * 576 + 8 * 2 + 6] = 255  # slot 6, its last scale
    pool.buffer[2, 4 * 576 + 8 * 1 + 7] = 255  # slot 9, its padding
    assert pool.find_corrupt_slots(torch.tensor([[9, 6, -1], [6, 0, 11]])) == [6]
    assert pool.find_corrupt_slots(torch.tensor([-1])) == []
    bad = torch.ones(1, 512)
    bad[0, 0] = math.inf
    pool.store(torch.tensor([3]), bad)
    assert pool.find_corrupt_slots(torch.arange(12)) == [3, 6]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 12]), r"indices\[row 1\] is 12; .* 11"),
        (torch.tensor([[0, -1, 3], [11, 2, -2]]), r"indices\[row 1, column 2\] is -2"),
        (torch.tensor([[[0, -1]], [[12, 99]]], dtype=torch.int32), r"indices\[row 1, column 0\] is 12"),
    ],
)
def test_check_slots_names_the_place(slots, message):
    with pytest.raises(IndexError, match=message):
        check_slots("indices", slots, 12)
    assert check_slots("indices", slots.clamp(-1, 11), 12) is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make_pool(PackedFp8Format(), page_size=0), ValueError, "page_size is 0; .* at least 1"),
        (lambda: make_pool(PackedFp8Format(), num_pages=-1), ValueError, "num_pages is -1; .* at least 0"),
        (lambda: make_pool(PackedFp8Format(), page_size=2.0), ValueError, r"page_size is 2\.0"),
        (lambda: PackedFp8Format().page_stride(-3), ValueError, "page_size is -3"),
        (lambda: ModelDtypeFormat(torch.int8), TypeError, "dtype.*int8.*bfloat16"),
        (lambda: ModelDtypeFormat(torch.float32, 0), ValueError, "head_dim is 0"),
        (lambda: make_pool(ModelDtypeFormat(torch.float32)).kernel_view(), ValueError, "kv_format is 'model'.*'fp8'"),
        (lambda: pack(torch.zeros(2, 448)), ValueError, r"kv has shape \(2, 448\).*512"),
        (lambda: pack(torch.zeros(2, 512, dtype=torch.float64)), TypeError, "kv.*float64.*float32"),
        (lambda: unpack(*[torch.zeros(2, 576, dtype=torch.uint8)] * 2), ValueError, r"scales has shape \(2, 576\).*8"),
        (lambda: make_pool(PackedFp8Format()).load(torch.zeros(2)), TypeError, "slots.*float32.*int64"),
    ],
)
def test_clear_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("slots", "kv", "error", "words"),
    [
        (
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(2, 512),
            ValueError,
            r"slots has shape \(3,\) and kv \(2, 512\)",
        ),
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 512), ValueError, r"slots has shape \(1, 2\)"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 64), ValueError, r"kv has shape \(2, 64\).*512"),
        (torch.zeros(2), torch.zeros(2, 512), TypeError, "slots.*float32"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 512).int(), TypeError, "kv.*int32"),
    ],
)
def test_store_refuses_before_it_writes(kv_format, slots, kv, error, words):
    pool = poison(make_pool(kv_format))
    with pytest.raises(error, match=words):
        pool.store(slots, kv)
    assert (pool.buffer.view(torch.uint8) == 0xFF).all()


# The comparer.


def test_relative_norm_and_cosine():
    ref = torch.tensor([3.0, 4.0])
    assert measure.relative_norm(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert measure.relative_norm(ref, torch.zeros(2)) == 5.0 and measure.cosine(ref, torch.zeros(2)) == 0.0
    assert measure.cosine(2 * ref, ref) == pytest.approx(1.0) and measure.cosine(ref.flip(0), ref) == pytest.approx(
        0.96
    )
    assert measure.relative_norm(torch.tensor([math.nan, 4.0]), ref) == math.inf
    lse = torch.tensor([-math.inf, 1.0])
    assert measure.relative_norm(lse, lse) == 0.0 and measure.relative_norm(-lse, lse) == math.inf
    with pytest.raises(ValueError, match=r"\(2,\)"):
        measure.relative_norm(torch.zeros(1, 2), ref)
    with pytest.raises(ValueError, match="NaN"):
        measure.relative_norm(ref, torch.tensor([math.nan, 4.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.1])
def test_assert_close_names_the_worst_element(bad):
    ref = torch.linspace(-1, 1, 600).reshape(2, 300)
    measure.assert_close(ref + 1e-7, ref, measure.FLOAT32)
    measure.assert_close(ref.bfloat16(), ref, measure.BF16_OUTPUT)
    out = ref.clone()
    out[1, 299] = bad
    with pytest.raises(AssertionError, match=r"lse .* at \(1, 299\)"):
        measure.assert_close(out, ref, measure.FP8_KV, "lse")


def test_named_tolerances_fit_what_they_name():
    kv = torch.randn(64, 512)
    rows = unpack(*pack(kv))
    measure.assert_close(rows, kv, measure.FP8_KV)
    with pytest.raises(AssertionError):
        measure.assert_close(rows, kv, measure.BF16_OUTPUT)
    with pytest.raises(AssertionError):
        measure.assert_close(kv.bfloat16(), kv, measure.FLOAT32)
