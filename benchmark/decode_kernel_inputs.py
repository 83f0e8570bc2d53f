"""What `decode_kernel.py` feeds to the kernels: key sets, random pools and inputs, and the float64 result for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from decode_kernel_report import Row, keys_name
from torch import Tensor

from headfit import kv_cache
from headfit.backends.flashmla import SUPPORT
from headfit.kv_cache import HEAD_DIM, KVRegion, PackedFp8Format, PagedPool
from headfit.testing.measure import relative_norm

MAX_BATCH, MAX_HEADS = 1024, max(SUPPORT.num_heads)
SOFTMAX_SCALE = HEAD_DIM**-0.5
ABSENT_SHARE = 0.05
CHECKED_TOKENS = 64

# Slots of a pool by page size: each under 2 GiB, and enough for eight launches of 256 x 1024 keys without a repeat.
WINDOW_PAGE_SIZE = 256  # page sizes are what servers use
POOL_SLOTS = {WINDOW_PAGE_SIZE: 2**20, 64: 2**21, 2: 2**21}
# The launches of a graph, as far as the pools reach: bytes of keys that they read together, and limits of their number.
# A replay's own start, some microseconds, is divided by it.
GRAPH_BYTES = 1e9
MIN_LAUNCHES, MAX_LAUNCHES = 16, 128


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a query token: from the window, and from the compressed region of one compress ratio (0: none)."""

    window: int
    extra: int = 0
    compress_ratio: int = 0
    extra_page_size: int = 0

    @property
    def fields(self) -> Row:
        return {"keys_window": self.window, "keys_extra": self.extra, "compress_ratio": self.compress_ratio}

    @property
    def regions(self) -> list[tuple[int, int]]:
        """(number of keys, page size) of each region."""
        return [(self.window, WINDOW_PAGE_SIZE)] + [(self.extra, self.extra_page_size)] * (self.extra > 0)


KEYS = {
    keys_name(keys.fields): keys
    for keys in (Keys(128), Keys(128, 512, 4, 64), Keys(128, 1024, 4, 64), Keys(128, 1024, 128, 2))
}


def random_packed_pool(num_slots: int, page_size: int, device: torch.device | str) -> PagedPool:
    """A packed pool of whole pages full of random keys of about unit size; bytes that no token owns are 0xFF.

    e4m3 codes are uniform without the two NaNs, scale bytes 2**-9 to 2**-6, RoPE channels normal.
    """
    num_pages = num_slots // page_size
    pool = PagedPool(num_pages=num_pages, page_size=page_size, kv_format=PackedFp8Format(), device=device)
    pool.buffer.fill_(0xFF)
    data, scales = (
        pool.buffer[:num_pages, start : start + page_size * width].unflatten(1, (page_size, width))
        for start, width in ((0, kv_cache.DATA_BYTES), (page_size * kv_cache.DATA_BYTES, kv_cache.SCALE_BYTES))
    )
    nan_code = 0x7F  # and with the sign, 0xFF
    shape = (num_pages, page_size, kv_cache.NOPE_DIM)
    codes = torch.randint(2 * nan_code, shape, dtype=torch.uint8, device=device)
    data[..., : kv_cache.NOPE_BYTES] = codes + (codes >= nan_code)
    rope = torch.randn(num_pages, page_size, kv_cache.ROPE_DIM, dtype=torch.bfloat16, device=device)
    data[..., kv_cache.NOPE_BYTES :] = rope.view(torch.uint8)
    exponents = torch.randint(-9, -5, (num_pages, page_size, kv_cache.NUM_GROUPS), device=device)
    scales[..., : kv_cache.NUM_GROUPS] = (kv_cache.SCALE_BIAS + exponents).to(torch.uint8)
    return pool


@dataclass(frozen=True, slots=True)
class Inputs:
    """One launch's input: q bf16 [batch, MAX_HEADS, 512] and its regions."""

    q: Tensor
    regions: tuple[KVRegion, ...]

    def arguments(self, attn_sink: Tensor) -> dict[str, Any]:
        """An operator's keyword arguments, for as many heads as `attn_sink` has."""
        q = self.q[:, : len(attn_sink)].contiguous()
        return {"q": q, "regions": self.regions, "attn_sink": attn_sink, "softmax_scale": SOFTMAX_SCALE}


def draw_inputs(
    keys: Keys, *, batch: int, launches: int, pools: dict[int, PagedPool], uneven: bool = False
) -> list[Inputs]:
    """Inputs of `launches` launches, no slot in two index rows. `uneven`: random lengths, and some keys absent.

    The first key of a row is always there: what a row without any gives is a matter for tests.
    """
    device = next(iter(pools.values())).buffer.device
    columns = []
    for num_keys, page_size in keys.regions:
        pool = pools[page_size]
        shape = (launches, batch, num_keys)
        indices = torch.randperm(pool.num_slots, device=device)[: math.prod(shape)].int().view(shape)
        lengths = torch.full((batch,), num_keys, dtype=torch.int32, device=device)
        if uneven:
            lengths = torch.randint(1, num_keys + 1, (batch,), dtype=torch.int32, device=device)
            indices[..., 1:][torch.rand(indices[..., 1:].shape, device=device) < ABSENT_SHARE] = -1
        columns.append([KVRegion(pool, rows, lengths) for rows in indices])
    q = torch.randn(launches, batch, MAX_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    return [Inputs(rows, regions) for rows, regions in zip(q, zip(*columns, strict=True), strict=True)]


def num_launches(keys: Keys, *, batch: int, pools: dict[int, PagedPool]) -> int:
    """Launches of a graph: enough bytes to be cold and long, no more than the pools have slots for."""
    num_bytes = kv_cache.TOKEN_BYTES * batch * (keys.window + keys.extra)
    reach = min(pools[page_size].num_slots // (batch * num_keys) for num_keys, page_size in keys.regions)
    return min(reach, MAX_LAUNCHES, max(MIN_LAUNCHES, math.ceil(GRAPH_BYTES / num_bytes)))


def reference_float64(inputs: Inputs, attn_sink: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse of the tokens `rows`, for all heads of `attn_sink`, in float64; every row has a valid key."""
    valid = [region.valid()[rows] for region in inputs.regions]
    slots = [torch.where(v, r.indices[rows], -1) for v, r in zip(valid, inputs.regions, strict=True)]
    kv = torch.cat([r.pool.load(s) for s, r in zip(slots, inputs.regions, strict=True)], dim=1).double()
    scores = SOFTMAX_SCALE * torch.einsum("thd,tkd->thk", inputs.q[rows].double(), kv)
    scores = scores.masked_fill(~torch.cat(valid, dim=1)[:, None], -math.inf)
    lse = scores.logsumexp(dim=-1)
    # exp(lse) / (exp(lse) + exp(sink)) is what the sink leaves.
    o = torch.einsum("thk,tkd->thd", scores.softmax(dim=-1), kv) * torch.sigmoid(lse - attn_sink)[..., None]
    return o, lse


@dataclass(frozen=True, slots=True)
class Problem:
    """All that the kernels are given on one shape, and the right results (o, lse) for the tokens that are compared."""

    attn_sink: Tensor
    tokens: Tensor
    checked: Inputs
    expected: tuple[Tensor, Tensor]
    timed: list[Inputs]
    expected_last: tuple[Tensor, Tensor]

    def errors_of(
        self, result: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor], heads: Sequence[int]
    ) -> dict[int, float]:
        """For each head count, the larger relative norm of o and, where it is given, lse over the first heads."""
        pairs = [(out[self.tokens], ref) for out, ref in zip(result, expected, strict=True) if out is not None]
        return {n: max(relative_norm(out[:, :n], ref[:, :n]) for out, ref in pairs) for n in heads}


def make_problem(keys: Keys, *, batch: int, pools: dict[int, PagedPool]) -> Problem:
    """Fresh random inputs of one shape: one uneven call to check, and the launches to time."""
    device = next(iter(pools.values())).buffer.device
    attn_sink = torch.randn(MAX_HEADS, device=device)
    tokens = torch.randperm(batch, device=device)[:CHECKED_TOKENS]
    (checked,) = draw_inputs(keys, batch=batch, launches=1, pools=pools, uneven=True)
    timed = draw_inputs(keys, batch=batch, launches=num_launches(keys, batch=batch, pools=pools), pools=pools)
    expected = [reference_float64(inputs, attn_sink, tokens) for inputs in (checked, timed[-1])]
    return Problem(attn_sink, tokens, checked, expected[0], timed, expected[1])
