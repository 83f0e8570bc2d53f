"""Decode problems for every attention backend: what a case is, how its tensors are made, and the right result.

Everything that an operator must not read is poison. All pool bytes are 0xFF, which is NaN in either format, until a
key that some token attends to is stored over them; page 0 is never attended to; an index past its row's length points
into page 0; strided inputs are cut out of larger buffers of NaN, or of the largest int32.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headfit.kv_cache import HEAD_DIM, KVFormat, KVRegion, ModelDtypeFormat, PackedFp8Format, PagedPool

KV_FORMATS: dict[str, KVFormat] = {"fp8": PackedFp8Format(), "model": ModelDtypeFormat(torch.float32)}
HEAD_COUNTS = (1, 4, 8, 12, 16, 24, 32, 40, 48, 63, 64, 65, 127, 128)
_REFERENCE_BYTES = 2**26  # of float64 keys at a time


@dataclass(frozen=True, slots=True)
class Case:
    """One decode call: its sizes, and what is odd about it.

    num_keys: how long the index rows of the window and of the compressed region are; None: no compressed region.
    page_sizes: of the two pools.
    tokens_per_seq: query tokens of a sequence share its index row, and each sees one key more than the one before.
    lengths: "full", "ragged" (any length, by sequence) or "zero".
    leading_absent, absent: how many indices at the front of a row are -1, and the share of -1 among the others.
    sinks: "random", "mixed" (random, every third +inf, every third -inf), or one number for all heads.
    strided: q and the indices are parts of larger buffers.
    """

    num_tokens: int = 3
    num_heads: int = 16
    num_keys: tuple[int, int | None] = (24, 40)
    page_sizes: tuple[int, int] = (64, 2)
    tokens_per_seq: int = 1
    lengths: str = "full"
    leading_absent: int = 0
    absent: float = 0.0
    sinks: str | float = "random"
    strided: bool = False

    @property
    def id(self) -> str:
        """Readable, and different for different cases."""
        window, compressed = self.num_keys
        keys = f"{window}" if compressed is None else f"{window}+{compressed}"
        parts = [f"tokens{self.num_tokens}-heads{self.num_heads}-keys{keys}"]
        if self.page_sizes != (64, 2):
            parts.append("pages{}+{}".format(*self.page_sizes))
        for name, usual in (("tokens_per_seq", 1), ("leading_absent", 0), ("absent", 0.0), ("sinks", "random")):
            if getattr(self, name) != usual:
                parts.append(f"{name}={getattr(self, name)}")
        if self.lengths != "full":
            parts.append(self.lengths)
        return "-".join(parts + ["strided"] * self.strided)


CASES = [
    *(Case(num_heads=num_heads, lengths="ragged", absent=0.2) for num_heads in HEAD_COUNTS),
    Case(num_tokens=0),
    Case(num_tokens=0, num_keys=(0, 0)),
    Case(num_tokens=1, num_keys=(1, None)),
    Case(num_tokens=1, num_keys=(128, 512), page_sizes=(256, 64)),
    Case(num_tokens=7, num_keys=(133, 3), page_sizes=(256, 64)),
    Case(num_tokens=65, num_heads=4, num_keys=(16, 8), lengths="ragged", absent=0.3),
    Case(num_keys=(128, None), page_sizes=(256, 2), lengths="ragged"),
    Case(num_keys=(133, None), strided=True),
    Case(num_keys=(0, 64)),
    Case(num_keys=(64, 0)),
    Case(num_keys=(0, None)),
    Case(num_keys=(0, 0)),
    Case(lengths="zero"),
    Case(absent=1.0),
    Case(num_keys=(68, None), leading_absent=64),
    Case(num_keys=(130, 130), leading_absent=128, absent=0.5),
    Case(page_sizes=(1, 3), absent=0.4, strided=True),
    Case(num_tokens=8, tokens_per_seq=4, lengths="ragged"),
    Case(num_tokens=6, tokens_per_seq=2, absent=0.5, strided=True, page_sizes=(256, 64)),
    Case(sinks=math.inf),
    Case(sinks=-math.inf, lengths="ragged"),
    Case(sinks=60.0),
    Case(sinks="mixed", absent=0.3, strided=True),
    Case(sinks="mixed", lengths="zero"),
    Case(num_heads=128, sinks="mixed", lengths="ragged", strided=True),
]


def make_case(
    case: Case,
    seed: int,
    *,
    kv_format: KVFormat,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The keyword arguments of `AttentionBackend.decode` for `case`, q in `dtype`; equal values on every device."""
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(case.num_tokens, case.num_heads, HEAD_DIM, generator=generator)
    sinks = _sinks(case, generator)
    regions = [
        None if num_keys is None else _region(case, num_keys, page_size, generator, kv_format, device)
        for num_keys, page_size in zip(case.num_keys, case.page_sizes, strict=True)
    ]
    return {
        "q": _placed(q.to(dtype), case, device, math.nan),
        "window": regions[0],
        "compressed": regions[1],
        "attn_sink": sinks.to(device),
        "softmax_scale": HEAD_DIM**-0.5,
    }


def constant_case(
    values: list[float], sinks: Tensor, *, kv_format: KVFormat, num_tokens: int = 1, page_size: int = 64
) -> dict[str, Any]:
    """Arguments of `decode` where q is 0 and key t holds values[t] in all channels, on the device of `sinks` [heads].

    The output of a head is sum(values) / (len(values) + exp(sink)), and its lse ln len(values).
    """
    device = sinks.device
    pool = poisoned_pool(kv_format, 2 + len(values) // page_size, page_size, device)
    slots = page_size + torch.arange(len(values), device=device)
    pool.store(slots, torch.tensor(values, dtype=torch.float32, device=device)[:, None].expand(-1, HEAD_DIM))
    lengths = torch.full((num_tokens,), len(values), dtype=torch.int32, device=device)
    return {
        "q": torch.zeros(num_tokens, len(sinks), HEAD_DIM, device=device),
        "window": KVRegion(pool, slots.int().expand(num_tokens, -1), lengths),
        "compressed": None,
        "attn_sink": sinks,
        "softmax_scale": HEAD_DIM**-0.5,
    }


def poisoned_pool(kv_format: KVFormat, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> PagedPool:
    """A pool, every byte 0xFF: NaN as float8_e4m3, float8_e8m0, bfloat16 and float32."""
    pool = PagedPool(num_pages=num_pages, page_size=page_size, kv_format=kv_format, device=device)
    pool.buffer.view(torch.uint8).fill_(0xFF)
    return pool


def reference_float64(
    *, q: Tensor, window: KVRegion, compressed: KVRegion | None, attn_sink: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """`AttentionBackend.decode` in float64 on q's device, some tokens at a time. Shares only `PagedPool.load`."""
    regions = [region for region in (window, compressed) if region is not None]
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    num_keys = sum(region.indices.shape[1] for region in regions)
    step = max(1, _REFERENCE_BYTES // (8 * HEAD_DIM * max(1, num_keys)))
    for start in range(0, q.shape[0] if num_keys else 0, step):
        rows = slice(start, start + step)
        slots = [_slots_of(region, rows) for region in regions]
        keys = torch.cat([region.pool.load(part).double() for region, part in zip(regions, slots, strict=True)], dim=1)
        absent = torch.cat(slots, dim=1)[:, None] < 0
        scores = (softmax_scale * (q[rows].double() @ keys.mT)).masked_fill(absent, -math.inf)
        largest = scores.amax(dim=-1, keepdim=True)
        largest = torch.where(largest == -math.inf, 0.0, largest)  # no key at all: every weight is 0
        weights = torch.exp(scores - largest)
        total = weights.sum(dim=-1, keepdim=True) + torch.exp(attn_sink.double()[:, None] - largest)
        o[rows] = torch.where(absent.all(dim=-1, keepdim=True), 0.0, weights @ keys / total)
        lse[rows] = scores.logsumexp(dim=-1)
    return o, lse


def _slots_of(region: KVRegion, rows: slice) -> Tensor:
    """The slots that the tokens `rows` attend to, -1 where a row has none."""
    indices = region.indices[rows]
    column = torch.arange(indices.shape[1], device=indices.device)
    return torch.where(column < region.lengths[rows, None], indices, -1)


def _sinks(case: Case, generator: torch.Generator) -> Tensor:
    if not isinstance(case.sinks, str):
        return torch.full((case.num_heads,), case.sinks)
    sinks = 2 * torch.randn(case.num_heads, generator=generator)
    if case.sinks == "mixed":
        sinks[0::3], sinks[1::3] = math.inf, -math.inf
    return sinks


def _region(case, num_keys, page_size, generator, kv_format, device) -> KVRegion:
    """Twice as many slots as a row needs, so that some keep their poison."""
    pool = poisoned_pool(kv_format, 2 + 2 * num_keys // page_size, page_size, device)
    num_seqs = case.num_tokens // case.tokens_per_seq
    order = torch.rand(num_seqs, pool.num_slots - page_size, generator=generator).argsort(dim=1)
    indices = page_size + order[:, :num_keys]
    absent = torch.rand(indices.shape, generator=generator) < case.absent
    absent[:, : case.leading_absent] = True
    indices = torch.where(absent, -1, indices).repeat_interleave(case.tokens_per_seq, dim=0)
    lengths = _lengths(case, num_seqs, num_keys, generator)
    past = torch.arange(num_keys) >= lengths[:, None]
    attended = indices[~past & (indices >= 0)].unique()
    keys = torch.randn(len(attended), kv_format.head_dim, generator=generator)
    pool.store(attended.to(device), keys.to(device))
    indices = torch.where(past, torch.arange(num_keys) % page_size, indices).int()
    return KVRegion(pool, _placed(indices, case, device, torch.iinfo(torch.int32).max), lengths.int().to(device))


def _lengths(case: Case, num_seqs: int, num_keys: int, generator: torch.Generator) -> Tensor:
    if case.lengths == "zero":
        return torch.zeros(case.num_tokens, dtype=torch.int64)
    last = torch.full((num_seqs,), num_keys)
    if case.lengths == "ragged":
        last = torch.randint(num_keys + 1, (num_seqs,), generator=generator)
    behind = torch.arange(case.tokens_per_seq).flip(0)
    return (last[:, None] - behind).clamp(min=0).flatten()


def _placed(values: Tensor, case: Case, device: torch.device | str, poison: float) -> Tensor:
    """`values` on `device`; of a strided case, a part of a larger buffer of `poison`."""
    if not case.strided:
        return values.to(device)
    buffer = torch.full([2 * size + 16 for size in values.shape], poison, dtype=values.dtype, device=device)
    part = buffer[tuple(slice(8, 8 + size) for size in values.shape)]
    return part.copy_(values)
