"""What a run showed and what it could have detected: intervals, paired tests, power.

Paired counts are those of one question set answered by two arms: `losses` are questions that only the first arm
answers right, `gains` those that only the second does. A difference is second minus first, so a drop is negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
POWER = 0.8
ALPHA = 0.05
RESAMPLES = 10_000
FEWEST_DIFFERING = 6  # fewer differences, all of one sign, have p >= 2 / 2**5 > ALPHA


def wilson_interval(successes: int, trials: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927), without continuity correction.

    Raises:
        ValueError: no trials, or successes outside 0..trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"successes, trials: {successes}, {trials}, allowed: 0 <= successes <= trials, trials >= 1")
    z2 = _z(level) ** 2
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


def mcnemar_p(losses: int, gains: int) -> float:
    """Exact two-sided McNemar p: the binomial test of `losses` among `losses + gains` at one half; 1 where both are 0.

    Raises:
        ValueError: a negative count.
    """
    if losses < 0 or gains < 0:
        raise ValueError(f"losses, gains: {losses}, {gains}, allowed: 0 or more")
    discordant = losses + gains
    tail = _upper_tail(discordant, 0.5, max(losses, gains))
    return min(1.0, 2 * tail)


def sign_flip_p(differences: Sequence[int]) -> float:
    """Exact two-sided permutation p of a sum of whole differences, one a problem, whose signs are chance in like arms.

    The share of all choices of signs (Fisher 1935, The Design of Experiments, section 21) whose sum lies at least as
    far from 0; 1 where all differences are 0. As they are whole, the sums' distribution is built problem by
    problem (Pagano and Tritchler 1983, JASA 78:435-440) instead of sampled. With ones alone this is `mcnemar_p`.
    """
    sizes = [abs(each) for each in differences if each]
    total, positive = sum(sizes), sum(each for each in differences if each > 0)
    shares = np.zeros(total + 1)  # of the choices of signs whose positive differences sum to 0..total
    shares[0] = 1.0
    for size in sizes:
        shares = (shares + np.roll(shares, size)) / 2
    return min(1.0, 2 * float(shares[max(positive, total - positive) :].sum()))


def paired_difference_interval(losses: int, gains: int, total: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Score interval of (gains - losses) / total (Tango 1998, Statistics in Medicine 17:891-908).

    It keeps a width where no question is discordant, unlike Wald's.

    Raises:
        ValueError: no questions, or more discordant ones than questions.
    """
    if total < 1 or min(losses, gains) < 0 or losses + gains > total:
        raise ValueError(f"losses, gains, total: {losses}, {gains}, {total}, allowed: losses + gains <= total >= 1")
    z, point = _z(level), (gains - losses) / total
    low = _bisect(lambda delta: _tango(gains, losses, total, delta) <= z, -1.0, point)
    high = _bisect(lambda delta: _tango(gains, losses, total, delta) < -z, point, 1.0)
    return low, high


def _tango(gains: int, losses: int, total: int, delta: float) -> float:
    """Tango's score statistic of the hypothesis that the difference is `delta`; it falls as `delta` rises."""
    # The share of losses that is likeliest under the hypothesis solves a q^2 + b q + c = 0.
    a = 2.0 * total
    b = -gains - losses + (2 * total - gains + losses) * delta
    c = -losses * delta * (1 - delta)
    share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = total * (2 * share + delta * (1 - delta))
    distance = gains - losses - total * delta
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def mcnemar_power(*, drop: float, noise: float, total: int, alpha: float = ALPHA) -> float:
    """Probability that the exact test at `alpha` shows a drop of `drop`.

    Each question is a gain with probability noise / 2 and a loss with probability noise / 2 + drop: the drop comes on
    top of questions that differ by chance. Exact: a sum over the number of discordant questions.

    Raises:
        ValueError: shares outside 0 <= noise, drop and noise + drop <= 1, or no questions.
    """
    if total < 1 or drop < 0 or noise < 0 or drop + noise > 1 + 1e-12:
        raise ValueError(f"drop, noise, total: {drop}, {noise}, {total}, allowed: shares that sum to at most 1")
    discordant = min(1.0, drop + noise)
    if discordant == 0:
        return 0.0
    loss = (noise / 2 + drop) / discordant
    weights = _binomial(total, discordant)
    # Below the first count where all losses would be significant, no outcome is.
    counts = [n for n in np.nonzero(weights > 1e-16)[0].tolist() if 2.0 ** (1 - n) < alpha]
    return float(sum(weights[n] * _upper_tail(n, loss, _critical(n, alpha)) for n in counts))


def detectable_drop(
    *, noise: float, total: int, right: float = 1.0, power: float = POWER, alpha: float = ALPHA
) -> float | None:
    """The smallest drop that the exact test shows with `power`, None where no drop possible is large enough.

    Args:
        right: share that the first arm has right. A drop is at most this, and leaves the second arm right on `right` -
            drop, which bounds the gains by chance: next to a large drop there is less than `noise`.
    """

    def shows(drop: float) -> bool:
        room = min(noise, 2 * (right - drop), 1 - drop)
        return mcnemar_power(drop=drop, noise=room, total=total, alpha=alpha) >= power

    return _bisect(shows, 0.0, right, steps=40) if shows(right) else None


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A mean over problems with its percentile interval and standard error; both None where problems do not vary."""

    mean: float
    interval: tuple[float, float] | None
    standard_error: float | None


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, level: float = LEVEL) -> Bootstrap:
    """Resample problems, not answers: repeats of one problem are not independent questions.

    Args:
        values: one number a problem, such as its share of right repeats, or the difference of two arms' shares.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("values: none, allowed: one number a problem, at least one")
    data = np.asarray(values, dtype=np.float64)
    if np.ptp(data) == 0:
        return Bootstrap(float(data[0]), None, None)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    means = data[picks].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Bootstrap(float(data.mean()), (float(low), float(high)), float(means.std(ddof=1)))


def normal_detectable_drop(
    standard_error: float,
    *,
    freedom: float = math.inf,
    right: float = 1.0,
    power: float = POWER,
    alpha: float = ALPHA,
) -> float | None:
    """The smallest mean drop of normal differences that a two-sided test at `alpha` shows with `power`.

    None where that is more than `right`, the share that the first arm has to lose.

    Args:
        freedom: degrees of freedom of the standard error; infinite where it is known.
    """
    drop = (_student(1 - alpha / 2, freedom) + _student(power, freedom)) * standard_error
    return drop if drop <= right else None


def _student(share: float, freedom: float) -> float:
    """Quantile of Student's t, two terms past the normal one (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _z(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level: {level}, allowed: above 0, below 1")
    return NormalDist().inv_cdf((1 + level) / 2)


def _binomial(trials: int, share: float) -> np.ndarray:
    """Probabilities of 0..trials successes, float64 [trials + 1]."""
    counts = np.arange(trials + 1)
    if share in (0.0, 1.0):
        return (counts == trials * share).astype(np.float64)
    logs = _log_factorials(trials)
    log_choose = logs[-1] - logs - logs[::-1]
    return np.exp(log_choose + counts * math.log(share) + (trials - counts) * math.log1p(-share))


@cache
def _log_factorials(largest: int) -> np.ndarray:
    return np.array([math.lgamma(n + 1) for n in range(largest + 1)])


def _upper_tail(trials: int, share: float, least: int) -> float:
    """P(successes >= least)."""
    return float(_binomial(trials, share)[least:].sum())


@cache
def _critical(discordant: int, alpha: float) -> int:
    """Fewest losses among `discordant` that the two-sided exact test calls significant."""
    tails = np.cumsum(_binomial(discordant, 0.5)[::-1])[::-1]  # P(losses >= n)
    return int(np.nonzero(2 * tails < alpha)[0][0])


def _bisect(holds: Callable[[float], bool], low: float, high: float, *, steps: int = 60) -> float:
    """Where `holds` turns from false to true between `low` and `high`."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
