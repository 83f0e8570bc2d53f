"""Exact-answer accuracy of the tiny checkpoint on held-out problems, whole and with parts of its attention broken.

The ablations show that the checkpoint is a sensitive test: a backend that swaps sinks between ranks, cuts the window,
selects the wrong compressed entries or loses them gives wrong answers, not merely other logits.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV4ForCausalLM, PreTrainedTokenizerFast

from headfit.assets.word_problems import (
    WordProblem,
    draw_shots,
    few_shot_prompt,
    held_out_problems,
    parse_answer,
    question_prompt,
)

MAX_NEW_TOKENS = 80
# Two lengths, so that prompts go through the model in large batches of one length: padding would enter the
# compressors' windows. During the answer the longer one closes a window of 128 tokens, both close windows of 4.
PROMPT_TOKENS = (398, 501)
Ablation = Callable[[DeepseekV4ForCausalLM], contextlib.AbstractContextManager[None]]


def fitted_prompt(problem: WordProblem, tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> str:
    """A few-shot prompt of exactly ``length`` tokens, by drawing the last shot until it fits."""
    rng = random.Random(seed)

    def size(shot: WordProblem) -> int:
        text = f"{question_prompt(shot)} {shot.solution}\n\n"
        return len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    bare = len(tokenizer(few_shot_prompt(problem, [])).input_ids)
    while True:
        shots: list[WordProblem] = []
        missing = length - bare
        while missing > 110:
            shots += draw_shots(rng, 1, problem.context)
            missing -= size(shots[-1])
        for last in draw_shots(rng, 60, problem.context):
            if size(last) == missing:
                return few_shot_prompt(problem, [*shots, last])


def few_shot_prompts(problems: list[WordProblem], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Few-shot prompts for the problems, of the lengths in ``PROMPT_TOKENS`` in turn."""
    lengths = itertools.cycle(PROMPT_TOKENS)
    return [
        fitted_prompt(problem, tokenizer, length, seed)
        for seed, (problem, length) in enumerate(zip(problems, lengths, strict=False))
    ]


@torch.no_grad()
def generate(
    model: DeepseekV4ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], batch: int = 100
) -> list[str]:
    """Greedy completions by transformers' ``generate``, prompts of equal length batched together."""
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    completions = [""] * len(rows)
    for length, group in itertools.groupby(order, key=lambda row: len(rows[row])):
        same = list(group)
        for first in range(0, len(same), batch):
            chunk = same[first : first + batch]
            ids = torch.tensor([rows[row] for row in chunk], device=model.device)
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
            )
            texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
            for row, text in zip(chunk, texts, strict=True):
                completions[row] = text
    return completions


@contextlib.contextmanager
def rolled_sinks(model: DeepseekV4ForCausalLM, tp: int) -> Iterator[None]:
    """Every head takes the sink of the same head on the neighbour rank of ``tp`` tensor-parallel ranks."""
    shift = model.config.num_attention_heads // tp
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    for sink in sinks:
        sink.data = sink.data.roll(shift)
    yield
    for sink in sinks:
        sink.data = sink.data.roll(-shift)


@contextlib.contextmanager
def window_cut(model: DeepseekV4ForCausalLM, window: int) -> Iterator[None]:
    """A shorter sliding window in all layers."""
    whole, model.config.sliding_window = model.config.sliding_window, window
    yield
    model.config.sliding_window = whole


@contextlib.contextmanager
def hooked(modules: list[nn.Module], hook: Callable) -> Iterator[None]:
    """A forward hook on each module for the duration."""
    handles = [module.register_forward_hook(hook) for module in modules]
    yield
    for handle in handles:
        handle.remove()


def selection_replaced(model: DeepseekV4ForCausalLM, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """The indexer's choice replaced by the first or the last ``index_topk`` visible entries."""
    attentions = [layer.self_attn for layer in model.model.layers]
    indexers = [a.compressor.indexer for a in attentions if a.layer_type == "compressed_sparse_attention"]

    def replace(indexer: nn.Module, args: tuple, chosen: Tensor) -> Tensor:
        visible = ((args[2] + 1) // indexer.compress_rate).unsqueeze(-1)
        order = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(chosen)
        entries = visible - 1 - order if last else order
        return torch.where((entries >= 0) & (entries < visible), entries, -1)

    return hooked(indexers, replace)


def entries_removed(model: DeepseekV4ForCausalLM, *layer_types: str) -> contextlib.AbstractContextManager[None]:
    """The compressed entries of these layer types hidden from every query."""
    attentions = [layer.self_attn for layer in model.model.layers]
    compressors = [a.compressor for a in attentions if a.layer_type in layer_types]

    def hide(_: nn.Module, args: tuple, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
        entries, queries = output[0], args[0].shape[1]
        return entries, entries.new_full((entries.shape[0], 1, queries, entries.shape[2]), float("-inf"))

    return hooked(compressors, hide)


CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
ABLATIONS: dict[str, Ablation] = {
    "sinks_rolled_tp2": lambda model: rolled_sinks(model, 2),
    "sinks_rolled_tp4": lambda model: rolled_sinks(model, 4),
    "sinks_rolled_tp8": lambda model: rolled_sinks(model, 8),
    "window_32": lambda model: window_cut(model, 32),
    "indexer_first_k": lambda model: selection_replaced(model, last=False),
    "indexer_last_k": lambda model: selection_replaced(model, last=True),
    "compressed_entries_removed": lambda model: entries_removed(model, CSA, HCA),
    "ratio_4_entries_removed": lambda model: entries_removed(model, CSA),
    "ratio_128_entries_removed": lambda model: entries_removed(model, HCA),
}
CONDITIONS = ("few_shot", "zero_shot", "priced_few_shot", *ABLATIONS)


def score(problems: list[WordProblem], completions: list[str]) -> dict[str, int | float]:
    """Count of exact answers."""
    correct = sum(parse_answer(text) == problem.answer for problem, text in zip(problems, completions, strict=True))
    return {"correct": correct, "problems": len(problems), "accuracy": round(correct / len(problems), 4)}


def evaluate(checkpoint: Path, count: int, device: str, conditions: Sequence[str]) -> dict[str, dict[str, int | float]]:
    """Accuracy of a checkpoint in float32 under each of ``conditions``.

    These are ``few_shot``, ``zero_shot`` and the names in ``ABLATIONS`` (few-shot) on the plain held-out problems,
    ``priced_few_shot`` on the priced ones.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).eval()
    results = {}
    for name in conditions:
        problems = held_out_problems(count, priced=name.startswith("priced"))
        if name == "zero_shot":
            prompts = [few_shot_prompt(problem, []) for problem in problems]
        else:
            prompts = few_shot_prompts(problems, tokenizer)
        with ABLATIONS[name](model) if name in ABLATIONS else contextlib.nullcontext():
            results[name] = score(problems, generate(model, tokenizer, prompts))
        print(name, results[name], flush=True)
    return results
