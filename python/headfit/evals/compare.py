"""Two runs of the same questions: what differs, with an interval, and what the run could not have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headfit.evals import statistics
from headfit.evals.extract import EXTRACTORS
from headfit.evals.score import RATES, Score, score_run
from headfit.evals.statistics import ALPHA
from headfit.evals.store import RunRecord, differences

MOST_RATE_DIFFERENCE = 0.02
VERDICTS = ("drop", "gain", "no drop shown", "rates differ")


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A by one extractor. Shares of 1, not points.

    Args:
        losses, gains: questions that only A, only B answers right; None with repeats.
        p: exact McNemar p; None with repeats, where the interval by bootstrap over problems decides.
        interval: 95%; None where no problem differs over repeats.
        detectable_drop: smallest drop that this run shows with 80% power; None where none is large enough, or unknown.
    """

    point: float
    interval: tuple[float, float] | None
    detectable_drop: float | None
    losses: int | None = None
    gains: int | None = None
    p: float | None = None

    @property
    def significant(self) -> bool:
        """At 5%, two-sided."""
        if self.p is not None:
            return self.p < ALPHA
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms `names`, A first, their scores, the difference by each extractor, and what is to be said of it."""

    names: tuple[str, str]
    settings: dict[str, Any]
    arms: tuple[dict[str, Any], dict[str, Any]]
    scores: tuple[Score, Score]
    differences: dict[str, Difference]
    warnings: tuple[str, ...]
    verdict: str  # one of VERDICTS, by the extractor `marked`
    words: str

    def summary(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "names": list(self.names),
            "settings": self.settings,
            "arms": list(self.arms),
            "scores": [score.summary() for score in self.scores],
            "differences": {name: _plain(difference) for name, difference in self.differences.items()},
            "warnings": list(self.warnings),
            "verdict": self.verdict,
            "words": self.words,
        }


def compare_runs(a: RunRecord, b: RunRecord, names: tuple[str, str]) -> Comparison:
    """Compare complete runs.

    Raises:
        ValueError: a run is not complete, or the settings differ: which, and both values.
    """
    if differing := differences(a.settings, b.settings):
        named = ", ".join(f"{name} {old!r} and {new!r}" for name, (old, new) in differing.items())
        raise ValueError(f"{names[0]} and {names[1]} differ in their settings: {named}; allowed: runs with the same")
    scores = score_run(a, names[0]), score_run(b, names[1])
    found = {name: difference(*scores, name) for name in EXTRACTORS}
    warnings = _warnings(scores)
    verdict, words = _verdict(found[EXTRACTORS[0]], warnings)
    return Comparison(names, a.settings, (a.arm, b.arm), scores, found, warnings, verdict, words)


def difference(a: Score, b: Score, extractor: str) -> Difference:
    """B minus A, question by question."""
    pairs = list(zip(a.right[extractor], b.right[extractor], strict=True))
    if a.repeats > 1:
        boot = statistics.bootstrap_mean([(second - first) / a.repeats for first, second in pairs])
        error = boot.standard_error
        return Difference(boot.mean, boot.interval, None if error is None else statistics.normal_detectable_drop(error))
    total = len(pairs)
    losses, gains = sum(first > second for first, second in pairs), sum(first < second for first, second in pairs)
    return Difference(
        point=(gains - losses) / total,
        interval=statistics.paired_difference_interval(losses, gains, total),
        detectable_drop=statistics.detectable_drop(noise=(losses + gains) / total, total=total),
        losses=losses,
        gains=gains,
        p=statistics.mcnemar_p(losses, gains),
    )


def _warnings(scores: tuple[Score, Score]) -> tuple[str, ...]:
    """Rates that differ so much that equal accuracies would not mean equal arms."""
    found = []
    first, second = (score.rates(EXTRACTORS[0]) for score in scores)
    for name in RATES:
        if abs(first[name] - second[name]) > MOST_RATE_DIFFERENCE + 1e-12:
            shown = name.replace("_", "-")
            found.append(f"{shown} rates differ by over 2 points: {first[name]:.1%} and {second[name]:.1%}")
    return tuple(found)


def _verdict(found: Difference, warnings: tuple[str, ...]) -> tuple[str, str]:
    evidence = [f"B - A {points(found.point)}"]
    if found.interval:
        evidence.append(f"95% interval {points(found.interval[0])} to {points(found.interval[1])}")
    if found.p is not None:
        evidence.append(f"exact McNemar p = {found.p:.2g} from {found.losses} losses and {found.gains} gains")
    shown = "; ".join(evidence)
    if found.significant:
        kind, direction = ("drop", "worse") if found.point < 0 else ("gain", "better")
        return kind, f"B is {direction} than A ({shown})."
    if warnings:
        return "rates differ", f"Not called equal: {'; '.join(warnings)}. No drop is shown ({shown})."
    return "no drop shown", f"No drop is shown ({shown}). {_limits(found)}"


def _limits(found: Difference) -> str:
    """What a run that shows nothing leaves possible."""
    if found.interval is None:
        return "No problem differs, so that the spread over problems bounds nothing: this excludes no drop."
    excluded = f"A drop larger than {points(max(0.0, -found.interval[0]), sign=False)} is excluded (95% interval)."
    if found.detectable_drop is None:
        return f"{excluded} The run is too small to detect any drop with 80% power."
    least = points(found.detectable_drop, sign=False)
    return f"{excluded} A drop of {least} would have been detected with 80% power; a smaller one may have gone unseen."


def points(share: float, *, sign: bool = True) -> str:
    """A difference of shares in percentage points."""
    return f"{share * 100:{'+' if sign else ''}.2f} points"


def _plain(found: Difference) -> dict[str, Any]:
    return {
        "difference": found.point,
        "interval": found.interval,
        "losses": found.losses,
        "gains": found.gains,
        "mcnemar_p": found.p,
        "detectable_drop": found.detectable_drop,
        "significant": found.significant,
    }
