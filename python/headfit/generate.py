"""What `headfit generate` does: everything that can be checked first, then the ranks, then the texts."""

from __future__ import annotations

import argparse
import json
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headfit.config import DeepSeekV4Config
from headfit.head_layout import plan_heads
from headfit.launch import check_ranks, describe, run_local_ranks

if TYPE_CHECKING:
    from headfit.assets.word_problems import WordProblem
    from headfit.distributed import AttnTPGroup
    from headfit.memory import RunShape

TINY = Path(__file__).parent / "assets" / "tiny"
NUM_SAMPLES = 5
_MAX_BATCH = 8  # sequences at a time, where the user does not say
_DOCTOR_CONTEXT = 4096  # tokens a sequence, where `doctor` is not told


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, what of it is shown, and the right answer where that is known."""

    prompt: str
    shown: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is sent."""

    folder: str
    shape: RunShape
    prompts: list[list[int]]
    sampling: dict[str, Any]
    progress: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A checked request: `start` is what is left to do."""

    job: Job
    device: str
    questions: list[Question]
    backend_reason: str
    memory: dict[str, Any]
    tokenizer: Any

    def start(self) -> list[tuple[str, str]]:
        """Run the ranks; (text, why it ended) of each question."""
        answers = run_local_ranks(answer_on_rank, self.job.shape.attn_tp_size, args=(self.job,), device=self.device)
        return [(self.tokenizer.decode(tokens, skip_special_tokens=True), reason) for tokens, reason in answers]


def prepare(args: argparse.Namespace, *, progress: bool) -> Run:
    """Check a request without reading a weight. Cheap checks come first.

    Raises:
        ValueError, OSError: one line for the user.
    """
    from headfit.runner import SamplingParams

    folder, config = find_model(args.model)
    questions = _questions(args)
    SamplingParams(temperature=args.temperature, top_p=args.top_p)  # a rank would refuse them after the run began
    device, reason, make_shape = resolve(args, config)
    tokenizer = _load_tokenizer(folder)
    raw = args.raw or not (args.prompt or args.prompts_file)
    prompts = [_encode(tokenizer, question.prompt, raw=raw) for question in questions]
    _check_prompts(prompts, args, config)
    need = max(map(len, prompts)) + args.max_new_tokens
    shape = make_shape(args.max_context or need, min(args.max_batch or _MAX_BATCH, len(prompts)))
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p}
    sampling |= {"seed": args.seed, "stop_token_ids": _stop_tokens(folder, tokenizer)}
    job = Job(str(folder), shape, prompts, sampling, progress)
    return Run(job, device, questions, reason, _estimate(folder, config, shape, device), tokenizer)


def show(setting: dict[str, Any], run: Run, answers: Sequence[tuple[str, str]]) -> None:
    """Print the setting, the questions with their (text, why it ended), and how many are known to be right."""
    from headfit.assets.word_problems import parse_answer

    backend = f"backend {setting['backend']} ({run.backend_reason})"
    numbers = f"{setting['kv_format']} KV cache, {setting['dtype']}, {setting['device']}"
    print(f"{setting['model']}: attention TP {setting['attn_tp_size']}, {backend}, {numbers}")
    right = 0
    for i, (question, (text, reason)) in enumerate(zip(run.questions, answers, strict=True), 1):
        cut = " [cut at --max-new-tokens]" if reason == "length" else ""
        print(f"\n[{i}] {question.shown}")
        print(textwrap.indent(text.strip() + cut, "    "))
        if question.expected is not None:
            is_right = parse_answer(text) == question.expected
            right += is_right
            print(f"    right answer: {question.expected} ({'correct' if is_right else 'wrong'})")
    known = sum(question.expected is not None for question in run.questions)
    if known:
        print(f"\n{right} of {known} answered right")


def answer_on_rank(group: AttnTPGroup, device: str, job: Job) -> list[tuple[list[int], str]]:
    """Load this rank's model and answer; (token ids, why it ended) of each prompt."""
    from tqdm import tqdm

    # Its own would be a named semaphore between processes, which a killed rank leaves behind.
    tqdm.set_lock(threading.RLock())
    from transformers.utils import logging

    logging.set_verbosity_error()
    progress = job.progress and group.rank == 0
    if not progress:
        logging.disable_progress_bar()
    from headfit import backends
    from headfit.hosts.transformers import load_model
    from headfit.memory import make_cache
    from headfit.runner import Runner, SamplingParams

    backend = backends.create(job.shape.backend, device=device, kv_format=job.shape.kv_format, dtype=job.shape.dtype)
    model = load_model(job.folder, backend=backend, group=group, dtype=job.shape.dtype, device=device)
    cache = make_cache(DeepSeekV4Config.from_file(job.folder), job.shape, device)
    answers = Runner(model, cache, group=group).generate(job.prompts, SamplingParams(**job.sampling), progress=progress)
    return [(answer.token_ids, answer.finish_reason) for answer in answers]


def find_model(name: str) -> tuple[Path, DeepSeekV4Config]:
    """The folder that `--model` means and its config."""
    if not name.strip():
        raise ValueError("--model: empty; allowed: tiny, or a checkpoint folder on this machine")
    folder = TINY if name == "tiny" else Path(name)
    if not folder.exists():
        raise ValueError(f"{folder}: no such file or folder; allowed: tiny, or a checkpoint folder on this machine")
    return folder, DeepSeekV4Config.from_file(folder)


def resolve(args: argparse.Namespace, config: DeepSeekV4Config) -> tuple[str, str, Any]:
    """Settle every `auto`: the device, why its backend was taken, and a maker of RunShape(max_context, max_seqs).

    Raises:
        ValueError: TP that does not divide, a missing GPU, an unknown backend, a context that the model does not have.
    """
    size = args.attn_tp
    plan_heads(num_heads=config.num_heads, o_groups=config.o_groups, attn_tp_size=size, attn_tp_rank=0, supported=None)
    limit = config.max_position_embeddings
    if args.max_context and args.max_context > limit:
        raise ValueError(f"--max-context {args.max_context}: the model's max_position_embeddings is {limit}")
    import torch

    from headfit import backends
    from headfit.hosts.transformers import experts_shard_over
    from headfit.memory import RunShape, kv_format_of

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_ranks(size, device)
    dtype = {"auto": torch.float32 if device == "cpu" else torch.bfloat16}.get(args.dtype) or getattr(torch, args.dtype)
    kv_format = {"auto": "model" if device == "cpu" else "fp8"}.get(args.kv_format, args.kv_format)
    kv_format_of(kv_format, config, dtype)
    backend, reason = backends.choose(args.backend, device, kv_format=kv_format, dtype=dtype)
    expert_shards = size if experts_shard_over(size)[0] else 1

    def shape(max_context: int, max_seqs: int) -> RunShape:
        return RunShape(size, backend, dtype, kv_format, max_seqs, max_context, expert_shards)

    return device, reason, shape


def model_memory(args: argparse.Namespace) -> dict[str, Any]:
    """What `headfit doctor --model` says: the run that the options describe, and its memory. Raises as `prepare`."""
    folder, config = find_model(args.model)
    device, _, make_shape = resolve(args, config)
    context = args.max_context or min(config.max_position_embeddings, _DOCTOR_CONTEXT)
    shape = make_shape(context, args.max_batch or 1)
    return {
        "model": args.model,
        **summary(shape, device),
        "max_seqs": shape.max_seqs,
        "max_context": shape.max_context,
        "expert_shards": shape.expert_shards,
        **_estimate(folder, config, shape, device),
    }


def summary(shape: RunShape, device: str) -> dict[str, Any]:
    """How a run is set up, JSON-ready."""
    return {
        "attn_tp_size": shape.attn_tp_size,
        "backend": shape.backend,
        "kv_format": shape.kv_format,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": device,
    }


def _estimate(folder: Path, config: DeepSeekV4Config, shape: RunShape, device: str) -> dict[str, Any]:
    from headfit.memory import memory_report, rank_memory

    return memory_report(rank_memory(folder, config, shape), shape.attn_tp_size, device)


def _questions(args: argparse.Namespace) -> list[Question]:
    if args.prompt is None and args.prompts_file is None:
        return _samples()
    prompts = args.prompt
    if prompts is None:
        prompts = _lines(args.prompts_file)
    for i, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            where = f"--prompt {i}" if args.prompt else f"{args.prompts_file} line {i}"
            raise ValueError(f"{where}: empty prompt, allowed: some text")
    return [Question(prompt, prompt) for prompt in prompts]


def _lines(file: str) -> list[str]:
    """The prompts of a file. Only newlines part them: a form feed or U+2028 may stand within one."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error.reason})") from error
    if not text:
        raise ValueError(f"{file}: holds no prompt; allowed: one prompt a line")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _samples() -> list[Question]:
    """Held-out problems behind worked examples, as the tiny checkpoint knows them."""
    from headfit.assets.word_problems import few_shot_prompt, held_out_problems, make_shots

    problems = held_out_problems(NUM_SAMPLES)
    shots = [make_shots(4 if p.context else 5, seed, p.context) for seed, p in enumerate(problems)]
    return [
        Question(few_shot_prompt(problem, worked), f"({_preamble(problem, worked)}) {problem.question}", problem.answer)
        for problem, worked in zip(problems, shots, strict=True)
    ]


def _preamble(problem: WordProblem, shots: Sequence[WordProblem]) -> str:
    return f"after {'a price list and ' if problem.context else ''}{len(shots)} worked examples"


def _load_tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: holds no tokenizer.json")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f"{folder}: its tokenizer does not load ({describe(error)})") from error


def _encode(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    if raw:
        return tokenizer(prompt).input_ids
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template; allowed: --raw, which gives it the prompt as it is")
    message = {"role": "user", "content": prompt}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def _check_prompts(prompts: Sequence[Sequence[int]], args: argparse.Namespace, config: DeepSeekV4Config) -> None:
    limit, limiter = config.max_position_embeddings, "the model's max_position_embeddings"
    if args.max_context:
        limit, limiter = args.max_context, "--max-context"
    for i, prompt in enumerate(prompts, 1):
        if not prompt or max(prompt) >= config.vocab_size:
            raise ValueError(f"prompt {i}: the tokenizer gives no token, or one beyond vocab_size {config.vocab_size}")
        if len(prompt) + args.max_new_tokens > limit:
            raise ValueError(
                f"prompt {i}: {len(prompt)} tokens and --max-new-tokens {args.max_new_tokens} "
                f"do not fit the cache; allowed together: {limit} ({limiter})"
            )


def _stop_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of sequence, and those of `generation_config.json`."""
    stop = {tokenizer.eos_token_id}
    file = folder / "generation_config.json"
    if file.is_file():
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        stop |= set(listed if isinstance(listed, list) else [listed])
    return frozenset(stop - {None})
