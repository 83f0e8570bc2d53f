"""The cache of a whole model: page tables, the paged pools of every layer, and the compressors' running state.

A request slot is a sequence's place in the cache. All layers share the page tables; each layer has its own pools.

    window      the keys of the last positions, in a ring of `ring_size` tokens: position p sits at ring offset
                p % ring_size. The ring holds a window and one chunk, so a chunk's tokens can be stored before any of
                them attends.
    compressed  one entry per `ratio` tokens (ratio 4 or 128): entry w sits at offset w.
    index keys  ratio 4 only: the indexer's keys, paged like the entries, in the model's dtype.
    state       the last rows of the compressors' projections, which entries still to come will pool: position p sits
                in row p % state_len of its request slot.
"""

from dataclasses import dataclass

import torch

from headfit.config import DeepSeekV4Config
from headfit.kv_cache import KVFormat, ModelDtypeFormat, PagedPool

INDEXED_RATIO = 4
"""The compress ratio whose entries overlap, and of which the indexer picks."""
WINDOW_PAGE_SIZE = 64
ENTRY_PAGE_SIZES = {INDEXED_RATIO: 64, 128: 2}  # entries a page, by compress ratio: what servers use


def overlaps(ratio: int) -> bool:
    """Whether an entry also pools the window before its own."""
    return ratio == INDEXED_RATIO


def compressor_span(ratio: int) -> int:
    """Tokens that one entry pools, which is also how many past rows the state keeps of a sequence."""
    return 2 * ratio if overlaps(ratio) else ratio


def state_width(ratio: int, head_dim: int) -> int:
    """Channels of a state row: the kv and the gate projection."""
    return 2 * head_dim * (2 if overlaps(ratio) else 1)


@dataclass(slots=True)
class LayerCache:
    """One layer's pools and state; the last four are None where the layer has no such part."""

    window: PagedPool
    compressed: PagedPool | None = None
    state: torch.Tensor | None = None  # [max_seqs * state_len + 1, state_width], the last row is for dropped writes
    index_keys: PagedPool | None = None
    index_state: torch.Tensor | None = None


class ModelCache:
    """Everything that a model remembers of `max_seqs` sequences of at most `max_context` tokens.

    Args:
        max_seqs: request slots.
        max_context: tokens a sequence may hold, prompt and answer together.
        max_chunk: tokens of one sequence that one forward may bring.
        kv_format: how window keys and compressed entries are stored.
        dtype: of the compressors' state and the index keys: the model's.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        *,
        max_seqs: int,
        max_context: int,
        max_chunk: int,
        kv_format: KVFormat,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_context", max_context), ("max_chunk", max_chunk)):
            if value < 1:
                raise ValueError(f"{name}: {value}, allowed: 1 or more")
        self.config = config
        self.max_seqs = max_seqs
        self.max_context = max_context
        self.max_chunk = max_chunk
        self.device = torch.device(device)
        ring = min(config.sliding_window - 1 + max_chunk, max_context)
        ring_pages = -(-ring // WINDOW_PAGE_SIZE)
        self.ring_size = ring_pages * WINDOW_PAGE_SIZE
        self.window_table = self._page_table(ring_pages)
        self.entry_tables = {
            ratio: self._page_table(max(1, -(-(max_context // ratio) // ENTRY_PAGE_SIZES[ratio])))
            for ratio in sorted(set(config.compress_ratios) - {0})
        }
        self._kv_format = kv_format
        self._dtype = dtype
        self.layers = [self._layer(ratio) for ratio in config.compress_ratios]
        self._in_use: set[int] = set()

    @property
    def window(self) -> int:
        """Tokens that a query attends to, itself included."""
        return self.config.sliding_window

    @property
    def num_free(self) -> int:
        """Request slots that are not in use."""
        return self.max_seqs - len(self._in_use)

    def allocate(self) -> int:
        """A free request slot. What an earlier sequence left in it is never read."""
        if not self.num_free:
            raise RuntimeError(f"all {self.max_seqs} request slots are in use")
        slot = next(slot for slot in range(self.max_seqs) if slot not in self._in_use)
        self._in_use.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a request slot back."""
        if slot not in self._in_use:
            raise ValueError(f"slot: {slot} is not in use")
        self._in_use.remove(slot)

    def window_slots(self, request_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool slots of window keys; -1 where the position is negative. The arguments broadcast."""
        offset = positions.clamp(min=0) % self.ring_size
        slots = self._slots(self.window_table, request_slots, offset, WINDOW_PAGE_SIZE)
        return torch.where(positions >= 0, slots, -1)

    def entry_slots(self, ratio: int, request_slots: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Pool slots of compressed entries; -1 where the entry is negative. The arguments broadcast."""
        slots = self._slots(self.entry_tables[ratio], request_slots, entries.clamp(min=0), ENTRY_PAGE_SIZES[ratio])
        return torch.where(entries >= 0, slots, -1)

    def state_rows(self, ratio: int, request_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the compressors' state; the row for dropped writes where the position is negative."""
        span = compressor_span(ratio)
        rows = request_slots * span + positions.clamp(min=0) % span
        return torch.where(positions >= 0, rows, self.max_seqs * span)

    def _slots(self, table: torch.Tensor, request_slots: torch.Tensor, offset: torch.Tensor, page_size: int):
        return table[request_slots, offset // page_size] * page_size + offset % page_size

    def _page_table(self, pages: int) -> torch.Tensor:
        return torch.arange(self.max_seqs * pages, device=self.device).view(self.max_seqs, pages)

    def _pool(self, table: torch.Tensor, page_size: int, kv_format: KVFormat) -> PagedPool:
        return PagedPool(num_pages=table.numel(), page_size=page_size, kv_format=kv_format, device=self.device)

    def _state(self, ratio: int, head_dim: int) -> torch.Tensor:
        rows = self.max_seqs * compressor_span(ratio) + 1
        return torch.zeros(rows, state_width(ratio, head_dim), dtype=self._dtype, device=self.device)

    def _layer(self, ratio: int) -> LayerCache:
        config = self.config
        layer = LayerCache(self._pool(self.window_table, WINDOW_PAGE_SIZE, self._kv_format))
        if ratio:
            layer.compressed = self._pool(self.entry_tables[ratio], ENTRY_PAGE_SIZES[ratio], self._kv_format)
            layer.state = self._state(ratio, config.head_dim)
        if ratio == INDEXED_RATIO:
            index_format = ModelDtypeFormat(self._dtype, config.index_head_dim)
            layer.index_keys = self._pool(self.entry_tables[ratio], ENTRY_PAGE_SIZES[ratio], index_format)
            layer.index_state = self._state(ratio, config.index_head_dim)
        return layer
