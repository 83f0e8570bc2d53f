"""Intervals, tests and power against scipy, or against their definitions computed another way."""

import math
import random

import numpy as np
import pytest
from scipy import optimize
from scipy.stats import binom, binomtest, norm

from headfit.evals.statistics import (
    bootstrap_mean,
    detectable_drop,
    mcnemar_p,
    mcnemar_power,
    normal_detectable_drop,
    paired_difference_interval,
    wilson_interval,
)

EXACT = 1e-9


def tables(count, largest=1500):
    """Random (losses, gains, total), with few discordant questions as often as many."""
    rng = random.Random(6)
    for _ in range(count):
        total = rng.randint(1, largest)
        discordant = int(total * rng.random() ** rng.choice((1, 4)))
        losses = rng.randint(0, discordant)
        yield losses, discordant - losses, total


def test_wilson_agrees_with_scipy():
    for losses, _, total in [*tables(300), (0, 0, 1), (1, 0, 1), (0, 0, 1319), (1319, 0, 1319)]:
        for level in (0.8, 0.95, 0.999):
            theirs = binomtest(losses, total).proportion_ci(level, method="wilson")
            ours = wilson_interval(losses, total, level=level)
            assert max(abs(ours[0] - theirs.low), abs(ours[1] - theirs.high)) < EXACT


def test_mcnemar_agrees_with_scipy():
    for losses, gains, _ in tables(500):
        theirs = binomtest(losses, losses + gains).pvalue if losses + gains else 1.0
        assert abs(mcnemar_p(losses, gains) - theirs) < EXACT


def test_mcnemar_of_known_tables():
    assert mcnemar_p(0, 0) == 1 and mcnemar_p(3, 3) == 1
    assert mcnemar_p(6, 0) == mcnemar_p(0, 6) == pytest.approx(2 / 64, abs=EXACT)
    assert mcnemar_p(50, 0) == pytest.approx(2.0**-49, rel=1e-9)


def likeliest_loss(losses, gains, ties, delta):
    """The loss probability that is likeliest where the gain probability is `delta` more."""

    def negative(loss):
        shares = np.array([loss, loss + delta, 1 - 2 * loss - delta])
        counts = np.array([losses, gains, ties])
        return -np.sum(counts * np.log(np.maximum(shares, 1e-300)))

    low, high = max(0.0, -delta), (1 - delta) / 2
    found = optimize.minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    return found.x


def test_the_paired_interval_is_where_the_score_test_accepts():
    z = norm.ppf(0.975)
    for losses, gains, total in tables(60, largest=400):
        ends = paired_difference_interval(losses, gains, total)
        point = (gains - losses) / total
        assert -1 <= ends[0] <= point <= ends[1] <= 1
        for end in ends:
            if abs(end) > 1 - 1e-6:
                continue
            # The statistic with the constrained maximum found by search instead of the closed form.
            loss = likeliest_loss(losses, gains, total - losses - gains, end)
            variance = (2 * loss + end - end**2) / total
            assert abs(point - end) / math.sqrt(variance) == pytest.approx(z, rel=2e-4)


def test_the_paired_interval_turns_with_the_arms():
    for losses, gains, total in tables(50):
        low, high = paired_difference_interval(losses, gains, total)
        assert paired_difference_interval(gains, losses, total) == pytest.approx((-high, -low), abs=EXACT)


def test_identical_arms_still_leave_a_drop_possible():
    low, high = paired_difference_interval(0, 0, 1319)
    z2 = norm.ppf(0.975) ** 2
    assert -low == pytest.approx(z2 / (1319 + z2), rel=1e-6) and high == pytest.approx(-low, abs=EXACT)


@pytest.mark.parametrize(
    ("drop", "noise", "total"), [(0.0, 0.1, 50), (0.01, 0.02, 1319), (0.2, 0.0, 50), (0.05, 0.1, 500), (1.0, 0.0, 30)]
)
def test_power_agrees_with_an_enumeration_by_scipy(drop, noise, total):
    power = 0.0
    for discordant in range(1, total + 1):
        weight = binom.pmf(discordant, total, drop + noise)
        if weight < 1e-18:
            continue
        counts = np.arange(discordant // 2 + 1, discordant + 1)
        significant = counts[2 * binom.sf(counts - 1, discordant, 0.5) < 0.05]
        if len(significant):
            power += weight * binom.sf(significant[0] - 1, discordant, (noise / 2 + drop) / (drop + noise))
    assert abs(mcnemar_power(drop=drop, noise=noise, total=total) - power) < EXACT


@pytest.mark.parametrize(("noise", "total"), [(0.0, 1319), (0.01, 1319), (0.1, 500), (0.0, 50)])
def test_the_detectable_drop_has_its_power_and_a_smaller_one_has_not(noise, total):
    drop = detectable_drop(noise=noise, total=total)
    assert mcnemar_power(drop=drop, noise=noise, total=total) == pytest.approx(0.8, abs=1e-6)
    assert mcnemar_power(drop=0.9 * drop, noise=noise, total=total) < 0.8


def test_a_drop_of_0_1_points_is_out_of_reach_of_gsm8k():
    """One question of 1,319 is no evidence, even where the arms agree on all others."""
    assert detectable_drop(noise=0.0, total=1319) > 0.005
    assert mcnemar_power(drop=0.001, noise=0.0, total=1319) < 0.01
    assert mcnemar_p(1, 0) == 1


def test_a_simulated_drop_is_found_as_often_as_the_power_says():
    rng = np.random.default_rng(0)
    counts = rng.multinomial(300, [0.01 + 0.04, 0.01, 0.94], size=2000)
    found = np.mean([mcnemar_p(int(losses), int(gains)) < 0.05 and losses > gains for losses, gains, _ in counts])
    assert abs(found - mcnemar_power(drop=0.04, noise=0.02, total=300)) < 4 * math.sqrt(0.25 / 2000)


def test_too_few_questions_detect_nothing():
    assert detectable_drop(noise=0.0, total=5) is None  # five losses of five: p = 0.0625
    assert detectable_drop(noise=0.0, total=6) > 0.9


def test_bootstrap_resamples_problems():
    rng = np.random.default_rng(1)
    values = rng.random(30)
    boot = bootstrap_mean(values)
    assert boot.mean == pytest.approx(values.mean())
    assert boot.standard_error == pytest.approx(values.std() / math.sqrt(30), rel=0.03)
    low, high = (norm.ppf(share, values.mean(), boot.standard_error) for share in (0.025, 0.975))
    assert boot.interval == pytest.approx((low, high), abs=0.01)
    assert bootstrap_mean(values) == boot


def test_repeats_of_one_problem_do_not_shrink_the_interval():
    """Two problems, one always right: 16 repeats each are not 32 independent answers."""
    low, high = bootstrap_mean([1.0, 0.0]).interval
    assert high - low == 1 and wilson_interval(16, 32)[1] - wilson_interval(16, 32)[0] < 0.4


def test_problems_that_do_not_vary_give_no_interval():
    boot = bootstrap_mean([0.5, 0.5, 0.5])
    assert (boot.mean, boot.interval, boot.standard_error) == (0.5, None, None)


def test_the_normal_detectable_drop_has_its_power():
    drop = normal_detectable_drop(0.02)
    assert norm.sf(norm.ppf(0.975), loc=drop / 0.02) == pytest.approx(0.8, abs=EXACT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson_interval(2, 1), "2, 1, allowed: 0 <= successes <= trials"),
        (lambda: wilson_interval(0, 0), "trials >= 1"),
        (lambda: wilson_interval(0, 1, level=1.0), "level: 1.0, allowed"),
        (lambda: mcnemar_p(-1, 0), "losses, gains: -1, 0, allowed"),
        (lambda: paired_difference_interval(2, 2, 3), "losses, gains, total: 2, 2, 3, allowed"),
        (lambda: mcnemar_power(drop=0.9, noise=0.2, total=10), "allowed: shares that sum to at most 1"),
        (lambda: bootstrap_mean([]), "values: none, allowed"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
