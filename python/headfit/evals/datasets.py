"""The questions of a data set, from a JSONL file or by name from the Hugging Face hub, and what identifies them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from headfit.evals.extract import gold_number
from headfit.evals.store import check_readable

# name -> (hub's data set, configuration, scored split, split that shots come from)
_HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test", "train"),
    "aime25": ("math-ai/aime25", None, "test", None),
}
_TEXT_FIELDS = ("question", "problem")
_TAIL = re.compile(r"(?<=\d)\s*(?:%\.?|\.)\s*\Z")  # `5.` and `5%` state 5


@dataclass(frozen=True, slots=True)
class Question:
    """One problem. `answer` is what the data set states: a number, or a worked solution that ends in `#### n`."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions in the data set's order. `sha256` is of the file's bytes, of the questions where there is no file."""

    source: str
    sha256: str
    questions: tuple[Question, ...]

    def first(self, count: int) -> QuestionSet:
        """The first `count` questions of the same source.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= count <= len(self.questions):
            raise ValueError(f"{self.source}: {count} questions asked for, allowed: 0 to {len(self.questions)}")
        return QuestionSet(self.source, self.sha256, self.questions[:count])


def questions_sha256(questions: Iterable[Question]) -> str:
    """Identifies questions, their right answers and their order, whatever file they came from."""
    rows = [[question.text, str(gold_number(question.answer))] for question in questions]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()


def read_jsonl(file: str | Path) -> QuestionSet:
    """Read one object a line with `question` (or `problem`) and `answer`.

    Raises:
        ValueError: the line that is not such an object, or states no number; a file without lines, or a device.
        OSError: the file cannot be read.
    """
    path = Path(file)
    check_readable(path)
    content = path.read_bytes()
    questions = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            questions.append(_question(line, f"{file} line {number}"))
    if not questions:
        raise ValueError(f"{file}: holds no question, allowed: one JSON object a line")
    return QuestionSet(path.name, hashlib.sha256(content).hexdigest(), tuple(questions))


def _question(line: bytes, where: str) -> Question:
    try:
        row = json.loads(line, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    return _from_row(row, where)


def _from_row(row: Any, where: str) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object, allowed: an object with question (or problem) and answer")
    text = next((row[name] for name in _TEXT_FIELDS if isinstance(row.get(name), str)), None)
    answer = row.get("answer")
    if isinstance(answer, (int, float, Decimal)) and not isinstance(answer, bool):
        number = Decimal(str(answer))
        answer = f"{number:f}" if abs(number.adjusted()) < 100 else str(number)  # 1e999999999 has as many digits
    if not (text and isinstance(answer, str)):
        raise ValueError(
            f"{where}: has {sorted(map(str, row))}, allowed: texts question (or problem) and answer, which may be a "
            "number"
        )
    if lone := re.search("[\ud800-\udfff]", text + answer):
        raise ValueError(f"{where}: holds {lone.group()!a}, half of a surrogate pair, allowed: Unicode text")
    answer = _TAIL.sub("", answer)
    try:
        gold_number(answer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Question(text, answer)


def from_hub(name: str, *, shots: bool = False) -> QuestionSet:
    """The public data set `name`, or the split that its shots come from. Needs a connection and the `eval` extra.

    Raises:
        ValueError: `datasets` is not installed, or the data set cannot be had; what to do instead.
    """
    dataset, configuration, test, train = _HUB[name]
    split = train if shots else test
    if split is None:
        raise ValueError(f"{dataset} has no split for shots; allowed: --shots FILE, or --num-shots 0")
    option = "--shots FILE" if shots else "--data FILE"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{dataset}: needs pip install 'headfit[eval]' and a connection; or give {option}") from error
    try:
        rows = load_dataset(dataset, configuration, split=split)
    except Exception as error:
        raise ValueError(
            f"{dataset}: cannot be had ({' '.join(str(error).split())[:200]}); or give {option}"
        ) from error
    source = f"{dataset}:{split}"
    questions = tuple(_from_row(row, f"{source} row {i}") for i, row in enumerate(rows))
    return QuestionSet(source, questions_sha256(questions), questions)


def check_shots(shots: Sequence[Question], scored: Sequence[Question]) -> None:
    """Raise ValueError where a shot is one of the scored questions."""
    texts = {" ".join(question.text.split()) for question in scored}
    for i, shot in enumerate(shots):
        if " ".join(shot.text.split()) in texts:
            raise ValueError(f"shot {i + 1}: is one of the scored questions, allowed: questions from the train split")
