"""The Hopper kernel, in CUDA C++ compiled at run time: a rank's exact heads, packed fp8 caches, bfloat16 queries."""

from collections.abc import Callable
from functools import cache, partial

import torch

from headfit.backends.base import KernelSupport
from headfit.backends.exact_heads import ExactHeadsBackend

SUPPORT = KernelSupport(
    name="sparse_mqa_cuda",
    architectures=("sm90",),
    num_heads=None,
    dtypes=(torch.bfloat16,),
    modules=("cuda.bindings.nvrtc",),
)


@cache
def obstacle() -> str | None:
    """Why the kernel cannot be compiled in this environment, None where it can: loads NVRTC, once a process."""
    from headfit.kernels.nvrtc import Nvrtc

    try:
        Nvrtc()
    except ImportError as error:
        return str(error)
    return None


class SparseMQACudaBackend(ExactHeadsBackend):
    """Runs `sparse_mqa_cuda`. Raises ImportError where the wheels that compile it are missing.

    Args:
        checked, batch_invariant: as for `ExactHeadsBackend`.
        pdl: as for `sparse_mqa_cuda`; False among kernels of which it is not known that they wait for one another.
    """

    name = SUPPORT.name
    supported_num_heads = SUPPORT.num_heads

    def __init__(self, *, checked: bool = False, batch_invariant: bool = False, pdl: bool = True) -> None:
        self.pdl = pdl
        super().__init__(checked=checked, batch_invariant=batch_invariant)

    def load_operator(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        from headfit.kernels.nvrtc import Nvrtc
        from headfit.kernels.sparse_mqa_cuda import sparse_mqa_cuda

        Nvrtc()  # its error names the wheels
        return partial(sparse_mqa_cuda, pdl=self.pdl)

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`."""
        from headfit.kernels.sparse_mqa_cuda import prewarm_cuda

        prewarm_cuda(num_heads, device)
