"""A backend of few head counts, called with any: what a layer does around it, for tests of the backend alone."""

import math
from typing import Any

import torch
from torch import Tensor

from headfit.backends.base import AttentionBackend
from headfit.head_layout import plan_heads


class PaddedBackend:
    """Puts a call's heads in front of `poison` heads up to a count that the backend runs, and cuts the result.

    Padding queries and padding sinks hold `poison`, a number or Inf or NaN.
    """

    supported_num_heads = None

    def __init__(self, backend: AttentionBackend, *, poison: float = math.nan) -> None:
        self.name = backend.name
        self.backend, self.poison = backend, poison

    def decode(self, *, q: Tensor, attn_sink: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.decode`."""
        num_tokens, num_heads, head_dim = q.shape
        supported = self.backend.supported_num_heads
        layout = plan_heads(num_heads=num_heads, attn_tp_size=1, attn_tp_rank=0, supported=supported)
        padded = q.new_full((num_tokens, layout.kernel_num_heads, head_dim), self.poison)
        padded[:, :num_heads] = q
        sinks = attn_sink.new_full((layout.kernel_num_heads,), self.poison)
        sinks[:num_heads] = attn_sink
        o, lse = self.backend.decode(q=padded, attn_sink=sinks, **arguments)
        return o[:, :num_heads], lse[:, :num_heads]

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`."""
        self.backend.prewarm(num_heads, device)
