"""Sparse MQA decode on Hopper: a rank's exact heads, in CUDA C++ compiled at run time (sparse_mqa.cu).

A block takes 8, 16 or 32 heads of one query token; more heads are further blocks. Where the queries alone do not fill
the chip, the blocks of a thread-block cluster share a token's keys and merge inside the cluster; above that one block
a multiprocessor walks over the tokens. Nothing is read back, so every launch can be captured in a CUDA graph.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import torch

from headfit.kernels.nvrtc import CudaKernel, compile_cubin
from headfit.kernels.packed_regions import check_packed_regions, division_constants
from headfit.kv_cache import DATA_BYTES, HEAD_DIM, NUM_GROUPS, SCALE_BYTES, KVRegion, PagedPool

ARCH = "sm_90a"
HEAD_TILES = (8, 16, 32)
KEY_TILE = 64
KEY_UNIT = 16  # a token's keys are divided over a cluster's blocks in units of this
CLUSTER_SIZES = (2, 3, 4, 5, 6, 7, 8, 16)
THREADS = 512
SHARED_BYTES = 232448  # all that a block can have: one block a multiprocessor
INVARIANT_CLUSTER_SIZE = 4
"""Blocks a token in batch-invariant mode: the division of a row's keys then depends on nothing but its own lengths."""

# Expected microseconds on one H200, fitted to forced plans of 1 to 100 tokens and 128 to 1152 keys: of a launch without
# keys, by head tile and whether clusters merge; of 64 keys; what the largest cluster adds, and a chip all at work.
_START_US = {(8, False): 2.1, (16, False): 2.8, (32, False): 4.2, (8, True): 3.4, (16, True): 4.7, (32, True): 8.0}
_KEY_TILE_US = {8: 1.15, 16: 1.31, 32: 1.71}
_LARGEST_CLUSTER_US, _FULL_CHIP_US = 0.8, 1.8
# Key tiles in flight, and heads' shares that a cluster's block has room for: what fits into shared memory.
_STAGES = {(8, False): 5, (16, False): 5, (32, False): 4, (8, True): 4, (16, True): 4, (32, True): 3}
_SHARES = {8: 21, 16: 21, 32: 33}
_DEBUG_DEFINES: dict[str, int] = {}  # RACECHECK for compute-sanitizer
_LOG2E = math.log2(math.e)


class _Region(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_uint64),
        ("indices", ctypes.c_uint64),
        ("lengths", ctypes.c_uint64),
        ("index_stride", ctypes.c_int64),
        ("page_stride", ctypes.c_uint32),
        ("page_size", ctypes.c_uint32),
        ("page_magic", ctypes.c_uint32),
        ("page_shift", ctypes.c_uint32),
        ("num_keys", ctypes.c_int32),
        ("num_slots", ctypes.c_uint32),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("region", _Region * 2),
        ("q", ctypes.c_uint64),
        ("o", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("sink", ctypes.c_uint64),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("o_token_stride", ctypes.c_int64),
        ("o_head_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("head_blocks", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("block_magic", ctypes.c_uint32),
        ("block_shift", ctypes.c_uint32),
        ("cluster_magic", ctypes.c_uint32),
        ("cluster_shift", ctypes.c_uint32),
        ("scale_log2", ctypes.c_float),
        ("overlap", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How one call is laid out: `num_items` = tokens x head blocks, each on a cluster of `cluster_size` blocks."""

    head_tile: int
    head_blocks: int
    num_items: int
    cluster_size: int
    num_blocks: int


def head_tile(num_heads: int) -> int:
    """The smallest head tile that holds `num_heads`, or the largest one."""
    return next((tile for tile in HEAD_TILES if tile >= num_heads), HEAD_TILES[-1])


def plan_launch(
    *, num_tokens: int, num_heads: int, num_keys: int, cluster_slots: dict[int, int], batch_invariant: bool = False
) -> LaunchPlan:
    """The head tile and cluster size of the least expected time.

    Args:
        num_keys: width of the index rows, both regions; lengths are on the device.
        cluster_slots: cluster size -> how many clusters of it the chip holds at once; 1 -> multiprocessors.
        batch_invariant: always the tile that holds the heads, on `INVARIANT_CLUSTER_SIZE` blocks.
    """
    largest = head_tile(num_heads)
    if batch_invariant:
        return _layout(largest, INVARIANT_CLUSTER_SIZE, num_tokens, num_heads, cluster_slots)
    units = -(-num_keys // KEY_UNIT)
    best, least = None, math.inf
    for tile in (t for t in HEAD_TILES if t <= largest):
        for size in (s for s in cluster_slots if s == 1 or (s <= units and s * -(-tile // s) <= _SHARES[tile])):
            plan = _layout(tile, size, num_tokens, num_heads, cluster_slots)
            if size > 1 and plan.num_items > cluster_slots[size]:
                continue
            time = _expected_us(plan, units, cluster_slots)
            if time < least:
                best, least = plan, time
    return best


def _expected_us(plan: LaunchPlan, units: int, cluster_slots: dict[int, int]) -> float:
    """Of a launch with `units` of keys a token. A block's last tile of a cluster takes as long as a full one."""
    tile, size = plan.head_tile, plan.cluster_size
    tiles = units * KEY_UNIT / KEY_TILE
    if size > 1:
        tiles = math.ceil(math.ceil(units / size) * KEY_UNIT / KEY_TILE)
    time = _START_US[tile, size > 1] + math.ceil(plan.num_items / cluster_slots[size]) * tiles * _KEY_TILE_US[tile]
    time += _FULL_CHIP_US * min(1.0, plan.num_blocks / cluster_slots[1])
    return time + _LARGEST_CLUSTER_US * (size == CLUSTER_SIZES[-1])


def _layout(tile: int, size: int, num_tokens: int, num_heads: int, cluster_slots: dict[int, int]) -> LaunchPlan:
    blocks = -(-num_heads // tile)
    items = num_tokens * blocks
    return LaunchPlan(tile, blocks, items, size, items * size if size > 1 else min(items, cluster_slots[1]))


def sparse_mqa_cuda(
    *,
    q: torch.Tensor,
    regions: tuple[KVRegion, ...],
    attn_sink: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `AttentionBackend.decode`, for bfloat16 q on a Hopper GPU and packed fp8 pools.

    Its arithmetic has limits. A key's group of channels whose scale is 2**15 or more below the largest scale of that
    group in the row may count as 0 among the values, whatever its weight. Scales further apart than about 2**100 over
    a row can overflow; headfit's and SGLang's writers store 2**-22 to about 2**8 of normed rows. Scores
    (softmax_scale * q.k, in units of log2) above about 2**28 lose their maximum to rounding.

    Args:
        q: bf16 [num_tokens, num_heads, 512]; tokens and heads may be strided (a slice of a padded buffer), rows are
            contiguous and 16-byte aligned.
        regions: one region (the unified form) or two (window and compressed).
        out: like q; written in place of a new tensor. Only its num_heads rows are touched.
        batch_invariant: a row's result is the same bits whatever else is in the batch.
        pdl: let this kernel's start overlap the end of the one before it, and the next one's start its own end
            (programmatic dependent launch); it waits for that kernel before it reads anything. A kernel next to it
            that is launched so must wait as well.

    Returns:
        o bf16 [num_tokens, num_heads, 512], `out` where given, and lse float32 [num_tokens, num_heads].

    Raises:
        ValueError, TypeError: naming the argument, before anything is launched.
    """
    _check_rows("q", q)
    if out is not None:
        _check_rows("out", out)
    arguments = {"q": q, "regions": regions, "attn_sink": attn_sink, "softmax_scale": softmax_scale, "out": out}
    check_packed_regions("CUDA", **arguments, alignment=16)
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale: {softmax_scale}, allowed: a positive number")
    if not q.is_cuda:
        raise ValueError(f"q: on {q.device}, allowed: a CUDA device")
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return out, lse

    num_keys = sum(region.indices.shape[1] for region in regions)
    plan = _plan(num_tokens, num_heads, num_keys, q.device.index, batch_invariant)
    # Held here until the launch has read them: rows that are not contiguous are copied.
    inputs = [(r.pool, _rows(r.indices), r.lengths.contiguous()) for r in regions]
    sink = attn_sink.contiguous()
    block_magic, block_shift = division_constants(plan.head_blocks)
    cluster_magic, cluster_shift = division_constants(plan.cluster_size)
    params = _Params(
        region=tuple(_region(*part) for part in inputs),
        q=q.data_ptr(),
        o=out.data_ptr(),
        lse=lse.data_ptr(),
        sink=sink.data_ptr(),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        o_token_stride=out.stride(0),
        o_head_stride=out.stride(1),
        num_heads=num_heads,
        head_blocks=plan.head_blocks,
        num_items=plan.num_items,
        block_magic=block_magic,
        block_shift=block_shift,
        cluster_magic=cluster_magic,
        cluster_shift=cluster_shift,
        scale_log2=softmax_scale * _LOG2E,
        overlap=pdl,
    )
    with torch.cuda.device(q.device):
        _kernel(plan.head_tile, plan.cluster_size > 1).launch(
            grid=(plan.num_blocks, 1, 1),
            block=(THREADS, 1, 1),
            smem=SHARED_BYTES,
            stream=torch.cuda.current_stream().cuda_stream,
            params=params,
            cluster_size=plan.cluster_size,
            programmatic=pdl,
        )
    return out, lse


def prewarm_cuda(num_heads: int, device: torch.device | str) -> None:
    """Compile or load what `sparse_mqa_cuda` may launch for `num_heads`: once a head tile, whatever the shapes."""
    device = torch.device(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        for tile in (t for t in HEAD_TILES if t <= head_tile(num_heads)):
            for clustered in (False, True):
                _kernel(tile, clustered).prepare()
    _cluster_slots(index)


def compile_kernel(tile: int, clustered: bool) -> bytes:
    """The cubin of one head tile, without or with clusters; from the cache on disk where it was compiled before."""
    files = (resources.files(__package__).joinpath(name) for name in ("hopper_ptx.cuh", "sparse_mqa.cu"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    defines = _DEBUG_DEFINES | {
        "HEAD_TILE": tile,
        "CLUSTER": int(clustered),
        "STAGES": _STAGES[tile, clustered],
        "SHARES": _SHARES[tile],
        "GROUPS": NUM_GROUPS,
        "DATA_BYTES": DATA_BYTES,
        "SCALE_BYTES": SCALE_BYTES,
    }
    return compile_cubin(source, name="sparse_mqa.cu", arch=ARCH, defines=defines, entry="sparse_mqa")


@cache
def _kernel(tile: int, clustered: bool) -> CudaKernel:
    return CudaKernel(compile_kernel(tile, clustered), entry="sparse_mqa", max_smem=SHARED_BYTES)


@lru_cache(maxsize=4096)
def _plan(num_tokens: int, num_heads: int, num_keys: int, device: int, batch_invariant: bool) -> LaunchPlan:
    """`plan_launch` on a device; it takes longer than a launch."""
    return plan_launch(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_keys=num_keys,
        cluster_slots=_cluster_slots(device),
        batch_invariant=batch_invariant,
    )


@cache
def _cluster_slots(device: int) -> dict[int, int]:
    """Every kernel takes a whole multiprocessor a block, so one answers for all."""
    with torch.cuda.device(device):
        kernel, block = _kernel(HEAD_TILES[0], True), (THREADS, 1, 1)
        slots = {s: kernel.max_active_clusters(cluster_size=s, block=block, smem=SHARED_BYTES) for s in CLUSTER_SIZES}
        return {1: torch.cuda.get_device_properties(device).multi_processor_count} | slots


def _region(pool: PagedPool, indices: torch.Tensor, lengths: torch.Tensor) -> _Region:
    magic, shift = division_constants(pool.page_size)
    return _Region(
        pages=pool.buffer.data_ptr(),
        indices=indices.data_ptr(),
        lengths=lengths.data_ptr(),
        index_stride=indices.stride(0),
        page_stride=pool.buffer.stride(0),
        page_size=pool.page_size,
        page_magic=magic,
        page_shift=shift,
        num_keys=indices.shape[1],
        num_slots=pool.num_slots,
    )


def _rows(indices: torch.Tensor) -> torch.Tensor:
    return indices if indices.stride(1) == 1 or indices.shape[1] <= 1 else indices.contiguous()


def _check_rows(name: str, value: torch.Tensor) -> None:
    if value.dim() != 3 or value.shape[2] != HEAD_DIM:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, allowed: [num_tokens, num_heads, {HEAD_DIM}]")
    if value.dtype != torch.bfloat16:
        raise TypeError(f"{name}: dtype {value.dtype}, allowed: torch.bfloat16")
    # The stride of an axis of 1 is anything, of a contiguous tensor too; what is read or written lies at 0 times it.
    odd = any(value.shape[axis] > 1 and value.stride(axis) % 8 for axis in (0, 1))
    if odd or value.data_ptr() % 16 or value.stride(2) != 1:
        raise ValueError(
            f"{name}: strides {value.stride()} at address {value.data_ptr():#x}, allowed: contiguous rows that start "
            "at multiples of 16 bytes"
        )
