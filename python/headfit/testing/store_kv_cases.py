"""Problems for `store_kv`: what a case is, its tensors, and a kernel's check against the reference.

Rows are "exact" where every form must give the same bits: small integers times a power of two, so that the sum of
squares has no rounding in any order. All other rows may differ by what the order of that sum changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headfit import kv_cache
from headfit.config import RopeConfig
from headfit.kernels.store_kv_ref import store_kv_ref
from headfit.kv_cache import HEAD_DIM, NOPE_DIM, ROPE_DIM, PackedFp8Format, PagedPool
from headfit.layers.rope import RotaryEmbedding
from headfit.testing.cases import poisoned_pool
from headfit.testing.measure import FP8_KV, Tolerance, assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
POISON = 0xFF
# The same packed keys but for the order of the norm's sum: a value beside a rounding border may go the other way, one
# e4m3 step of up to 2**-3 of it. Fewer than one value in a thousand does: 4e-3 in norm; the cosine is half its square.
FP8_FLIPS = Tolerance(absolute=2**-3, relative=5e-3, cosine=2e-5)


@dataclass(frozen=True, slots=True)
class StoreCase:
    """One call of `store_kv`.

    values: "exact", "random", "zero", or "not finite" (rows and weights with Inf and NaN).
    dropped: how many of the slots are -1.
    strided: kv's rows are cut out of a wider buffer of NaN.
    """

    num_tokens: int = 9
    page_size: int = 64
    dtype: torch.dtype = BF16
    slot_dtype: torch.dtype = torch.int64
    values: str = "exact"
    dropped: int = 2
    strided: bool = False

    @property
    def id(self) -> str:
        """Readable, and different for different cases."""
        parts = [self.values.replace(" ", "-"), f"tokens{self.num_tokens}-page{self.page_size}", short(self.dtype)]
        parts += [short(self.slot_dtype)] * (self.slot_dtype == torch.int32)
        return "-".join(parts + [f"dropped{self.dropped}"] * (self.dropped != 2) + ["strided"] * self.strided)


STORE_CASES = [
    *(StoreCase(page_size=page_size, dtype=dtype) for page_size in (1, 2, 64, 256) for dtype in (BF16, FP16, FP32)),
    StoreCase(slot_dtype=torch.int32, page_size=2),
    StoreCase(strided=True),
    StoreCase(strided=True, dtype=FP32, page_size=3),
    StoreCase(num_tokens=1, dropped=0),
    StoreCase(num_tokens=1, dropped=1),
    StoreCase(num_tokens=67, page_size=7, dropped=0),
    StoreCase(num_tokens=0, dropped=0),
    *(StoreCase(values=values, dtype=dtype) for values in ("random", "zero", "not finite") for dtype in (BF16, FP32)),
    StoreCase(values="random", dtype=FP16),
]


def make_store_case(case: StoreCase, seed: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Keyword arguments of `store_kv` for `case`, into a poisoned pool about half of whose slots are written."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = 2 + 2 * case.num_tokens // case.page_size
    slots = torch.randperm(num_pages * case.page_size, generator=generator)[: case.num_tokens]
    slots[torch.randperm(case.num_tokens, generator=generator)[: case.dropped]] = -1
    kv = rows_of(case.values, (case.num_tokens, HEAD_DIM), generator).to(case.dtype)
    weight = 1 + 0.3 * torch.randn(HEAD_DIM, generator=generator)
    if case.values == "not finite":
        weight[[70, 300]] = math.inf
        weight[[200, 460]] = math.nan
    return {
        "kv": _strided(kv) if case.strided else kv,
        "norm_weight": weight,
        "eps": EPS,
        "cos_sin": angles(case.num_tokens, generator),
        "slots": slots.to(case.slot_dtype),
        "pool": guarded_pool(num_pages, case.page_size, device),
    }


def guarded_pool(num_pages: int, page_size: int, device: torch.device | str) -> PagedPool:
    """A poisoned packed pool with one more page of poison before its memory, where slot -1 would lie."""
    pool = poisoned_pool(PackedFp8Format(), num_pages + 1, page_size, device)
    pool._adopt(num_pages, page_size, pool.kv_format, pool.buffer[1:])
    return pool


def check_store_case(case: StoreCase, seed: int, store_kv: Callable[..., None], device: torch.device | str) -> None:
    """Run `case`, then compare the written rows with the reference's and see all other bytes still poisoned."""
    arguments = on_device(make_store_case(case, seed, device), device)
    store_kv(**arguments)
    check_stored(arguments, exact=case.values != "random")
    if case.values == "random":
        slots = arguments["slots"]
        kept = slots >= 0
        rows = store_float64(**{name: arguments[name] for name in ("kv", "norm_weight", "eps", "cos_sin")})
        assert_close(arguments["pool"].load(slots[kept]), rows[kept.cpu()], FP8_KV, case.id)


def check_stored(arguments: dict[str, Any], *, exact: bool) -> None:
    """Compare what a kernel has stored with the reference of the same `arguments`; NaN need only be NaN."""
    pool, slots = arguments["pool"], arguments["slots"]
    expected = poisoned_pool(pool.kv_format, pool.num_pages, pool.page_size, pool.buffer.device)
    store_kv_ref(**arguments | {"pool": expected})
    written = slots[slots >= 0].long()
    if exact:
        for got, wanted in zip(row_bytes(pool, written), row_bytes(expected, written), strict=True):
            assert torch.equal(got, wanted), (got != wanted).nonzero().tolist()[:8]
    else:
        assert_close(pool.load(written), expected.load(written), FP8_FLIPS)
    assert_poisoned_beside(pool, written)


def row_bytes(pool: PagedPool, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of `slots` as the table in kv_cache.py places them, every NaN the same: uint8 [N, 576] and [N, 8]."""
    data, scales = (pool.buffer[index] for index in _byte_index(pool, slots))
    nope, rope = data.split([kv_cache.NOPE_BYTES, kv_cache.DATA_BYTES - kv_cache.NOPE_BYTES], dim=1)
    nope = torch.where(nope & 0x7F == 0x7F, 0x7F, nope)
    values = rope.contiguous().view(BF16)
    rope = torch.where(values.isnan(), torch.tensor(math.nan, dtype=BF16, device=values.device), values)
    return torch.cat([nope, rope.view(torch.uint8)], dim=1), scales


def assert_poisoned_beside(pool: PagedPool, written: Tensor) -> None:
    """Every byte of the pool is poison, its spare page and its guard included, but for the rows in `written`."""
    if pool.buffer._base is not None:
        assert (pool.buffer._base[0] == POISON).all(), "written before the first page"
    buffer = pool.buffer.clone()
    for index in _byte_index(pool, written):
        assert (buffer[index] != POISON).any(dim=1).all(), "a row was not written"
        buffer[index] = POISON
    assert (buffer == POISON).all(), (buffer != POISON).nonzero().tolist()[:8]


def _byte_index(pool: PagedPool, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    page, offset = slots[:, None] // pool.page_size, slots[:, None] % pool.page_size
    data = offset * kv_cache.DATA_BYTES + torch.arange(kv_cache.DATA_BYTES, device=slots.device)
    first_scale = pool.page_size * kv_cache.DATA_BYTES
    scales = first_scale + offset * kv_cache.SCALE_BYTES + torch.arange(kv_cache.SCALE_BYTES, device=slots.device)
    return [(page, data), (page, scales)]


def edge_case(weight: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Arguments of `store_kv` that store +-`weight` itself: rows of +-1 have a norm factor of exactly 1."""
    kv = torch.ones(2, HEAD_DIM)
    kv[0, ::3], kv[1, 1::2] = -1, -1
    arguments = {
        "kv": kv.to(dtype),
        "norm_weight": weight,
        "eps": 0.0,
        "cos_sin": angles(2, torch.Generator().manual_seed(0)),
        "slots": torch.tensor([3, 0]),
        "pool": poisoned_pool(PackedFp8Format(), 2, 2, device),
    }
    return on_device(arguments, device)


def amax_weights(dtype: torch.dtype) -> Tensor:
    """Weights [N, 512] whose groups have their largest value at, just below and just above each border of a scale."""
    powers = 2.0 ** torch.tensor([*range(-24, -18), -14, -13, *range(-3, 10), 63, 118, 119, 120]).double()
    borders = torch.cat([powers * kv_cache.FP8_MAX, powers, torch.tensor([0.0, kv_cache.MIN_AMAX])])
    borders = borders[borders < torch.finfo(dtype).max].to(dtype)
    borders = torch.cat([borders, torch.tensor([torch.finfo(dtype).max], dtype=dtype)])
    steps = borders.view(torch.int32 if dtype == FP32 else torch.int16)
    around = torch.cat([steps, steps + 1, (steps - 1).clamp(min=0)]).view(dtype).float()
    amax = around[around.isfinite()].unique()
    amax = torch.nn.functional.pad(amax, (0, -len(amax) % kv_cache.NUM_GROUPS), value=1.0).view(-1, kv_cache.NUM_GROUPS)
    fractions = torch.linspace(-1, 1, kv_cache.GROUP_SIZE)
    nope = (amax[..., None] * fractions).flatten(1)
    return torch.cat([nope, torch.randn(len(nope), ROPE_DIM, generator=torch.Generator().manual_seed(0))], dim=1)


def rounding_weight(dtype: torch.dtype) -> Tensor:
    """A weight [512] that holds the middle of every two e4m3 neighbours, and the values of `dtype` beside it."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    steps = ((e4m3[1:] + e4m3[:-1]) / 2).to(dtype).view(torch.int32 if dtype == FP32 else torch.int16)
    values = torch.cat([steps, steps + 1, steps - 1]).view(dtype).float()
    # A group of 64 is 63 of them and 448, which makes its scale 1; one group is left over.
    groups = torch.nn.functional.pad(values.view(-1, kv_cache.GROUP_SIZE - 1), (0, 1), value=kv_cache.FP8_MAX)
    return torch.nn.functional.pad(groups.flatten(), (0, HEAD_DIM - groups.numel()), value=1.5)


def store_float64(*, kv: Tensor, norm_weight: Tensor, eps: float, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """The rows that `store_kv` writes, before any rounding: float64 [num_tokens, 512] on the CPU."""
    return rotated_float64(normed_float64(kv, eps) * norm_weight.cpu().double(), cos_sin)


def normed_float64(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last axis, in float64 on the CPU."""
    x = x.cpu().double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated_float64(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """The last 64 channels turned as complex numbers, in float64 on the CPU."""
    cos, sin = (part.cpu().double().view(len(x), *[1] * (x.dim() - 2), -1) for part in cos_sin)
    pairs = torch.view_as_complex(x[..., NOPE_DIM:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    return torch.cat([x[..., :NOPE_DIM], turned], dim=-1)


def angles(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """cos and sin at random positions up to a million."""
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), ROPE_DIM)
    return rotary(torch.randint(2**20, (num_tokens,), generator=generator))


def on_device(arguments: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """`arguments` with every tensor on `device`, strides kept."""
    return {name: _moved(value, torch.device(device)) for name, value in arguments.items()}


def short(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if not isinstance(value, Tensor) or value.device.type == device.type:
        return value
    if value._base is None:
        return value.to(device)
    return value._base.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def _strided(rows: Tensor) -> Tensor:
    """`rows` [N, C] cut out of rows of odd length."""
    buffer = torch.full((len(rows), rows.shape[1] + 13), math.nan, dtype=rows.dtype)
    part = buffer[:, 5 : 5 + rows.shape[1]]
    return part.copy_(rows)


def rows_of(values: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float32 rows of the kind that `values` names."""
    if values == "zero":
        return torch.where(torch.rand(shape, generator=generator) < 0.5, -0.0, 0.0)
    scale = torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), generator=generator).float())
    if values == "random":
        return scale * torch.randn(shape, generator=generator)
    # Up to 100: 512 squares stay below 2**24; a fifth is zero, so that groups differ.
    rows = torch.randint(-100, 101, shape, generator=generator).float()
    rows = scale * torch.where(torch.rand(shape, generator=generator) < 0.2, 0.0, rows)
    if values == "not finite":
        flat = rows.view(-1, shape[-1])
        flat[0, 3], flat[1, 470] = math.inf, -math.inf
        # The NaN of GPU arithmetic: adding to its bits, to round it, would overflow.
        flat.view(torch.int32)[[2, 3], [100, 511]] = 0x7FFFFFFF
    return rows
