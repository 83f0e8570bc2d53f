"""A run's score, from its stored texts alone: accuracy by both extractors, and rates that say what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headfit.evals.extract import EXTRACTORS, extract, gold_number
from headfit.evals.statistics import bootstrap_mean, wilson_interval
from headfit.evals.store import RunRecord

RATES = ("no_answer", "length_stop", "request_error")


@dataclass(frozen=True, slots=True)
class Score:
    """What a complete run scored.

    Args:
        right: by extractor, for each question how many of its repeats are right.
        no_answer: by extractor, answers that give no number.
        length_stops: answers that the token cap cut off.
        failed_requests: requests that ended in an error and were sent again; no answer is scored by them.
    """

    num_questions: int
    repeats: int
    right: dict[str, tuple[int, ...]]
    no_answer: dict[str, int]
    length_stops: int
    failed_requests: int

    @property
    def num_answers(self) -> int:
        """Answers scored."""
        return self.num_questions * self.repeats

    def accuracy(self, extractor: str) -> float:
        """Share of the answers that are right."""
        return sum(self.right[extractor]) / self.num_answers

    def interval(self, extractor: str) -> tuple[float, float] | None:
        """95% interval of the accuracy: Wilson's; with repeats, by bootstrap over problems (None where all problems
        have the same share right, so that nothing can be resampled)."""
        if self.repeats == 1:
            return wilson_interval(sum(self.right[extractor]), self.num_answers)
        return bootstrap_mean([count / self.repeats for count in self.right[extractor]]).interval

    def rates(self, extractor: str) -> dict[str, float]:
        """`RATES`: shares of answers, and of requests for the last."""
        return {
            "no_answer": self.no_answer[extractor] / self.num_answers,
            "length_stop": self.length_stops / self.num_answers,
            "request_error": self.failed_requests / (self.num_answers + self.failed_requests),
        }

    def summary(self) -> dict[str, Any]:
        """JSON-ready."""
        by_extractor = {}
        for name in EXTRACTORS:
            by_extractor[name] = {
                "right": sum(self.right[name]),
                "accuracy": self.accuracy(name),
                "interval": self.interval(name),
                "no_answer": self.no_answer[name],
            }
        return {
            "num_questions": self.num_questions,
            "repeats": self.repeats,
            "answers": self.num_answers,
            "extractors": by_extractor,
            "length_stops": self.length_stops,
            "failed_requests": self.failed_requests,
        }


def score_run(run: RunRecord, name: str) -> Score:
    """Score a run.

    Args:
        name: what the run is called in an error.

    Raises:
        ValueError: answers are missing: a run that is not complete has no score.
    """
    if missing := len(run.missing):
        raise ValueError(
            f"{name}: {missing} of {len(run.keys)} answers are missing, allowed: a complete run "
            "(the command that started it goes on with it)"
        )
    count, repeats = run.settings["num_questions"], run.settings["repeats"]
    right = {extractor: [0] * count for extractor in EXTRACTORS}
    no_answer = dict.fromkeys(EXTRACTORS, 0)
    for (index, _), answer in run.answers.items():
        gold = gold_number(answer["gold"])
        for extractor in EXTRACTORS:
            number = extract(answer["text"], extractor, stop=run.settings["stop"])
            right[extractor][index] += number == gold
            no_answer[extractor] += number is None
    return Score(
        num_questions=count,
        repeats=repeats,
        right={extractor: tuple(counts) for extractor, counts in right.items()},
        no_answer=no_answer,
        length_stops=sum(answer["finish_reason"] == "length" for answer in run.answers.values()),
        failed_requests=len(run.errors),
    )
