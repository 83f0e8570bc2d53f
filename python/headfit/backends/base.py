"""What an attention backend is: a name, the head counts that its kernel is compiled for, and one operator.

A backend is chosen by name when a layer is built (`headfit.backends.create`) and never substituted later.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from headfit.kernels.sparse_mqa_ref import check_sparse_mqa
from headfit.kv_cache import KVRegion, check_slots


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """Where a backend's kernel runs and for which query head counts: data for plans, without building it."""

    name: str
    architectures: tuple[str, ...]  # CUDA architectures, or ("any",)
    num_heads: tuple[int, ...] | None  # ascending; None where it runs any count exactly
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)  # of the queries
    modules: tuple[str, ...] = ()  # that must be installed


class AttentionBackend(Protocol):
    """Sparse MQA over paged latent keys, which are the values too, with one sink per head."""

    name: str
    supported_num_heads: tuple[int, ...] | None
    """Query head counts that the kernel runs, ascending; None where it runs any count exactly."""

    def decode(
        self,
        *,
        q: torch.Tensor,
        window: KVRegion,
        compressed: KVRegion | None,
        attn_sink: torch.Tensor,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend each query token to its keys of both regions.

        With s_j the scaled scores of a head's valid keys and m their maximum,
        `o = sum_j exp(s_j - m) v_j / (sum_j exp(s_j - m) + exp(sink - m))`. A token without a valid key gives zeros.

        Args:
            q: [num_tokens, num_heads, head_dim], num_heads one of `supported_num_heads`.
            window, compressed: the two cache regions.
            attn_sink: float32 [num_heads].
            softmax_scale: multiplies the scores.

        Returns:
            o [num_tokens, num_heads, head_dim] in q's dtype, and lse float32 [num_tokens, num_heads]: natural
            logarithm of the summed exponentials, without the sink, -inf for a token without a valid key.
        """
        ...

    def step(self) -> AbstractContextManager[None]:
        """Around one forward of a model: what the backend plans for its lengths may be shared by its layers."""
        ...

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """Compile and load what `decode` may launch for `num_heads` on `device`, so that no request waits for it."""
        ...


def check_decode(
    backend: AttentionBackend, q: torch.Tensor, regions: tuple[KVRegion, ...], attn_sink: torch.Tensor
) -> None:
    """Refuse a decode call that no backend could run, or not with so many heads; nothing is read back.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what is allowed.
    """
    check_sparse_mqa(q, regions, attn_sink)
    if backend.supported_num_heads is not None and q.shape[1] not in backend.supported_num_heads:
        raise ValueError(f"q: {q.shape[1]} heads, allowed by backend {backend.name}: {backend.supported_num_heads}")


def check_indices(regions: tuple[KVRegion, ...]) -> None:
    """Checked mode: refuse an index past its pool. Waits for the device.

    Raises:
        IndexError: naming region, row and column.
    """
    for region, name in zip(regions, ("window", "compressed"), strict=False):
        read = torch.where(region.within_length(), region.indices, -1)
        check_slots(f"{name}.indices", read, region.pool.num_slots)
