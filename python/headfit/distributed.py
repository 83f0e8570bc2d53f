"""The attention-TP group: two integers and, for real ranks, a torch.distributed process group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class AttnTPGroup:
    """Where a rank stands among the ranks that share one attention layer's heads.

    `rank` and `size` are of the attention-TP group; with DP attention they differ from the global rank and world
    size. `process_group` None means the default group. With `reduce_results=False` a layer returns this rank's
    partial sum and the caller adds the ranks up.
    """

    rank: int = 0
    size: int = 1
    process_group: "dist.ProcessGroup | None" = None
    reduce_results: bool = True

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("size", self.size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: {value!r}, allowed: an int")
        if self.size < 1:
            raise ValueError(f"size: {self.size}, allowed: 1 or more")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: {self.rank}, allowed: 0 to {self.size - 1} for size {self.size}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the group's ranks, in place."""
        if self.size > 1 and self.reduce_results:
            self._require_process_group()
            dist.all_reduce(x, group=self.process_group)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, in place."""
        if self.size > 1 and self.reduce_results:
            self._require_process_group()
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    def _require_process_group(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"attention-TP size {self.size} needs torch.distributed: call init_process_group first, "
                "or pass reduce_results=False and add the ranks' partial outputs yourself"
            )
        found = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if found != (self.rank, self.size):
            raise ValueError(
                f"process_group: this process is rank {found[0]} of {found[1]} in it, allowed: rank {self.rank} of "
                f"{self.size}; where the attention-TP group is not the whole world, pass its own process group"
            )
