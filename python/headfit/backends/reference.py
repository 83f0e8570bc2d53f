"""The PyTorch backend: any device, any head count, any KV format, several query tokens a sequence."""

from contextlib import AbstractContextManager, nullcontext

import torch

from headfit.backends.base import KernelSupport, check_decode, check_indices
from headfit.kernels.sparse_mqa_ref import sparse_mqa_ref
from headfit.kv_cache import KVRegion

SUPPORT = KernelSupport(name="reference", architectures=("any",), num_heads=None)


class ReferenceBackend:
    """Runs the operator's definition.

    Args:
        supported_num_heads: pretend to be a kernel compiled for these head counts only, so that padding can be tried
            without that kernel; None runs a rank's heads exactly.
        checked: also refuse indices past the pool (costs a device synchronisation a call).
    """

    name = SUPPORT.name

    def __init__(self, *, supported_num_heads: tuple[int, ...] | None = None, checked: bool = False) -> None:
        self.supported_num_heads = supported_num_heads
        self.checked = checked

    def decode(
        self,
        *,
        q: torch.Tensor,
        window: KVRegion,
        compressed: KVRegion | None,
        attn_sink: torch.Tensor,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.decode`."""
        regions = (window,) if compressed is None else (window, compressed)
        check_decode(self, q, regions, attn_sink)
        if self.checked:
            check_indices(regions)
        return sparse_mqa_ref(q=q, regions=regions, attn_sink=attn_sink, softmax_scale=softmax_scale)

    def step(self) -> AbstractContextManager[None]:
        """See `AttentionBackend.step`: nothing is planned for lengths."""
        return nullcontext()

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`: nothing to compile."""
