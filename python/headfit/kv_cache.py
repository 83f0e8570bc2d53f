"""KV-cache bytes: the packed fp8 page format, the unquantised format, and the paged pool over either.

A packed token is 584 bytes in two places of its page. Sizes are in bytes; t is the token's offset in the page.

    | bytes of the page                      | what                                                     |
    |----------------------------------------|----------------------------------------------------------|
    | t * 576 + [0, 448)                     | 448 float8_e4m3fn: channels [0, 448)                     |
    | t * 576 + [448, 576)                   | 64 bfloat16, little-endian: RoPE channels [448, 512)     |
    | page_size * 576 + t * 8 + g, g in 0..6 | float8_e8m0fnu scale of channels [64 g, 64 g + 64)       |
    | page_size * 576 + t * 8 + 7            | padding: written as 0, never read                        |
    | from page_size * 584 to the stride     | padding: the stride is rounded up to a multiple of 576   |

Channel c < 448 reads as `e4m3 * 2 ** (scale byte - 127)`; scale byte 255 is NaN. The writer's scale is
`2 ** ceil(log2(max(amax, 1e-4) / 448))`, as SGLang's DeepSeek-V4 store kernels have it, and it is rounded to that power
of two before anything is divided by it. The page is FlashMLA's DeepSeek-V4 layout.

A slot is `page * page_size + offset`; -1 means absent.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM  # channels kept as fp8
GROUP_SIZE = 64  # channels that share a scale
NUM_GROUPS = NOPE_DIM // GROUP_SIZE

NOPE_BYTES = NOPE_DIM  # one byte a channel; RoPE channels start here within a token's data
DATA_BYTES = NOPE_BYTES + 2 * ROPE_DIM
SCALE_BYTES = NUM_GROUPS + 1
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES
PAGE_ALIGNMENT = DATA_BYTES  # page strides are multiples of this, so that pages share one grid of data rows

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
MIN_AMAX = 1e-4  # below this a group's amax counts as this, so that a zero row has a finite scale
SCALE_BIAS = 127
SCALE_NAN = 255

_FP8_MAX_MANTISSA, _FP8_MAX_EXPONENT = math.frexp(FP8_MAX)
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
_SLOT_DTYPES = (torch.int64, torch.int32)


def pack(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to their packed bytes: `kv` [..., 512] of any strides -> (uint8 [..., 576], uint8 [..., 8]).

    `kv` is float32, bfloat16 or float16 (else TypeError; another width is a ValueError). A group of 64 channels that
    holds an Inf or NaN becomes NaN as a whole, in its data and in its scale byte, so that corruption is never
    hidden. RoPE channels are rounded to bfloat16, where Inf and NaN stay what they are. A finite value that either
    rounding carries past the float32 range (the top 1/32 of it as e4m3, 1/512 as bfloat16) reads back as Inf.
    """
    _check_dtype("kv", kv.dtype, _FLOAT_DTYPES)
    _check_width("kv", kv, HEAD_DIM)
    groups = kv[..., :NOPE_DIM].float().unflatten(-1, (NUM_GROUPS, GROUP_SIZE))
    scales = _scale_bytes(groups.abs().amax(-1))
    inverse = torch.where(scales == SCALE_NAN, SCALE_NAN, 2 * SCALE_BIAS - scales)
    # Exact, and within +-448 without a clamp: the scale was chosen so.
    scaled = groups * _decode_scales(inverse.to(torch.uint8)).unsqueeze(-1)
    nope = scaled.to(torch.float8_e4m3fn).flatten(-2)
    rope = kv[..., NOPE_DIM:].to(torch.bfloat16).contiguous()
    data = torch.cat([nope.view(torch.uint8), rope.view(torch.uint8)], dim=-1)
    return data, F.pad(scales.to(torch.uint8), (0, SCALE_BYTES - NUM_GROUPS))


def unpack(data: Tensor, scales: Tensor) -> Tensor:
    """Dequantise packed bytes: (`data` uint8 [..., 576], `scales` uint8 [..., 8]) -> float32 [..., 512].

    Every e8m0 exponent is accepted (products beyond float32 become Inf); scale byte 255 gives NaN.
    """
    for name, value, width in (("data", data, DATA_BYTES), ("scales", scales, SCALE_BYTES)):
        _check_dtype(name, value.dtype, (torch.uint8,))
        _check_width(name, value, width)
    if data.shape[:-1] != scales.shape[:-1]:
        raise ValueError(f"scales has leading shape {tuple(scales.shape[:-1])}; data has {tuple(data.shape[:-1])}")
    nope = data[..., :NOPE_BYTES].view(torch.float8_e4m3fn).float().unflatten(-1, (NUM_GROUPS, GROUP_SIZE))
    nope = nope * _decode_scales(scales[..., :NUM_GROUPS]).unsqueeze(-1)
    # Cloned: the bytes of a caller's slice may start at an odd address, which a bfloat16 view refuses.
    rope = data[..., NOPE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return torch.cat([nope.flatten(-2), rope.float()], dim=-1)


def _scale_bytes(amax: Tensor) -> Tensor:
    """Biased exponent of `2 ** ceil(log2(max(amax, 1e-4) / 448))`, int32; SCALE_NAN where amax is not finite.

    With amax = m * 2**e and 448 = M * 2**E, both m and M in [0.5, 1), the ceiling is e - E, plus one where m > M:
    exact, where a float log2 is off by one near powers of two.
    """
    mantissa, exponent = torch.frexp(amax.clamp_min(MIN_AMAX))
    exponent = exponent - _FP8_MAX_EXPONENT + (mantissa > _FP8_MAX_MANTISSA)
    return torch.where(amax.isfinite(), exponent + SCALE_BIAS, SCALE_NAN)


def _decode_scales(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e8m0fnu).float()


def check_packed_cache(name: str, cache: Tensor) -> Tensor:
    """Check that `cache` is a packed cache [num_pages, page_size, 1, 584] and return it as uint8, without a copy.

    dtype uint8 or float8_e4m3fn (else TypeError). Each page is one run of bytes; pages may be further apart than
    that (`PackedFp8Format.page_stride`). Another shape or an interleaved stride is a ValueError.
    """
    _check_dtype(name, cache.dtype, _BYTE_DTYPES)
    wanted = f"(num_pages, page_size, 1, {TOKEN_BYTES})"
    if cache.dim() != 4 or cache.shape[1] < 1 or tuple(cache.shape[2:]) != (1, TOKEN_BYTES):
        raise ValueError(f"{name} has shape {tuple(cache.shape)}; a packed fp8 cache is {wanted}")
    num_pages, page_size = cache.shape[:2]
    one_run = cache.stride(3) == 1 and (page_size == 1 or cache.stride(1) == TOKEN_BYTES)
    if not one_run or (num_pages > 1 and cache.stride(0) < page_size * TOKEN_BYTES):
        raise ValueError(
            f"{name} has strides {cache.stride()}; a packed fp8 cache {wanted} needs "
            f"(at least {page_size * TOKEN_BYTES}, {TOKEN_BYTES}, any, 1)"
        )
    return cache.view(torch.uint8)


def check_slots(name: str, slots: Tensor, num_slots: int) -> None:
    """Raise IndexError naming row and column of the first entry of `slots` (int [...]) outside -1..num_slots - 1.

    Leading axes count as one row axis. Waits for the device: for checked mode, never in a captured graph.
    """
    _check_dtype(name, slots.dtype, _SLOT_DTYPES)
    table = slots.flatten(0, -2) if slots.dim() > 1 else slots
    bad = ((table < -1) | (table >= num_slots)).nonzero()
    if len(bad):
        where = bad[0].tolist()
        place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "column"), where, strict=False))
        raise IndexError(f"{name}[{place}] is {table[tuple(where)].item()}; allowed: -1 (absent) to {num_slots - 1}")


class KVFormat(Protocol):
    """How one token's latent [head_dim] lies in a page. PagedPool hands `store` and `load` int64 slots without -1."""

    name: ClassVar[str]
    head_dim: int

    def page_stride(self, page_size: int) -> int:
        """Bytes from one page to the next."""

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        """Zeroed pages, page-major: `buffer[p]` is page p."""

    def store(self, buffer: Tensor, page_size: int, slots: Tensor, kv: Tensor) -> None:
        """Write `kv` [N, head_dim] to `slots` [N]."""

    def load(self, buffer: Tensor, page_size: int, slots: Tensor) -> Tensor:
        """Read `slots` [...] as float32 [..., head_dim]."""


@dataclass(frozen=True, slots=True)
class PackedFp8Format:
    """The packed page of the module docstring; a buffer is uint8 [num_pages, page_stride]."""

    name: ClassVar[str] = "fp8"
    head_dim: ClassVar[int] = HEAD_DIM

    def page_stride(self, page_size: int) -> int:
        _check_count("page_size", page_size, 1)
        return -(-page_size * TOKEN_BYTES // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        return torch.zeros(num_pages, self.page_stride(page_size), dtype=torch.uint8, device=device)

    def store(self, buffer: Tensor, page_size: int, slots: Tensor, kv: Tensor) -> None:
        place = slots // page_size, slots % page_size
        for view, rows in zip(self._views(buffer, page_size), pack(kv), strict=True):
            view[place] = rows

    def load(self, buffer: Tensor, page_size: int, slots: Tensor) -> Tensor:
        place = slots // page_size, slots % page_size
        return unpack(*(view[place] for view in self._views(buffer, page_size)))

    @staticmethod
    def _views(buffer: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """Views [pages, page_size, 576] and [pages, page_size, 8]; torch indexes them with 64-bit byte offsets."""
        middle, end = page_size * DATA_BYTES, page_size * TOKEN_BYTES
        data, scales = buffer[:, :middle], buffer[:, middle:end]
        return data.unflatten(1, (page_size, DATA_BYTES)), scales.unflatten(1, (page_size, SCALE_BYTES))


@dataclass(frozen=True, slots=True)
class ModelDtypeFormat:
    """Unquantised rows: the oracle mode and the CPU default. A buffer is `dtype` [num_pages, page_size, head_dim]."""

    dtype: torch.dtype
    head_dim: int = HEAD_DIM
    name: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        _check_dtype("dtype", self.dtype, _FLOAT_DTYPES)
        _check_count("head_dim", self.head_dim, 1)

    def page_stride(self, page_size: int) -> int:
        _check_count("page_size", page_size, 1)
        return page_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        return torch.zeros(num_pages, page_size, self.head_dim, dtype=self.dtype, device=device)

    def store(self, buffer: Tensor, page_size: int, slots: Tensor, kv: Tensor) -> None:
        buffer.flatten(0, 1)[slots] = kv.to(self.dtype)

    def load(self, buffer: Tensor, page_size: int, slots: Tensor) -> Tensor:
        return buffer.flatten(0, 1)[slots].float()


class PagedPool:
    """`num_pages` pages of `page_size` tokens, and behind them one spare page that takes the dropped rows.

    `buffer` includes the spare page; `num_slots` counts only addressable tokens. `store` and `load` have static shapes
    and never wait for the device, so they can run inside a captured CUDA graph; they trust their slots. A checked
    mode calls `check_slots(name, slots, pool.num_slots)` first.
    """

    def __init__(self, *, num_pages: int, page_size: int, kv_format: KVFormat, device: torch.device | str) -> None:
        _check_count("num_pages", num_pages, 0)
        _check_count("page_size", page_size, 1)
        self._adopt(num_pages, page_size, kv_format, kv_format.allocate(num_pages + 1, page_size, device))

    @classmethod
    def from_packed_cache(cls, name: str, cache: Tensor) -> "PagedPool":
        """Wrap somebody else's packed cache (see `check_packed_cache`) without copying; all its pages are addressable.

        There is no spare page in it, so `store` filters dropped rows out, which waits for the device.
        """
        cache = check_packed_cache(name, cache)
        num_pages, page_size = cache.shape[:2]
        pages = cache.as_strided((num_pages, page_size * TOKEN_BYTES), (cache.stride(0), 1))
        pool = cls.__new__(cls)
        pool._adopt(num_pages, page_size, PackedFp8Format(), pages)
        return pool

    def _adopt(self, num_pages: int, page_size: int, kv_format: KVFormat, buffer: Tensor) -> None:
        self.num_pages, self.page_size, self.num_slots = num_pages, page_size, num_pages * page_size
        self.kv_format, self.buffer = kv_format, buffer

    def store(self, slots: Tensor, kv: Tensor) -> None:
        """Write row n of `kv` [N, head_dim] to `slots[n]` (int [N]); a slot of -1 drops the row.

        `kv` is float32, bfloat16 or float16. If a slot occurs twice, which row it keeps is undefined.
        """
        _check_dtype("slots", slots.dtype, _SLOT_DTYPES)
        _check_dtype("kv", kv.dtype, _FLOAT_DTYPES)
        _check_width("kv", kv, self.kv_format.head_dim)
        if slots.dim() != 1 or kv.dim() != 2 or len(slots) != len(kv):
            raise ValueError(f"slots has shape {tuple(slots.shape)} and kv {tuple(kv.shape)}; allowed: (N,) and (N, C)")
        slots, kv = slots.long(), kv.detach()
        if len(self.buffer) > self.num_pages:
            slots = torch.where(slots < 0, self.num_slots, slots)
        else:
            kept = slots >= 0
            slots, kv = slots[kept], kv[kept]
        if len(slots):
            self.kv_format.store(self.buffer, self.page_size, slots, kv)

    def load(self, slots: Tensor) -> Tensor:
        """Read `slots` (int [...]) -> float32 [..., head_dim]; a slot of -1 gives zeros, whatever the pages hold."""
        _check_dtype("slots", slots.dtype, _SLOT_DTYPES)
        if self.num_slots == 0:
            return torch.zeros(*slots.shape, self.kv_format.head_dim, device=self.buffer.device)
        rows = self.kv_format.load(self.buffer, self.page_size, slots.long().clamp_min(0))
        # Selected, not multiplied: the row read in an absent slot's place may be NaN.
        return torch.where((slots < 0).unsqueeze(-1), 0.0, rows)

    def find_corrupt_slots(self, slots: Tensor) -> list[int]:
        """Those of `slots` (int [...]) that read as NaN (scale byte 255, or a NaN channel), ascending, each once.

        Waits for the device: for checked mode.
        """
        check_slots("slots", slots, self.num_slots)
        present = slots[slots >= 0].unique()
        return present[self.load(present).isnan().any(-1)].tolist()

    def kernel_view(self) -> Tensor:
        """The addressable pages as FlashMLA takes them: uint8 [num_pages, page_size, 1, 584], page stride kept.

        The last axis is a count of bytes, not one token's bytes: a page stays planar.
        """
        if not isinstance(self.kv_format, PackedFp8Format):
            raise ValueError(f"kv_format is {self.kv_format.name!r}; only 'fp8' pools have a kernel view")
        shape = (self.num_pages, self.page_size, 1, TOKEN_BYTES)
        return self.buffer.as_strided(shape, (self.buffer.stride(0), TOKEN_BYTES, TOKEN_BYTES, 1))


def _check_count(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} is {value!r}; allowed: an integer of at least {minimum}")


def _check_dtype(name: str, got: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if got not in allowed:
        raise TypeError(f"{name}: dtype {got} is not supported; allowed: {', '.join(map(str, allowed))}")


def _check_width(name: str, value: Tensor, width: int) -> None:
    if value.dim() == 0 or value.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; its last axis must be {width} wide")


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One cache region of a decode call: a pool, and the pool slots that each query token attends to.

    `indices` int32 [num_tokens, num_keys], -1 anywhere for an absent key; only the first `lengths[t]` of row t are
    read. `lengths` int32 [num_tokens].
    """

    pool: PagedPool
    indices: Tensor
    lengths: Tensor

    def rows(self, rows: slice) -> "KVRegion":
        """The region of the query tokens `rows`."""
        return KVRegion(self.pool, self.indices[rows], self.lengths[rows])

    def within_length(self) -> Tensor:
        """bool [num_tokens, num_keys]: which indices are read."""
        return torch.arange(self.indices.shape[1], device=self.indices.device) < self.lengths[:, None]

    def valid(self) -> Tensor:
        """bool [num_tokens, num_keys]: which indices are read and name a key."""
        return (self.indices >= 0) & self.within_length()
