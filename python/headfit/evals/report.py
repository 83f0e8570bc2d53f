"""Runs and comparisons for people: text tables, a Markdown report, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headfit.evals.compare import Comparison, Difference, p_text, points
from headfit.evals.extract import EXTRACTORS
from headfit.evals.score import Score

_COLUMNS = ("arm", "right", "accuracy", "95% interval", "by last number", "no answer", "length stops", "request errors")


def settings_text(settings: dict[str, Any], arm: dict[str, Any]) -> str:
    """A run's settings, one a line."""
    rows = [*settings.items(), *arm.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_plain(value)}" for name, value in rows)


def score_text(name: str, score: Score) -> str:
    """One run's line under its headings."""
    return _aligned([_COLUMNS, _score_row(name, score)])


def comparison_text(comparison: Comparison) -> str:
    """Both arms, the differences, warnings and the verdict."""
    parts = [_aligned([_COLUMNS, *_score_rows(comparison)]), _aligned(_difference_rows(comparison))]
    parts += [f"warning: {warning}" for warning in comparison.warnings]
    return "\n\n".join([*parts, f"Verdict: {comparison.words}"])


def markdown(comparison: Comparison) -> str:
    """A report that stands alone: verdict, tables, settings, and how the numbers were made."""
    settings = [(name, _plain(value)) for name, value in comparison.settings.items()]
    names = sorted({name for arm in comparison.arms for name in arm})
    arms = [(name, *(_plain(arm.get(name)) for arm in comparison.arms)) for name in names]
    if comparison.settings["repeats"] == 1:
        method = (
            "Accuracy: Wilson's interval. Difference: Tango's score interval over the same questions. p: exact "
            "McNemar, two-sided; it decides, and the interval may fall on the other side of 5%. Detectable drop: 80% "
            "power of that test at 5%, the drop coming on top of the discordance seen, out of what A has right."
        )
    else:
        method = (
            "Repeats of a problem are not independent, so that all is over problems. p: exact sign-flip permutation "
            "test of the problems' differences, two-sided; it decides. Intervals: bootstrap (percentile, 10,000 "
            "resamples), too narrow where few problems differ; they decide nothing. Detectable drop: about 80% "
            "power at 5%, for normal differences of the spread seen, out of what A has right."
        )
    parts = [
        f"# {comparison.settings['task']}: {comparison.names[0]} (A) and {comparison.names[1]} (B)",
        f"**{comparison.words}**",
        *(f"Warning: {warning}." for warning in comparison.warnings),
        _table([_COLUMNS, *_score_rows(comparison)]),
        _table(_difference_rows(comparison)),
        f"{method} The verdict follows the extractor `{EXTRACTORS[0]}`. Failed requests were sent again and are not "
        "scored.",
        "## Arms",
        _table([("", "A", "B"), *arms]),
        "## Settings of both",
        _table([("setting", "value"), *settings]),
    ]
    return "\n\n".join(parts) + "\n"


def plot(comparison: Comparison, file: str | Path) -> None:
    """Draw both accuracies and the difference, with intervals.

    Raises:
        ValueError: matplotlib is not installed, or does not write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'headfit[eval]'") from error
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    scores = [(score.accuracy(EXTRACTORS[0]), score.interval(EXTRACTORS[0])) for score in comparison.scores]
    _draw(left, [f"{letter}: {name}" for letter, name in zip("AB", comparison.names, strict=True)], scores)
    left.set_xlabel("accuracy (%), 95% interval")
    found = comparison.differences
    _draw(right, list(found), [(each.point, each.interval) for each in found.values()])
    right.axvline(0, color="0.6", linewidth=1)
    right.set_xlabel("B - A (points), 95% interval")
    figure.suptitle(f"{comparison.settings['task']}, {comparison.settings['num_questions']} questions")
    figure.savefig(file, dpi=150)


def _draw(axes: Any, labels: Sequence[str], values: Sequence[tuple[float, tuple[float, float] | None]]) -> None:
    for row, (point, interval) in enumerate(values):
        low, high = interval or (point, point)
        axes.plot([100 * low, 100 * high], [row, row], color="C0", linewidth=2)
        axes.plot([100 * point], [row], "o", color="C0")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _score_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        _score_row(f"{letter}: {name}", score)
        for letter, name, score in zip("AB", comparison.names, comparison.scores, strict=True)
    ]


def _score_row(name: str, score: Score) -> tuple[str, ...]:
    main, other = EXTRACTORS
    rates = score.rates(main)
    return (
        name,
        f"{sum(score.right[main])} of {score.num_answers}",
        f"{score.accuracy(main):.2%}",
        _interval(score.interval(main), "{:.2%}"),
        f"{score.accuracy(other):.2%}",
        f"{rates['no_answer']:.1%}",
        f"{rates['length_stop']:.1%}",
        f"{rates['request_error']:.1%}",
    )


def _difference_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    test = "McNemar p" if comparison.settings["repeats"] == 1 else "sign-flip p"
    head = ("extractor", "B - A", "95% interval", "losses", "gains", test, "detectable drop")
    return [head, *(_difference_row(name, found) for name, found in comparison.differences.items())]


def _difference_row(name: str, found: Difference) -> tuple[str, ...]:
    interval = None if found.interval is None else tuple(100 * end for end in found.interval)
    return (
        name,
        points(found.point),
        _interval(interval, "{:+.2f}"),
        "-" if found.losses is None else str(found.losses),
        "-" if found.gains is None else str(found.gains),
        p_text(found.deciding_p),
        "-" if found.detectable_drop is None else points(found.detectable_drop, sign=False),
    )


def _interval(interval: Sequence[float] | None, form: str) -> str:
    return "-" if interval is None else " to ".join(form.format(end) for end in interval)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|").replace("\n", "\\n") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
