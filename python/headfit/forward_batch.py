"""What one forward step needs to know about its tokens, computed once and shared by all layers.

Tokens of several sequences travel as one flat batch, sequence after sequence. `ForwardBatch.for_step` takes any mix of
prompt chunks and single tokens from host lists, `ForwardBatch.for_decode` one token per sequence from device tensors:
its shapes depend on the batch size alone and it never waits for the device, so it can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headfit.model_cache import INDEXED_RATIO, ModelCache, compressor_span


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """The compressed entries of one ratio that a step completes, and the token rows that each pools.

    An entry pools `span` consecutive token positions (8 for ratio 4, 128 for ratio 128), oldest first.
    """

    slots: torch.Tensor  # int64 [E]: pool slot, -1 where the entry is not complete and its value is dropped
    positions: torch.Tensor  # int64 [E]: of the entry's first token, where its RoPE stands
    step_rows: torch.Tensor  # int64 [E, span]: row among this step's tokens,
    state_reads: torch.Tensor  # int64 [E, span]: or row of the compressor's state
    in_step: torch.Tensor  # bool [E, span]: which of the two
    missing: torch.Tensor  # bool [E, span]: before the sequence's first token
    state_writes: torch.Tensor  # int64 [num_tokens]: state row of each token of this step


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Tokens that form a rectangle, `len(request_slots)` sequences of equally many tokens: what the indexer scores."""

    tokens: slice
    request_slots: torch.Tensor  # int64 [num_seqs]
    num_entries: int  # no query of the block sees more ratio-4 entries


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's metadata; every tensor is on the cache's device."""

    cache: ModelCache
    positions: torch.Tensor  # int64 [num_tokens], -1 for a padding row
    request_slots: torch.Tensor  # int64 [num_tokens]
    window_writes: torch.Tensor  # int64 [num_tokens]: pool slot of each token's key, -1 for a padding row
    window_indices: torch.Tensor  # int32 [num_tokens, window]: newest first, -1 behind the first token
    window_lengths: torch.Tensor  # int32 [num_tokens]
    visible_entries: dict[int, torch.Tensor]  # by ratio: int32 [num_tokens], entries complete at each token
    max_entries: dict[int, int]  # by ratio: no token sees more
    entry_lengths: dict[int, torch.Tensor]  # by ratio: int32 [num_tokens], entries that each token attends to
    entry_plans: dict[int, EntryPlan]
    query_blocks: tuple[QueryBlock, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of this step."""
        return self.positions.shape[0]

    @classmethod
    def for_step(
        cls, cache: ModelCache, *, request_slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> "ForwardBatch":
        """A step that brings `lengths[i]` tokens of the sequence in `request_slots[i]`, which has `starts[i]` so far.

        Raises:
            ValueError: lists of different lengths, a slot out of range or named twice, a sequence longer than the
                cache's `max_context`, a chunk longer than its `max_chunk`.
        """
        _check_step(cache, request_slots, starts, lengths)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        first_rows = [sum(lengths[:i]) for i in range(len(lengths))]

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=cache.device)

        slots = tensor(request_slots)
        sequence = tensor([i for i, length in enumerate(lengths) for _ in range(length)])
        positions = tensor([p for start, end in zip(starts, ends, strict=True) for p in range(start, end)])
        plans = {}
        for ratio in cache.entry_tables:
            entries = [(i, w) for i, end in enumerate(ends) for w in range(starts[i] // ratio, end // ratio)]
            owner = tensor([i for i, _ in entries])
            plans[ratio] = _plan_entries(
                cache,
                ratio,
                request_slots=slots[owner],
                starts=tensor(starts)[owner],
                first_rows=tensor(first_rows)[owner],
                entries=tensor([w for _, w in entries]),
                state_writes=_state_writes(cache, ratio, slots[sequence], positions, tensor(ends)[sequence]),
            )
        return cls._build(
            cache,
            positions=positions,
            request_slots=slots[sequence],
            entry_plans=plans,
            max_entries={ratio: max((end // ratio for end in ends), default=0) for ratio in plans},
            query_blocks=_query_blocks(cache, slots, first_rows, lengths, ends),
        )

    @classmethod
    def for_decode(cls, cache: ModelCache, *, request_slots: torch.Tensor, positions: torch.Tensor) -> "ForwardBatch":
        """One token per sequence, static in shape. A row with position -1 is padding: it reads and writes nothing.

        Args:
            request_slots: int64 [num_seqs], all different where the position is not -1. Not checked: it is on the
                device.
            positions: int64 [num_seqs], of the token that each sequence brings.
        """
        rows = torch.arange(positions.shape[0], device=cache.device)
        plans = {}
        for ratio in cache.entry_tables:
            completes = (positions >= 0) & ((positions + 1) % ratio == 0)
            plans[ratio] = _plan_entries(
                cache,
                ratio,
                request_slots=request_slots,
                starts=positions,
                first_rows=rows,
                entries=torch.where(completes, positions // ratio, -1),
                state_writes=_state_writes(cache, ratio, request_slots, positions, positions + 1),
            )
        max_entries = {ratio: cache.max_context // ratio for ratio in plans}
        block = QueryBlock(slice(0, positions.shape[0]), request_slots, max_entries.get(INDEXED_RATIO, 0))
        return cls._build(
            cache,
            positions=positions,
            request_slots=request_slots,
            entry_plans=plans,
            max_entries=max_entries,
            query_blocks=(block,),
        )

    @classmethod
    def _build(cls, cache: ModelCache, *, positions, request_slots, entry_plans, max_entries, query_blocks):
        seen = positions[:, None] - torch.arange(cache.window, device=cache.device)
        visible = {ratio: ((positions + 1) // ratio).int() for ratio in entry_plans}
        # One tensor for all layers of a ratio: a backend that plans by lengths then plans once a step.
        most = max_entries | {INDEXED_RATIO: cache.config.index_topk}
        return cls(
            cache=cache,
            positions=positions,
            request_slots=request_slots,
            window_writes=cache.window_slots(request_slots, positions),
            window_indices=cache.window_slots(request_slots[:, None], seen).int(),
            window_lengths=(positions + 1).clamp(0, cache.window).int(),
            visible_entries=visible,
            max_entries=max_entries,
            entry_lengths={ratio: entries.clamp(max=most[ratio]) for ratio, entries in visible.items()},
            entry_plans=entry_plans,
            query_blocks=query_blocks,
        )


def _plan_entries(cache, ratio, *, request_slots, starts, first_rows, entries, state_writes) -> EntryPlan:
    """Where each entry's rows come from: this step brings its sequence's positions from `starts` on."""
    span = compressor_span(ratio)
    first = entries.clamp(min=0) * ratio
    tokens = first[:, None] + (ratio - span) + torch.arange(span, device=cache.device)
    in_step = tokens >= starts[:, None]
    # An incomplete entry reaches past the step's last row; what it reads there is dropped with it.
    last_row = max(state_writes.shape[0] - 1, 0)
    return EntryPlan(
        slots=cache.entry_slots(ratio, request_slots, entries),
        positions=first,
        step_rows=(first_rows[:, None] + tokens - starts[:, None]).clamp(0, last_row),
        state_reads=cache.state_rows(ratio, request_slots[:, None], tokens),
        in_step=in_step,
        missing=tokens < 0,
        state_writes=state_writes,
    )


def _state_writes(cache, ratio, request_slots, positions, ends) -> torch.Tensor:
    """State row of each token; only the last `span` tokens of a sequence are kept."""
    kept = positions >= ends - compressor_span(ratio)
    return cache.state_rows(ratio, request_slots, torch.where(kept, positions, -1))


def _query_blocks(cache, request_slots, first_rows, lengths, ends) -> tuple[QueryBlock, ...]:
    if INDEXED_RATIO not in cache.entry_tables:
        return ()
    if len(set(lengths)) == 1:
        return (QueryBlock(slice(0, sum(lengths)), request_slots, max(ends) // INDEXED_RATIO),)
    return tuple(
        QueryBlock(slice(start, start + length), request_slots[i : i + 1], ends[i] // INDEXED_RATIO)
        for i, (start, length) in enumerate(zip(first_rows, lengths, strict=True))
        if length
    )


def _check_step(cache, request_slots, starts, lengths) -> None:
    if not len(request_slots) == len(starts) == len(lengths):
        raise ValueError(
            f"request_slots, starts, lengths: {len(request_slots)}, {len(starts)} and {len(lengths)} long, "
            "allowed: one value a sequence in each"
        )
    if len(set(request_slots)) != len(request_slots):
        raise ValueError(f"request_slots: {list(request_slots)} names a slot twice")
    for slot, start, length in zip(request_slots, starts, lengths, strict=True):
        if not 0 <= slot < cache.max_seqs:
            raise ValueError(f"request_slots: {slot}, allowed: 0 to {cache.max_seqs - 1}")
        if start < 0 or length < 0:
            raise ValueError(f"starts, lengths: {start} and {length} (slot {slot}), allowed: 0 or more")
        if start + length > cache.max_context:
            raise ValueError(
                f"lengths: slot {slot} would hold {start + length} tokens, allowed: max_context {cache.max_context}"
            )
        if min(start, cache.window - 1) + length > cache.ring_size:
            raise ValueError(
                f"lengths: {length} tokens at once (slot {slot}), "
                f"allowed: {cache.ring_size - cache.window + 1} after {start}"
            )
