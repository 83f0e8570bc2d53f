"""What the backends share whose kernel runs any head count exactly over packed fp8 pools."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from headfit.backends.base import check_decode, check_indices
from headfit.kv_cache import KVRegion


class ExactHeadsBackend(ABC):
    """One region (the unified form, both regions in one pool and one index row) or two.

    Args:
        checked: also refuse indices past the pool (costs a device synchronisation a call).
        batch_invariant: a row's result is the same bits whatever else is in the batch.
    """

    name: ClassVar[str]
    supported_num_heads: ClassVar[tuple[int, ...] | None]

    def __init__(self, *, checked: bool = False, batch_invariant: bool = False) -> None:
        self.operator = self.load_operator()
        self.checked = checked
        self.batch_invariant = batch_invariant

    @abstractmethod
    def load_operator(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The kernel's function, imported here so that an absent library costs nothing elsewhere."""

    def step(self) -> AbstractContextManager[None]:
        """See `AttentionBackend.step`: nothing is planned for lengths."""
        return nullcontext()

    @abstractmethod
    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`."""

    def decode(
        self,
        *,
        q: torch.Tensor,
        window: KVRegion,
        compressed: KVRegion | None,
        attn_sink: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.decode`; `out`, like q, is written in place of a new tensor."""
        regions = (window,) if compressed is None else (window, compressed)
        if self.checked:
            check_decode(self, q, regions, attn_sink)  # the operator's own check comes after the indices are read
            check_indices(regions)
        return self.operator(
            q=q,
            regions=regions,
            attn_sink=attn_sink,
            softmax_scale=softmax_scale,
            out=out,
            batch_invariant=self.batch_invariant,
        )
