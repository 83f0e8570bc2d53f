"""Intervals, tests and power against scipy, or against their definitions computed another way."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import optimize
from scipy.stats import binom, binomtest, norm, permutation_test, t

from headfit.evals.statistics import (
    FEWEST_DIFFERING,
    bootstrap_mean,
    detectable_drop,
    mcnemar_p,
    mcnemar_power,
    normal_detectable_drop,
    paired_difference_interval,
    sign_flip_p,
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


def test_what_the_first_arm_has_right_bounds_the_detectable_drop():
    assert detectable_drop(noise=0.1, total=500, right=0.0) is None
    assert detectable_drop(noise=0.0, total=500, right=6 / 500) is None  # p = 0.03 if all 6 are lost: power 0.55
    for right in (0.03, 0.1, 0.5, 1.0):
        drop = detectable_drop(noise=0.02, total=500, right=right)
        assert drop <= right and drop == pytest.approx(detectable_drop(noise=0.02, total=500), rel=0.3)


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_a_drop_is_detectable_where_all_questions_differ(right):
    """The drop takes the place of discordance that there is no more room for."""
    drop = detectable_drop(noise=1.0, total=500, right=right)
    loss, gain = (0.5, 0.5 - drop) if right == 0.5 else ((1 + drop) / 2, (1 - drop) / 2)
    losses, gains, _ = np.random.default_rng(3).multinomial(500, [loss, gain, max(0.0, 1 - loss - gain)], size=2000).T
    found = np.mean([mcnemar_p(*map(int, pair)) < 0.05 for pair in zip(losses, gains, strict=True)])
    assert drop < 0.13 and abs(found - 0.8) < 4 * math.sqrt(0.16 / 2000)


def test_an_exact_drop_shown_is_one_by_the_interval_too():
    """Only the other way do they fall on opposite sides of 5%; at 0, Tango's statistic does not depend on the total."""
    z2 = norm.ppf(0.975) ** 2
    pairs = [(losses, gains) for losses in range(1, 300) for gains in range(losses)]
    assert all((a - b) ** 2 > z2 * (a + b) for a, b in pairs if mcnemar_p(a, b) < 0.05)


def test_sign_flips_agree_with_an_enumeration():
    rng = np.random.default_rng(4)
    for problems in (1, 2, 5, 6, 9, 9):
        changes = rng.integers(-16, 17, problems).tolist()
        signs = np.array(list(itertools.product((1, -1), repeat=problems)))
        share = np.mean(abs(signs @ changes) >= abs(sum(changes)))
        assert abs(sign_flip_p(changes) - share) < EXACT
    theirs = permutation_test((changes,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert abs(sign_flip_p(changes) - theirs.pvalue) < EXACT


def test_sign_flips_of_single_answers_are_mcnemars_test():
    for losses, gains, total in tables(50, largest=400):
        changes = [-1] * losses + [1] * gains + [0] * (total - losses - gains)
        assert abs(sign_flip_p(changes) - mcnemar_p(losses, gains)) < EXACT


def test_sign_flips_of_known_changes():
    assert sign_flip_p([]) == sign_flip_p([0] * 30) == sign_flip_p([5, -5]) == 1
    assert sign_flip_p([-16] * 30) == sign_flip_p([-1] * 30) == sign_flip_p([1] * 30) == 2.0**-29
    assert sign_flip_p([-16] * FEWEST_DIFFERING) < 0.05 < sign_flip_p([-16] * (FEWEST_DIFFERING - 1))


@pytest.mark.parametrize("varying", [2, 5, 10, 30])
def test_identical_arms_seldom_seem_to_differ(varying):
    """16 repeats of 30 problems; those that do not vary are right or wrong in all."""
    rng, runs = np.random.default_rng(varying), 3000
    share = rng.random((runs, varying))
    changes = np.zeros((runs, 30), dtype=int)
    changes[:, :varying] = rng.binomial(16, share) - rng.binomial(16, share)
    found = np.mean([sign_flip_p(each) < 0.05 for each in changes.tolist()])
    assert found < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert found > 0.03 or varying <= 10  # 2 and 5 problems never show anything


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
    for freedom in (5, 9, 29):
        assert normal_detectable_drop(0.02, freedom=freedom) == pytest.approx(
            0.02 * (t.ppf(0.975, freedom) + t.ppf(0.8, freedom)), rel=0.01
        )


def test_the_normal_detectable_drop_is_at_most_what_there_is_to_lose():
    assert normal_detectable_drop(0.5) is None and normal_detectable_drop(0.02, right=0.05) is None
    assert normal_detectable_drop(0.02, right=0.06) == normal_detectable_drop(0.02)


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
