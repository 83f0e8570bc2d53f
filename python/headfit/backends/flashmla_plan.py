"""FlashMLA's scheduling metadata, in one owner that hands out no stale one.

The kernels split the keys of a batch over the GPU by a plan that the first call with a fresh metadata object computes
on the device (three of them took 95 us of an H200 decode step). The plan holds for one set of shapes and one set of
length values; the library checks the shapes only, and with other lengths a stale plan gives wrong results. So a plan is
used once, unless the caller opens a step and comes again with the very same length tensors, unwritten since. (torch
does not count the writes of tensors made in inference mode: there a step's promise, to write no length, is all.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headfit.kv_cache import KVRegion


@dataclass(frozen=True, slots=True)
class PreparedRegions:
    """The regions' index rows and lengths as the kernel takes them, and the metadata that belongs to them.

    `indices` int32 [rows, padded keys], contiguous, -1 wherever no key is read; `lengths` int32 [rows].
    """

    indices: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]
    metadata: Any


class _Source:
    """A caller's tensor as it was: the same object, unwritten since where torch counts writes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, _version(tensor)  # held, so that no other tensor takes its identity

    def is_still(self, tensor: Tensor) -> bool:
        return tensor is self.tensor and _version(tensor) == self.version


class _Plan:
    """What belongs to one set of length tensors and one set of shapes."""

    def __init__(self, key: tuple, regions: tuple[KVRegion, ...], rows: slice, metadata: Any, multiple: int) -> None:
        self.key, self.metadata = key, metadata
        self._rows, self._multiple = rows, multiple
        self._length_sources = [_Source(region.lengths) for region in regions]
        self.lengths = tuple(region.lengths[rows].clamp(0, region.indices.shape[1]).contiguous() for region in regions)
        self._read = [
            torch.arange(region.indices.shape[1], device=lengths.device) < lengths[:, None]
            for region, lengths in zip(regions, self.lengths, strict=True)
        ]
        self._index_sources: list[tuple[_Source, Tensor] | None] = [None] * len(regions)

    def serves(self, key: tuple, regions: tuple[KVRegion, ...]) -> bool:
        return key == self.key and all(
            source.is_still(region.lengths) for source, region in zip(self._length_sources, regions, strict=True)
        )

    def indices(self, regions: tuple[KVRegion, ...]) -> tuple[Tensor, ...]:
        return tuple(self._indices(i, region.indices) for i, region in enumerate(regions))

    def _indices(self, i: int, indices: Tensor) -> Tensor:
        """Index row `i` padded; layers share a step's window rows, which are then prepared once."""
        known = self._index_sources[i]
        if known is not None and known[0].is_still(indices):
            return known[1]
        # Past its length a row may hold anything, and the kernels may load what it names.
        rows = torch.where(self._read[i], indices[self._rows], -1)
        num_keys = rows.shape[1]
        padded = max(self._multiple, num_keys + -num_keys % self._multiple)
        if padded > num_keys:
            rows = F.pad(rows, (0, padded - num_keys), value=-1)
        self._index_sources[i] = (_Source(indices), rows.contiguous())
        return self._index_sources[i][1]


class PlanOwner:
    """Makes and keeps scheduling metadata.

    Args:
        new_metadata: makes a fresh metadata object, which the next kernel call fills.
        index_multiple: index rows are padded to multiples of this.
    """

    def __init__(self, new_metadata: Callable[[], Any], *, index_multiple: int) -> None:
        self._new_metadata = new_metadata
        self._multiple = index_multiple
        self._plans: list[_Plan] | None = None  # None outside of a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it, calls with the same length tensors and shapes share one plan. Nothing outlives it.

        Raises:
            RuntimeError: one step within another.
        """
        if self._plans is not None:
            raise RuntimeError("step: opened within another one, allowed: one at a time")
        self._plans = []
        try:
            yield
        finally:
            self._plans = None

    def prepare(
        self, regions: tuple[KVRegion, ...], *, rows: slice, num_heads: int, in_capture: bool
    ) -> PreparedRegions:
        """The tokens `rows` of `regions` for the kernel. Neither waits for the device nor depends on values.

        A plan computed outside of a graph capture is not used inside it: a replay must compute its own.
        """
        sizes = tuple((region.pool.page_size, region.indices.shape[1]) for region in regions)
        key = (rows.start, rows.stop, num_heads, sizes, in_capture)
        plan = next((plan for plan in self._plans or () if plan.serves(key, regions)), None)
        if plan is None:
            plan = _Plan(key, regions, rows, self._new_metadata(), self._multiple)
            if self._plans is not None:
                self._plans.append(plan)
        return PreparedRegions(plan.indices(regions), plan.lengths, plan.metadata)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
