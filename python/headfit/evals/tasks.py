"""GSM8K and AIME25: defaults as the field uses them, and what the model is given.

GSM8K's form is lm-evaluation-harness's: `Question: ...`, newline, `Answer:`, behind worked shots in the same form with
their calculator marks. As chat it is one user message. The shots are the first of the train split. AIME25 is asked
without shots and with an instruction that names the box.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from headfit.evals.datasets import Question

AIME_SMALL_CAP = 32_768
_BOX = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class Task:
    """One benchmark's defaults."""

    name: str
    num_shots: int
    repeats: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]  # in completion form only: a chat answer ends with its turn


TASKS = {
    "gsm8k": Task("gsm8k", 5, 1, 0.0, 1.0, 2048, ("Question:",)),
    "aime25": Task("aime25", 0, 16, 1.0, 1.0, 65_536, ()),
}


def prompt(task: str, question: Question, shots: Sequence[Question]) -> str:
    """What the model is given: the text of a completion, or of the one user message of a chat."""
    if task == "aime25":
        worked = "".join(f"{shot.text}\n\n{shot.answer}\n\n" for shot in shots)
        return f"{worked}{question.text}\n\n{_BOX}"
    worked = "".join(f"Question: {shot.text}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{worked}Question: {question.text}\nAnswer:"


def prompts_sha256(prompts: Sequence[str]) -> str:
    """Identifies everything that the model is given, in order."""
    return hashlib.sha256(json.dumps(list(prompts), ensure_ascii=True).encode()).hexdigest()
