"""How `sparse_mqa_triton` is laid out on a chip: head tiles, pipeline stages, and shares of a row's keys."""

from dataclasses import dataclass
from functools import lru_cache

import torch

MAX_SPLITS = 32  # shares of a row's keys
BATCH_INVARIANT_SPLITS = 4  # in batch-invariant mode always, whatever the batch, the row and the device

PROGRAMS_PER_SM = 2  # that run at once
RESERVED_SHARED_BYTES = 1024  # of each program, by CUDA

# plan_splits counts in the time of one tile of keys.
PROGRAM_COST = 2  # the queries, the first gather and the output
MERGE_COST = 2  # a second launch
MERGE_COST_OF_SPLIT = 1 / 16


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is compiled: heads and keys a tile, warps, pipeline stages; `shared_bytes` is what that takes."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    shared_bytes: int


# With 5 stages a tile is gathered while the one before it is computed, with 3 right before it is used, in less memory.
# More than 32 heads are more programs: 64 in one would spill registers.
LAUNCHES = (
    Launch(16, 32, 4, 5, 84_480),
    Launch(16, 32, 4, 3, 65_280),
    Launch(32, 32, 4, 5, 101_888),
    Launch(32, 32, 4, 3, 82_688),
)
FLOAT32_LAUNCH = Launch(16, 16, 4, 1, 66_624)  # float32 and float16 queries: right, not fast


def choose_launch(num_heads: int, dtype: torch.dtype, shared_bytes: int) -> Launch:
    """The smallest head tile that holds the heads, else the largest, and the stages that an SM's memory has room for.

    Two programs an SM come before more stages: an SM of 164 KB (sm80) runs two with 3 stages, one of 228 KB (sm90,
    sm100) two with 5, one of 100 KB (sm86, sm89, sm120) one, with 5 if it is of 16 heads.

    Args:
        shared_bytes: shared memory of one multiprocessor.
    """
    if dtype != torch.bfloat16:
        return FLOAT32_LAUNCH
    largest = max(launch.block_h for launch in LAUNCHES)
    block_h = min(launch.block_h for launch in LAUNCHES if launch.block_h >= min(num_heads, largest))

    def rank(launch: Launch) -> tuple[int, int]:
        at_once = shared_bytes // (launch.shared_bytes + RESERVED_SHARED_BYTES)
        return min(PROGRAMS_PER_SM, at_once), launch.num_stages

    return max((launch for launch in LAUNCHES if launch.block_h == block_h), key=rank)


@lru_cache(maxsize=4096)
def plan_splits(*, num_tokens: int, head_blocks: int, num_keys: int, num_sms: int) -> int:
    """Into how many shares to split the `num_keys` keys of a row, so that a small batch fills the chip: 1..MAX_SPLITS.

    Minimises the waves of programs times a program's cost, in tiles of keys. A batch that fills the chip is not split.
    """
    tiles, programs, at_once = _ceil(num_keys, LAUNCHES[0].block_n), num_tokens * head_blocks, PROGRAMS_PER_SM * num_sms

    def cost(splits: int) -> float:
        merge = MERGE_COST + splits * MERGE_COST_OF_SPLIT if splits > 1 else 0
        return _ceil(programs * splits, at_once) * (PROGRAM_COST + _ceil(tiles, splits)) + merge

    most = max(1, min(tiles, MAX_SPLITS, 2 * at_once // max(1, programs)))
    return min(range(1, most + 1), key=cost)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
