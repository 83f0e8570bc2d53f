"""A run in process: a model, split over attention-TP ranks, answers batch after batch, and rank 0 stores each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headfit import generate
from headfit.config import DeepSeekV4Config
from headfit.evals.store import Key, RunStore, append, read_run
from headfit.launch import run_local_ranks

if TYPE_CHECKING:
    from headfit.distributed import AttnTPGroup

Alter = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class LocalArm:
    """A model, how it is run, and one prompt (token ids) a question; every rank is sent it.

    Args:
        job: from `headfit.generate.prepare`. Its sampling seed is the first answer's, the next one's is one more.
        pad_heads_to: run the reference backend as if it were a kernel compiled for these head counts only.
        alter: called with each rank's loaded model, such as a planted fault; picklable.
    """

    job: generate.Job
    device: str
    pad_heads_to: tuple[int, ...] | None = None
    alter: Alter | None = None

    def description(self) -> dict[str, Any]:
        """What a comparison may vary, JSON-ready."""
        padded = None if self.pad_heads_to is None else list(self.pad_heads_to)
        altered = getattr(getattr(self.alter, "func", self.alter), "__name__", None)
        return generate.summary(self.job.shape, self.device) | {"pad_heads_to": padded, "altered": altered}


def answer_all(arm: LocalArm, store: RunStore, golds: list[str]) -> None:
    """Answer every question that the store has no answer to.

    Args:
        golds: the right answers, stored beside the model's.

    Raises:
        RankError: a rank failed. The batches that were done are stored.
    """
    if store.run.missing:
        args = (arm, golds, str(store.file))
        run_local_ranks(answer_on_rank, arm.job.shape.attn_tp_size, args=args, device=arm.device)
        store.reload()


def answer_on_rank(group: AttnTPGroup, device: str, arm: LocalArm, golds: list[str], file: str) -> None:
    """Load this rank's model and work through the batches that are not wholly stored.

    Batches are the same however often a run was interrupted, and each answer of a run draws with its own seed, so an
    interrupted run gives the answers of one that was not.
    """
    progress = arm.job.progress and group.rank == 0
    _quiet(progress)
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from headfit.runner import SamplingParams

    runner = _load(group, device, arm)
    tokenizer = AutoTokenizer.from_pretrained(arm.job.folder, local_files_only=True)
    run = read_run(file)
    keys, size, sampling = run.keys, arm.job.shape.max_seqs, arm.job.sampling
    with tqdm(total=len(keys), initial=len(run.answers), unit="answer", disable=not progress) as bar:
        for first in range(0, len(keys), size):
            batch = keys[first : first + size]
            missing = set(batch) - run.answers.keys()
            if not missing:
                continue
            params = SamplingParams(**sampling | {"seed": sampling["seed"] + first})
            answers = dict(zip(batch, runner.generate([arm.job.prompts[i] for i, _ in batch], params), strict=True))
            if group.rank == 0:
                append(Path(file), [_row(key, answers[key], golds, tokenizer) for key in sorted(missing)])
            bar.update(len(missing))


def _row(key: Key, answer: Any, golds: list[str], tokenizer: Any) -> dict[str, Any]:
    index, repeat = key
    return {
        "kind": "answer",
        "index": index,
        "repeat": repeat,
        "gold": golds[index],
        "text": tokenizer.decode(answer.token_ids, skip_special_tokens=True),
        "reasoning": None,
        "finish_reason": answer.finish_reason,
        "tokens": len(answer.token_ids),
    }


def _load(group: AttnTPGroup, device: str, arm: LocalArm) -> Any:
    """This rank's runner."""
    from headfit import backends
    from headfit.backends.reference import ReferenceBackend
    from headfit.hosts.transformers import load_model
    from headfit.memory import make_cache
    from headfit.runner import Runner

    folder, shape = arm.job.folder, arm.job.shape
    if arm.pad_heads_to is None:
        backend = backends.create(shape.backend, device=device, kv_format=shape.kv_format, dtype=shape.dtype)
    else:
        backend = ReferenceBackend(supported_num_heads=arm.pad_heads_to)
    model = load_model(folder, backend=backend, group=group, dtype=shape.dtype, device=device)
    if arm.alter is not None:
        arm.alter(model)
    return Runner(model, make_cache(DeepSeekV4Config.from_file(folder), shape, device), group=group)


def _quiet(progress: bool) -> None:
    from tqdm import tqdm

    # Its own lock would be a named semaphore between processes, which a killed rank leaves behind.
    tqdm.set_lock(threading.RLock())
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()
