"""The portable kernel, in Triton: any head count exactly, packed fp8 caches, Ampere and later."""

from collections.abc import Callable

import torch

from headfit.backends.base import KernelSupport
from headfit.backends.exact_heads import ExactHeadsBackend

# All from Ampere on, as the kernel's own check has it; sm101 is CUDA 12's name of sm110.
_ARCHITECTURES = ("sm80", "sm86", "sm87", "sm88", "sm89", "sm90", "sm100", "sm101", "sm103", "sm110", "sm120", "sm121")

SUPPORT = KernelSupport(
    name="unified_kv_triton",
    architectures=_ARCHITECTURES,
    num_heads=None,
    modules=("triton",),
)


class UnifiedKVTritonBackend(ExactHeadsBackend):
    """Runs `sparse_mqa_triton`. Raises ImportError where Triton is not installed."""

    name = SUPPORT.name
    supported_num_heads = SUPPORT.num_heads

    def load_operator(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        try:
            from headfit.kernels.sparse_mqa_triton import sparse_mqa_triton
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ImportError(f"backend {self.name}: Triton is not installed (Linux only)", name="triton") from error
        return sparse_mqa_triton

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`."""
        from headfit.kernels.sparse_mqa_triton import prewarm_triton

        for num_regions in (1, 2):
            prewarm_triton(num_heads, num_regions, device)
