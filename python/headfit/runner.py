"""Prefill and batched decode over a transformers host: no scheduler, no server, a list of prompts in, texts out.

On a GPU decode steps are replayed CUDA graphs (`headfit.hosts.recorded_decode`); prefill runs eagerly.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

from headfit.config import check_integer
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.hosts.recorded_decode import CudaGraphRecorder, RecordedDecode
from headfit.hosts.transformers import forward, graph_obstacle
from headfit.model_cache import ModelCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    `temperature` 0 is greedy. `top_p` keeps the likeliest tokens that make up that probability. `seed` makes sampling
    repeatable: prompt i of a call draws from a generator seeded with `seed + i`, whatever else is in the batch.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        check_integer("seed", self.seed, maximum=2**62)
        # A temperature near 0 overflows the scaled logits; 0 is what it means.
        if self.temperature != 0 and not 1e-3 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature}, allowed: 0 (greedy), 0.001 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}, allowed: above 0, up to 1")


@dataclass(slots=True)
class Generation:
    """One sequence's answer: its tokens without the stop token, and why it ended ("stop" or "length")."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class _Sequence:
    prompt: Sequence[int]
    generator: torch.Generator
    answer: Generation
    slot: int | None = None
    cached: int = 0  # tokens in the cache
    last_token: int | None = None  # sampled, not yet in the cache


class Runner:
    """Generates with one model and one cache; every attention-TP rank calls it with the same arguments.

    Args:
        model: from `headfit.hosts.transformers.load_model`.
        cache: its request slots bound how many sequences run at a time, further prompts wait; its `max_chunk` bounds
            how many tokens of a prompt one prefill step takes.
        group: rank 0's sampled tokens are the ones that count.
        cuda_graphs: decode by captured CUDA graphs. None: where the model's step can be captured, and eagerly
            elsewhere, for a reason that is logged; False: eagerly.

    Raises:
        ValueError: `cuda_graphs` True where a step cannot be captured: what is in the way.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: ModelCache,
        *,
        group: AttnTPGroup | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.group = group or AttnTPGroup()
        obstacle = "asked for" if cuda_graphs is False else graph_obstacle(model)
        if cuda_graphs and obstacle:
            raise ValueError(f"cuda_graphs: True, but {obstacle}; allowed here: None, False")
        logger.info("decode: %s", f"eager ({obstacle})" if obstacle else "CUDA graphs")
        self.recorded = None if obstacle else RecordedDecode(model, cache, partial(CudaGraphRecorder, cache.device))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, progress: bool = False
    ) -> list[Generation]:
        """Answer `prompts` (token ids), in their order.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for `max_new_tokens`; before anything runs.
        """
        self._check(prompts, sampling)
        answers = [Generation() for _ in prompts]
        waiting = [
            _Sequence(prompt, torch.Generator().manual_seed(sampling.seed + i), answer)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        with torch.inference_mode(), tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
            while waiting:
                batch = waiting[: max(1, self.cache.num_free)]
                waiting = waiting[len(batch) :]
                try:
                    for sequence in batch:
                        sequence.slot = self.cache.allocate()
                    self._run(batch, sampling, bar)
                finally:
                    for sequence in batch:
                        if sequence.slot is not None:
                            self.cache.release(sequence.slot)
        return answers

    def _check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{i}]: empty, allowed: one token or more")
            if len(prompt) + sampling.max_new_tokens > self.cache.max_context:
                raise ValueError(
                    f"prompts[{i}]: {len(prompt)} tokens and max_new_tokens {sampling.max_new_tokens} "
                    f"do not fit the cache's max_context of {self.cache.max_context} tokens"
                )

    def _run(self, sequences: list[_Sequence], sampling: SamplingParams, bar: tqdm) -> None:
        self._prefill(sequences, sampling)
        while running := [sequence for sequence in sequences if sequence.answer.finish_reason is None]:
            bar.update(len(sequences) - len(running))
            sequences = running
            logits = self._decode(sequences)
            self._sample(sequences, logits, sampling)
        bar.update(len(sequences))

    def _prefill(self, sequences: list[_Sequence], sampling: SamplingParams) -> None:
        """Bring every prompt into the cache, a chunk of each a step, and sample each one's first token."""
        waiting = list(sequences)
        while waiting:
            chunks = [sequence.prompt[sequence.cached : sequence.cached + self.cache.max_chunk] for sequence in waiting]
            logits = self._step(waiting, chunks)
            done = [i for i, sequence in enumerate(waiting) if sequence.cached == len(sequence.prompt)]
            self._sample([waiting[i] for i in done], logits[done], sampling)
            waiting = [sequence for sequence in waiting if sequence.cached < len(sequence.prompt)]

    def _decode(self, sequences: list[_Sequence]) -> torch.Tensor:
        """Run the last token of each sequence; the logits behind them, [num_seqs, vocab_size]."""
        if self.recorded is None:
            return self._step(sequences, [[sequence.last_token] for sequence in sequences])
        logits = self.recorded(
            tokens=[sequence.last_token for sequence in sequences],
            request_slots=[sequence.slot for sequence in sequences],
            positions=[sequence.cached for sequence in sequences],
        )
        for sequence in sequences:
            sequence.cached += 1
        return logits

    def _step(self, sequences: list[_Sequence], chunks: list[Sequence[int]]) -> torch.Tensor:
        """Run `chunks[i]` of each sequence; the logits behind each chunk's last token, [num_seqs, vocab_size]."""
        lengths = [len(chunk) for chunk in chunks]
        batch = ForwardBatch.for_step(
            self.cache,
            request_slots=[sequence.slot for sequence in sequences],
            starts=[sequence.cached for sequence in sequences],
            lengths=lengths,
        )
        device = self.cache.device
        input_ids = torch.tensor([token for chunk in chunks for token in chunk], device=device)
        last_rows = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = forward(self.model, input_ids, batch, logits_for=last_rows)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.cached += length
        return logits

    def _sample(self, sequences: list[_Sequence], logits: torch.Tensor, sampling: SamplingParams) -> None:
        if not sequences:
            return
        tokens = self.group.broadcast(self._next_tokens(sequences, logits.float(), sampling))
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            answer = sequence.answer
            if token in sampling.stop_token_ids:
                answer.finish_reason = "stop"
                continue
            answer.token_ids.append(token)
            sequence.last_token = token
            if len(answer.token_ids) == sampling.max_new_tokens:
                answer.finish_reason = "length"

    @staticmethod
    def _next_tokens(sequences: list[_Sequence], logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        if sampling.temperature == 0:
            return logits.argmax(dim=-1)
        logits = TemperatureLogitsWarper(float(sampling.temperature))(None, logits)
        if sampling.top_p < 1:
            logits = TopPLogitsWarper(float(sampling.top_p))(None, logits)
        # Drawn on the CPU, where a sequence's generator gives the same numbers on every device.
        probs = logits.softmax(dim=-1).cpu()
        draws = [p.multinomial(1, generator=s.generator) for p, s in zip(probs, sequences, strict=True)]
        return torch.cat(draws).to(logits.device)
