"""Two runs of the same questions: what differs, with an interval, and what the run could not have seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headfit.evals import statistics
from headfit.evals.extract import EXTRACTORS
from headfit.evals.score import RATES, Score, score_run
from headfit.evals.statistics import ALPHA, FEWEST_DIFFERING
from headfit.evals.store import RunRecord, differences

MOST_RATE_DIFFERENCE = 0.02
VERDICTS = ("drop", "gain", "no drop shown", "rates differ")


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A by one extractor. Shares of 1, not points.

    Args:
        losses, gains: questions that only A, only B answers right; None with repeats.
        p: exact McNemar p; None with repeats.
        interval: 95%: Tango's; with repeats by bootstrap over problems, None where all differ by the same.
        detectable_drop: smallest drop that this run shows with 80% power; None where A has none so large to lose, or
            where too few problems differ to tell.
        permutation_p: with repeats, exact sign-flip p over problems; else None.
        differing: with repeats, problems whose number of right answers differs; else None.
    """

    point: float
    interval: tuple[float, float] | None
    detectable_drop: float | None
    losses: int | None = None
    gains: int | None = None
    p: float | None = None
    permutation_p: float | None = None
    differing: int | None = None

    @property
    def deciding_p(self) -> float:
        """The test's, which alone decides: the interval is another approximation and may differ from it at 5%."""
        return self.permutation_p if self.p is None else self.p

    @property
    def significant(self) -> bool:
        """At 5%, two-sided."""
        return self.deciding_p < ALPHA


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
    verdict, words = _verdict(found[EXTRACTORS[0]], scores[0], warnings)
    return Comparison(names, a.settings, (a.arm, b.arm), scores, found, warnings, verdict, words)


def difference(a: Score, b: Score, extractor: str) -> Difference:
    """B minus A, question by question."""
    pairs = list(zip(a.right[extractor], b.right[extractor], strict=True))
    if a.repeats > 1:
        return _difference_over_problems(pairs, a.repeats, a.accuracy(extractor))
    total = len(pairs)
    losses, gains = sum(first > second for first, second in pairs), sum(first < second for first, second in pairs)
    return Difference(
        point=(gains - losses) / total,
        interval=statistics.paired_difference_interval(losses, gains, total),
        detectable_drop=statistics.detectable_drop(
            noise=(losses + gains) / total, total=total, right=a.accuracy(extractor)
        ),
        losses=losses,
        gains=gains,
        p=statistics.mcnemar_p(losses, gains),
    )


def _difference_over_problems(pairs: list[tuple[int, int]], repeats: int, right: float) -> Difference:
    """Repeats of a problem are not independent: the test and the interval take a problem's difference as one value."""
    changes = [second - first for first, second in pairs]
    differing, losable = sum(change != 0 for change in changes), sum(first > 0 for first, _ in pairs)
    boot = statistics.bootstrap_mean([change / repeats for change in changes])
    detectable = None
    if boot.standard_error is not None and min(differing, losable) >= FEWEST_DIFFERING:
        # Resampling gives the variance with n below, not n - 1.
        error = boot.standard_error * math.sqrt(len(pairs) / (len(pairs) - 1))
        detectable = statistics.normal_detectable_drop(error, freedom=differing - 1, right=right)
    return Difference(
        point=boot.mean,
        interval=boot.interval,
        detectable_drop=detectable,
        permutation_p=statistics.sign_flip_p(changes),
        differing=differing,
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


def _verdict(found: Difference, a: Score, warnings: tuple[str, ...]) -> tuple[str, str]:
    shown = _evidence(found, a)
    if found.significant:
        kind, direction = ("drop", "worse") if found.point < 0 else ("gain", "better")
        return kind, f"B is {direction} than A ({shown}).{_disagreement(found)}"
    shown = f"No drop is shown ({shown}).{_disagreement(found)}"
    if warnings:
        return "rates differ", f"Not called equal: {'; '.join(warnings)}. {shown}"
    return "no drop shown", f"{shown} {_limits(found, a)}"


def _evidence(found: Difference, a: Score) -> str:
    evidence = [f"B - A {points(found.point)}"]
    if found.interval:
        low, high = map(points, found.interval)
        evidence.append(f"{_interval_name(found)} {low} to {high}")
    elif found.differing:
        evidence.append("no interval, as all problems differ by the same")
    if found.p is not None:
        evidence.append(f"exact McNemar p = {p_text(found.p)} from {found.losses} losses and {found.gains} gains")
    else:
        evidence.append(f"exact sign-flip p = {p_text(found.permutation_p)} over problems, {_differing(found, a)}")
    return "; ".join(evidence)


def _interval_name(found: Difference) -> str:
    return "95% interval" if found.differing is None else "95% bootstrap interval"


def _differing(found: Difference, a: Score) -> str:
    return f"{found.differing} of {a.num_questions} {'differs' if found.differing == 1 else 'differ'}"


def _disagreement(found: Difference) -> str:
    """What to make of a test and an interval that fall on opposite sides of 5%."""
    if found.interval is None or found.significant == (excludes := not found.interval[0] <= 0 <= found.interval[1]):
        return ""
    test = "exact McNemar test" if found.differing is None else "exact sign-flip permutation test over problems"
    kind = "drop" if found.point < 0 else "gain"
    return (
        f" The {_interval_name(found)} {'excludes' if excludes else 'includes'} zero, but the {test} "
        f"{'does not call' if excludes else 'calls'} this a {kind} at 5%, and the test decides."
    )


def _limits(found: Difference, a: Score) -> str:
    """What a run that shows nothing leaves possible."""
    if found.differing == 0:
        excluded = "No problem differs, so that the spread over problems bounds nothing: this excludes no drop."
    elif _too_few_differ(found):
        excluded = (
            f"Only {_differing(found, a)}: too few for the test to call a drop, for the interval to exclude one, or to "
            "say which drop would have been detected."
        )
    else:
        most = points(max(0.0, -found.interval[0]), sign=False)
        excluded = f"A drop larger than {most} is excluded ({_interval_name(found)})."
    return " ".join([excluded, *_detectable(found, a)])


def _too_few_differ(found: Difference) -> bool:
    return found.differing is not None and found.differing < FEWEST_DIFFERING


def _detectable(found: Difference, a: Score) -> list[str]:
    per_problem = a.right[EXTRACTORS[0]]
    if not any(per_problem):
        return ["A has no right answer to lose: no drop could have been detected."]
    if found.detectable_drop is not None:
        least = points(found.detectable_drop, sign=False)
        drop, power = f"A drop of {least}", "80% power"
        if found.differing is not None:
            drop, power = f"A drop of about {least}, spread over the problems,", "about 80% power"
        said = [f"{drop} would have been detected with {power}; a smaller one may have gone unseen."]
        if -found.point >= found.detectable_drop:
            said.append("The drop seen is as large and still not called one: that happens in one such run of five.")
        return said
    if _too_few_differ(found):
        return []
    where = "" if found.differing is None else f" in {sum(map(bool, per_problem))} of {a.num_questions} problems"
    return [
        "No drop could have been detected with 80% power: what A has to lose, right answers "
        f"{sum(per_problem)} of {a.num_answers}{where}, is too little for that."
    ]


def p_text(p: float) -> str:
    """Two digits, more where two would not say on which side of 5% it lies."""
    return next(text for digits in range(2, 18) if ((float(text := f"{p:.{digits}g}") < ALPHA) == (p < ALPHA)))


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
        "permutation_p": found.permutation_p,
        "differing_problems": found.differing,
        "detectable_drop": found.detectable_drop,
        "significant": found.significant,
    }
