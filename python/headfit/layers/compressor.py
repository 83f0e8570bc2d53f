"""The compressor: pools `ratio` tokens into one cache entry by a softmax over their gates, channel by channel.

Ratio 128 pools plain windows of 128 tokens. Ratio 4 overlaps: its projections are twice as wide, and entry w pools
eight rows, the first halves of window w-1's tokens and the second halves of window w's (entry 0 has only its own).
"""

import torch
from torch import nn

from headfit.config import DeepSeekV4Config
from headfit.forward_batch import EntryPlan
from headfit.layers.linear import ParallelLinear
from headfit.layers.norm import RMSNorm
from headfit.layers.rope import RotaryEmbedding, apply_rope
from headfit.model_cache import overlaps


class Compressor(nn.Module):
    """`wkv`, `wgate` [width, hidden], `ape` [ratio, width] and `norm`; width is head_dim, twice that with overlap."""

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        ratio: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.ratio = ratio
        self.head_dim = head_dim
        self.overlap = overlaps(ratio)
        width = head_dim * (2 if self.overlap else 1)
        self.wkv = ParallelLinear(config.hidden_size, width, dtype=dtype, device=device)
        self.wgate = ParallelLinear(config.hidden_size, width, dtype=dtype, device=device)
        self.ape = nn.Parameter(torch.empty(ratio, width, dtype=torch.float32, device=device), requires_grad=False)
        self.norm = RMSNorm(head_dim, eps=config.rms_norm_eps, device=device)
        self.rotary = rotary

    def forward(self, x: torch.Tensor, state: torch.Tensor, plan: EntryPlan) -> torch.Tensor:
        """The entries that this step completes, normalised and rotated: [num_entries, head_dim] in x's dtype.

        Arguments as `pooled` has them.
        """
        return apply_rope(self.norm(self.pooled(x, state, plan)), self.rotary(plan.positions))

    def pooled(self, x: torch.Tensor, state: torch.Tensor, plan: EntryPlan) -> torch.Tensor:
        """The entries that this step completes, before norm and RoPE: [num_entries, head_dim] in x's dtype.

        Args:
            x: [num_tokens, hidden].
            state: this layer's running rows, read for tokens of earlier steps and then brought up to date.
        """
        rows = torch.cat((self.wkv(x), self.wgate(x)), dim=-1)
        entries = self._pool(self._window_rows(rows, state, plan), plan.missing)
        state[plan.state_writes] = rows.to(state.dtype)
        return entries

    def _window_rows(self, rows: torch.Tensor, state: torch.Tensor, plan: EntryPlan) -> torch.Tensor:
        """The projections that each entry pools, from this step's tokens or the state: [num_entries, span, 2 width]."""
        return torch.where(plan.in_step[..., None], rows[plan.step_rows], state[plan.state_reads].to(rows.dtype))

    def _pool(self, window: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        kv, gate = window.chunk(2, dim=-1)
        if self.overlap:
            # The older window gives its first halves, the newer one its second halves.
            kv, gate = (_overlapped(part, self.ratio) for part in (kv, gate))
            ape = torch.cat(self.ape.chunk(2, dim=-1))
        else:
            ape = self.ape
        gate = (gate.float() + ape).masked_fill(missing[..., None], float("-inf"))
        weights = gate.softmax(dim=1).to(kv.dtype)
        return torch.where(missing[..., None], 0, kv * weights).sum(dim=1)


def _overlapped(part: torch.Tensor, ratio: int) -> torch.Tensor:
    """[entries, 2 ratio, 2 head_dim] -> [entries, 2 ratio, head_dim]."""
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first[:, :ratio], second[:, ratio:]), dim=1)
