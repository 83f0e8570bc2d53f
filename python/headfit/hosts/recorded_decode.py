"""Decode steps that are recorded once a batch size and replayed: as CUDA graphs on a GPU.

A batch smaller than its bucket is filled up with padding rows: position -1, which reads and writes nothing.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import DeepseekV4ForCausalLM

from headfit.attn_sink import sink_addresses
from headfit.config import check_integer
from headfit.forward_batch import ForwardBatch
from headfit.hosts.transformers import forward
from headfit.model_cache import ModelCache

logger = logging.getLogger(__name__)

WARM_UPS = 2  # runs of a step before it is captured: what first calls allocate, compile or connect is not in the graph

Step = Callable[[], torch.Tensor]
Recorder = Callable[[Step], Step]
"""Takes a step that reads static memory only, and returns what replays it."""


def batch_buckets(max_seqs: int) -> tuple[int, ...]:
    """The batch sizes that decode steps are recorded for: 1, 2, 4, multiples of 8, and `max_seqs`."""
    check_integer("max_seqs", max_seqs, minimum=1)
    sizes = {1, 2, 4, *range(8, max_seqs, 8)}
    return (*sorted(size for size in sizes if size < max_seqs), max_seqs)


class CudaGraphRecorder:
    """Captures steps as CUDA graphs that share one memory pool: a replay's result stands until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """`step` reads static memory only. It runs `WARM_UPS` times, is captured, and the result replays it."""
        with torch.cuda.device(self._device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the process group's watchdog, go on calling CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class RecordedDecode:
    """One token a sequence, by steps that are recorded once a batch size and then replayed.

    A step reads its tokens, request slots and positions from static memory and makes all of its metadata itself, so
    that a replay follows them. Sequences join and leave from call to call. Values written into a sink show in the next
    replay; where a sink was rebound, every step is recorded again before anything runs.

    Args:
        new_recorder: makes what records the steps, such as a `CudaGraphRecorder`.
    """

    def __init__(self, model: DeepseekV4ForCausalLM, cache: ModelCache, new_recorder: Callable[[], Recorder]) -> None:
        self.model = model
        self.cache = cache
        self._new_recorder = new_recorder
        self._recorder = new_recorder()
        self.buckets = batch_buckets(cache.max_seqs)
        self._steps: dict[int, tuple[torch.Tensor, Step]] = {}
        self._sinks: tuple[int, ...] = ()

    @torch.inference_mode()
    def __call__(
        self, *, tokens: Sequence[int], request_slots: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """Bring one token of each sequence, in host lists of equal length.

        Returns:
            logits [num_seqs, vocab_size] behind each token, in memory that the next call overwrites.

        Raises:
            ValueError: lists of different or no length, more sequences than request slots, a slot out of range or
                named twice, a token out of the vocabulary, a position out of the cache's range.
            TypeError: a value that is no int.
        """
        self._check(tokens, request_slots, positions)
        self._drop_stale_steps()
        num_seqs = len(tokens)
        bucket = next(size for size in self.buckets if size >= num_seqs)
        if bucket not in self._steps:
            self._steps[bucket] = self._record(bucket)
        inputs, replay = self._steps[bucket]
        inputs.copy_(_padded_inputs(tokens, request_slots, positions, bucket))
        return replay()[:num_seqs]

    def _record(self, bucket: int) -> tuple[torch.Tensor, Step]:
        # All rows are padding while the step warms up: it changes nothing.
        inputs = _padded_inputs([], [], [], bucket).to(self.cache.device)
        tokens, request_slots, positions = inputs

        def step() -> torch.Tensor:
            batch = ForwardBatch.for_decode(self.cache, request_slots=request_slots, positions=positions)
            return forward(self.model, tokens, batch)

        logger.info("decode step recorded for %d sequences", bucket)
        return inputs, self._recorder(step)

    def _drop_stale_steps(self) -> None:
        addresses = sink_addresses(self.model)
        if addresses != self._sinks and self._steps:
            logger.warning("attn_sink was rebound: decode steps are recorded again")
            self._steps.clear()
            self._recorder = self._new_recorder()  # a memory pool whose graphs are all gone takes no new one
        self._sinks = addresses

    def _check(self, tokens, request_slots, positions) -> None:
        lengths = len(tokens), len(request_slots), len(positions)
        if len(set(lengths)) != 1 or not 1 <= len(tokens) <= self.cache.max_seqs:
            raise ValueError(
                f"tokens, request_slots, positions: {', '.join(map(str, lengths))} long, "
                f"allowed: equally long, 1 to {self.cache.max_seqs}"
            )
        for name, values, limit in (
            ("tokens", tokens, self.model.config.vocab_size),
            ("request_slots", request_slots, self.cache.max_seqs),
            ("positions", positions, self.cache.max_context),
        ):
            for value in values:
                if not isinstance(value, int):
                    raise TypeError(f"{name}: {value!r}, allowed: int")
                if not 0 <= value < limit:
                    raise ValueError(f"{name}: {value}, allowed: 0 to {limit - 1}")
        if len(set(request_slots)) != len(request_slots):
            raise ValueError(f"request_slots: {list(request_slots)} names a slot twice")


def _padded_inputs(tokens, request_slots, positions, bucket: int) -> torch.Tensor:
    """int64 [3, bucket] on the host, filled up with padding rows."""
    padding = bucket - len(tokens)
    columns = ([*values, *[fill] * padding] for values, fill in ((tokens, 0), (request_slots, 0), (positions, -1)))
    return torch.tensor(list(columns), dtype=torch.int64)
