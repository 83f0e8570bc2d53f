"""Which query heads an attention-TP rank owns, and how many the kernel that runs them is given.

The one place that knows padding. Pure Python over two integers of parallel state, so that every rank of any layout can
be planned anywhere. The head counts a kernel supports are its backend's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headfit.config import check_integer

# Far above any model; it bounds the divisors that allowed_tp_sizes tries and an error lists.
_MAX_HEADS = 65_536


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """One rank's share of the query heads and the head count its kernel runs. Built by `plan_heads`.

    The rank owns heads `local_slice` of `num_heads`. They fill the first `num_local_heads` of the kernel's
    `kernel_num_heads` heads; the rest, if any, is padding.
    """

    num_heads: int
    attn_tp_size: int
    attn_tp_rank: int
    num_local_heads: int
    kernel_num_heads: int
    o_groups: int | None = None

    @property
    def local_slice(self) -> slice:
        """This rank's heads among all `num_heads`."""
        return _share(self.num_heads, self.attn_tp_size, self.attn_tp_rank)

    @property
    def local_groups(self) -> slice | None:
        """This rank's output groups among all `o_groups`; None where the plan was made without groups."""
        return None if self.o_groups is None else _share(self.o_groups, self.attn_tp_size, self.attn_tp_rank)

    @property
    def is_padded(self) -> bool:
        return self.kernel_num_heads > self.num_local_heads

    @property
    def waste(self) -> float:
        """The fraction of the kernel's heads that are padding, in [0, 1)."""
        return (self.kernel_num_heads - self.num_local_heads) / self.kernel_num_heads


def plan_heads(
    *,
    num_heads: int,
    attn_tp_size: int,
    attn_tp_rank: int,
    supported: tuple[int, ...] | None,
    o_groups: int | None = None,
) -> HeadLayout:
    """Fit one rank's heads to a kernel: the smallest supported head count that holds them.

    `supported` lists the head counts the kernel runs, in any order; None says it runs any count, so nothing is padded.
    Raises ValueError when heads or output groups do not divide by `attn_tp_size` (listing the sizes that do), when no
    supported count holds the local heads, and when an argument is not an integer in range.
    """
    sizes = allowed_tp_sizes(num_heads, o_groups)
    check_integer("attn_tp_size", attn_tp_size, minimum=1)
    if attn_tp_size not in sizes:
        parts = f"num_heads {num_heads}" + ("" if o_groups is None else f" and o_groups {o_groups}")
        raise ValueError(f"attn_tp_size {attn_tp_size} does not divide {parts}; allowed attn_tp_size: {_listed(sizes)}")
    check_integer("attn_tp_rank", attn_tp_rank, minimum=0, maximum=attn_tp_size - 1)
    num_local_heads = num_heads // attn_tp_size
    kernel_num_heads = num_local_heads
    if supported is not None:
        fitting = [count for count in _check_supported(supported) if count >= num_local_heads]
        if not fitting:
            local = f"{num_local_heads} local heads (num_heads {num_heads} / attn_tp_size {attn_tp_size})"
            raise ValueError(f"{local} are more than the kernel runs; supported: {_listed(sorted(supported))}")
        kernel_num_heads = min(fitting)
    return HeadLayout(num_heads, attn_tp_size, attn_tp_rank, num_local_heads, kernel_num_heads, o_groups)


def allowed_tp_sizes(num_heads: int, o_groups: int | None = None) -> tuple[int, ...]:
    """The attention-TP sizes that divide the heads and, where given, the output groups, ascending."""
    check_integer("num_heads", num_heads, minimum=1, maximum=_MAX_HEADS)
    common = num_heads
    if o_groups is not None:
        common = math.gcd(num_heads, check_integer("o_groups", o_groups, minimum=1, maximum=_MAX_HEADS))
    return tuple(size for size in range(1, common + 1) if common % size == 0)


def attn_tp_coordinates(*, global_rank: int, world_size: int, dp_size: int) -> tuple[int, int]:
    """(attn_tp_rank, attn_tp_size) of a global rank under DP attention.

    `dp_size` data-parallel groups of equal size split the world into runs of consecutive ranks, and heads are sharded
    within a group only: of 8 ranks with `dp_size` 2, global rank 5 is attention-TP rank 1 of 4. Raises ValueError when
    `dp_size` does not divide `world_size` or the rank is out of range.
    """
    check_integer("world_size", world_size, minimum=1)
    check_integer("dp_size", dp_size, minimum=1)
    check_integer("global_rank", global_rank, minimum=0, maximum=world_size - 1)
    if world_size % dp_size:
        raise ValueError(f"dp_size is {dp_size}; allowed: a divisor of world_size {world_size}")
    attn_tp_size = world_size // dp_size
    return global_rank % attn_tp_size, attn_tp_size


def _check_supported(supported: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(supported, tuple) or not supported:
        raise ValueError(f"supported is {supported!r}; allowed: None or a tuple of head counts")
    return tuple(check_integer("supported", count, minimum=1) for count in supported)


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


def _share(total: int, size: int, rank: int) -> slice:
    share = total // size
    return slice(rank * share, (rank + 1) * share)
