"""A run's file, its score, and comparisons: what is said of two runs and what is refused."""

import json
import os
import sys

import pytest

from headfit import cli
from headfit.evals.compare import compare_runs, p_text
from headfit.evals.report import markdown
from headfit.evals.score import score_run
from headfit.evals.statistics import detectable_drop, mcnemar_p, paired_difference_interval, wilson_interval
from headfit.evals.store import RunRecord, append, open_store, read_run

SETTINGS = {"task": "gsm8k", "data_sha256": "d0", "num_questions": 200, "repeats": 1, "temperature": 0.0, "stop": []}
RIGHT, WRONG, NONE = "#### 4", "#### 5", "I give up."


def answer(index, repeat, text, *, reason="stop"):
    row = {"kind": "answer", "index": index, "repeat": repeat, "gold": "4", "text": text, "reasoning": None}
    return row | {"finish_reason": reason, "tokens": 3}


def make_run(text_of, *, errors=0, reason_of=lambda i, r: "stop", arm=None, **changes):
    """A complete run whose answers are `text_of(question, repeat)`."""
    run = RunRecord(SETTINGS | changes, arm or {"seed": 0})
    run.answers = {key: answer(*key, text_of(*key), reason=reason_of(*key)) for key in run.keys}
    run.errors = [{"kind": "error", "index": 0, "repeat": 0, "attempt": 1, "error": "HTTP 500"}] * errors
    return run


def right_but(*wrong):
    return lambda i, r: WRONG if i in wrong else RIGHT


def compare(a, b):
    return compare_runs(a, b, ("old", "new"))


def test_score_counts_answers_and_rates():
    texts = {0: NONE, 1: NONE, 2: WRONG, 3: "so 4"}
    run = make_run(lambda i, r: texts.get(i, RIGHT), errors=10, reason_of=lambda i, r: "length" if i < 5 else "stop")
    score = score_run(run, "old")
    assert (sum(score.right["marked"]), sum(score.right["last"])) == (196, 197)
    assert score.rates("marked") == {"no_answer": 3 / 200, "length_stop": 5 / 200, "request_error": 10 / 210}
    assert score.interval("marked") == wilson_interval(196, 200)


def test_an_incomplete_run_has_no_score():
    run = make_run(right_but())
    del run.answers[7, 0]
    with pytest.raises(ValueError, match="old: 1 of 200 answers are missing, allowed: a complete run"):
        score_run(run, "old")


def test_one_question_is_no_evidence():
    """Row 32: a tenth of a point, or half of one, is neither a regression nor its absence."""
    found = compare(make_run(right_but()), make_run(right_but(3)))
    marked = found.differences["marked"]
    assert (marked.losses, marked.gains, marked.p) == (1, 0, 1.0) and marked.point == pytest.approx(-1 / 200)
    assert marked.interval == paired_difference_interval(1, 0, 200)
    assert marked.detectable_drop == detectable_drop(noise=1 / 200, total=200)
    assert found.verdict == "no drop shown"
    excluded, detected = -100 * marked.interval[0], 100 * marked.detectable_drop
    assert f"A drop larger than {excluded:.2f} points is excluded" in found.words
    assert f"A drop of {detected:.2f} points would have been detected with 80% power" in found.words
    assert detected > 3


def test_a_drop_and_a_gain_are_named():
    a, b = make_run(right_but(0, 1)), make_run(right_but(*range(1, 20)))
    found = compare(a, b)
    assert found.verdict == "drop" and found.words.startswith("B is worse than A (B - A -8.50 points;")
    assert found.differences["marked"].p == mcnemar_p(18, 1)
    assert compare(b, a).verdict == "gain" and compare(b, a).words.startswith("B is better than A (B - A +8.50 points;")


def test_equal_accuracies_from_other_questions_are_discordant():
    found = compare(make_run(right_but(*range(30))), make_run(right_but(*range(30, 60)))).differences["marked"]
    assert (found.point, found.losses, found.gains, found.p) == (0, 30, 30, 1.0)
    assert found.detectable_drop > 2 * detectable_drop(noise=0, total=200)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"text_of": lambda i, r: NONE if i < 5 else RIGHT}, "no-answer"),
        ({"text_of": right_but(*range(5)), "reason_of": lambda i, r: "length" if i < 5 else "stop"}, "length-stop"),
        ({"text_of": right_but(*range(5)), "errors": 20}, "request-error"),
    ],
)
def test_arms_whose_rates_differ_are_not_called_equal(changes, name):
    """Row 31, by 2.5 points or more."""
    found = compare(make_run(right_but(*range(5, 10))), make_run(**changes))
    assert [warning.partition(" rates")[0] for warning in found.warnings] == [name]
    assert found.verdict == "rates differ" and found.words.startswith(f"Not called equal: {name} rates differ by over")
    assert found.warnings[0] in markdown(found)


def test_rates_that_differ_by_2_points_are_not_warned_of():
    found = compare(make_run(right_but(*range(4))), make_run(lambda i, r: NONE if i < 4 else RIGHT))
    assert not found.warnings and found.verdict == "no drop shown"


def test_a_drop_stays_one_where_rates_differ():
    found = compare(make_run(right_but()), make_run(lambda i, r: NONE if i < 50 else RIGHT))
    assert found.verdict == "drop" and found.warnings


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"data_sha256": "d1"}, {"stop": ["Q"]}, {"num_questions": 150}]
)
def test_other_settings_are_refused(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match="old and new differ in their settings: ") as refused:
        compare(make_run(right_but()), make_run(right_but(), **changes))
    assert f"{name} {SETTINGS[name]!r} and {value!r}" in str(refused.value)


def aime(share_of, shift=0):
    """30 problems x 16 repeats; `share_of(problem)` of 16 are right."""
    return make_run(
        lambda i, r: RIGHT if (r + shift) % 16 < share_of(i) else WRONG, task="aime25", num_questions=30, repeats=16
    )


def test_repeats_are_spread_over_problems():
    """One problem lost in all 16 repeats: a drop of 3.3 points, yet of one problem only, so none is shown."""
    a, b = aime(lambda i: 8 if i % 2 else 16), aime(lambda i: 0 if i == 0 else 8 if i % 2 else 16)
    found = compare(a, b)
    marked = found.differences["marked"]
    assert marked.point == pytest.approx(-1 / 30) and marked.p is None and marked.losses is None
    assert marked.interval[0] < -0.05 and marked.interval[1] == 0
    assert (marked.permutation_p, marked.differing, marked.detectable_drop) == (1.0, 1, None)
    assert found.verdict == "no drop shown" and "Only 1 of 30 differs: too few for the test" in found.words
    score = found.scores[0]
    low, high = score.interval("marked")
    assert score.accuracy("marked") == 0.75 and high - low > 1.5 * (
        wilson_interval(360, 480)[1] - wilson_interval(360, 480)[0]
    )


def test_a_drop_over_many_problems_is_shown():
    found = compare(aime(lambda i: 12), aime(lambda i: 12 - i % 4))
    marked = found.differences["marked"]
    assert found.verdict == "drop" and marked.interval[1] < 0 and marked.differing == 22
    assert marked.permutation_p == 2.0**-21 and marked.detectable_drop < 0.06
    summary = found.summary()["differences"]["marked"]
    assert (summary["mcnemar_p"], summary["permutation_p"], summary["significant"]) == (None, 2.0**-21, True)
    assert "sign-flip p" in markdown(found) and "permutation test" in markdown(found)


@pytest.mark.parametrize(("rights", "drop"), [((16, 0), "100.00"), ((16, 15), "6.25"), ((9, 8), "6.25")])
def test_a_drop_by_the_same_in_all_problems_is_shown(rights, drop):
    """Nothing can be resampled, yet all 30 signs are the same."""
    a, b = (aime(lambda i, right=right: right) for right in rights)
    found = compare(a, b)
    assert found.differences["marked"].interval is None and found.differences["marked"].permutation_p == 2.0**-29
    assert found.verdict == "drop" and found.words == (
        f"B is worse than A (B - A -{drop} points; no interval, as all problems differ by the same; exact sign-flip "
        "p = 1.9e-09 over problems, 30 of 30 differ)."
    )
    assert compare(b, a).verdict == "gain"


def test_five_problems_that_fall_are_no_drop_by_the_test():
    found = compare(aime(lambda i: 8), aime(lambda i: 4 if i < 5 else 8))
    assert found.differences["marked"].interval[1] < 0 and found.differences["marked"].permutation_p == 1 / 16
    assert found.verdict == "no drop shown" and "Only 5 of 30 differ: too few" in found.words
    assert (
        "The 95% bootstrap interval excludes zero, but the exact sign-flip permutation test over problems does "
        "not call this a drop at 5%, and the test decides."
    ) in found.words
    assert compare(aime(lambda i: 8), aime(lambda i: 4 if i < 6 else 8)).verdict == "drop"


def test_repeats_that_never_differ_bound_nothing():
    found = compare(aime(lambda i: 8), aime(lambda i: 8, shift=3))
    assert found.differences["marked"].interval is None and found.verdict == "no drop shown"
    assert "No problem differs" in found.words and "excludes no drop" in found.words


def test_the_detectable_drop_over_problems_is_at_most_what_a_has_right():
    few = compare(aime(lambda i: 4 if i < 7 else 0), aime(lambda i: 4 * (7 <= i < 14)))
    assert few.differences["marked"].detectable_drop is None
    assert "what A has to lose, right answers 28 of 480 in 7 of 30 problems, is too little" in few.words
    spread = compare(aime(lambda i: 8), aime(lambda i: 0 if i % 2 else 16))
    least = spread.differences["marked"].detectable_drop
    assert 0.2 < least < 0.5 and f"A drop of about {100 * least:.2f} points, spread over the problems," in spread.words
    none = compare(aime(lambda i: 0), aime(lambda i: 1 if i < 3 else 0))
    assert "A has no right answer to lose: no drop could have been detected." in none.words


# Words that would contradict their numbers.


def test_an_interval_beside_zero_does_not_overrule_the_exact_test():
    found = compare(make_run(right_but(), num_questions=500), make_run(right_but(*range(5)), num_questions=500))
    assert found.verdict == "no drop shown" and found.words.startswith(
        "No drop is shown (B - A -1.00 points; 95% interval -2.32 points to -0.23 points; exact McNemar p = 0.062 from "
        "5 losses and 0 gains). The 95% interval excludes zero, but the exact McNemar test does not call this a "
        "drop at 5%, and the test decides. A drop larger than 2.32 points is excluded"
    )
    back = compare(make_run(right_but(*range(5)), num_questions=500), make_run(right_but(), num_questions=500))
    assert "does not call this a gain at 5%" in back.words


def test_an_arm_that_is_never_right_has_nothing_to_lose():
    a, b = (make_run(lambda i, r, right=right: RIGHT if i < right else WRONG, num_questions=500) for right in (0, 3))
    for found in (compare(a, a), compare(a, b)):
        assert found.differences["marked"].detectable_drop is None and found.verdict == "no drop shown"
        assert found.words.endswith("A has no right answer to lose: no drop could have been detected.")
    assert "what A has to lose, right answers 3 of 500, is too little" in compare(b, b).words


def test_a_run_of_discordant_questions_alone_still_detects_a_drop():
    a, b = (
        make_run(lambda i, r, half=half: RIGHT if i // 250 == half else WRONG, num_questions=500) for half in (0, 1)
    )
    found = compare(a, b)
    drop = found.differences["marked"].detectable_drop
    assert 0.1 < drop < 0.13 and f"A drop of {100 * drop:.2f} points would have been detected" in found.words


def test_a_drop_as_large_as_the_detectable_one_is_not_missed_without_a_word():
    a, b = (
        make_run(lambda i, r, right=right: RIGHT if r < right[i] else WRONG, num_questions=7, repeats=16)
        for right in ([15, 15, 16, 14, 12, 16, 12], [0, 16, 0, 0, 0, 16, 0])
    )
    found = compare(a, b)
    marked = found.differences["marked"]
    assert found.verdict == "no drop shown" and marked.permutation_p == 1 / 16
    assert -marked.point > marked.detectable_drop and found.words.endswith(
        "still not called one: that happens in one such run of five."
    )


@pytest.mark.parametrize(("p", "text"), [(0.0625, "0.062"), (0.0499, "0.0499"), (0.0501, "0.05"), (0.04999, "0.04999")])
def test_a_p_is_shown_on_its_side_of_5_percent(p, text):
    assert p_text(p) == text


def write(file, run):
    with open_store(file, run.settings, run.arm) as store:
        store.add([*run.answers.values(), *run.errors])
    return str(file)


def test_the_command_compares_files(capfd, tmp_path):
    a = write(tmp_path / "padded.jsonl", make_run(right_but(0, 1), arm={"backend": "flashmla"}))
    b = write(tmp_path / "exact.jsonl", make_run(right_but(*range(20)), errors=1, arm={"backend": "unified"}))
    report = tmp_path / "report.md"
    assert cli.main(["eval", "compare", a, b, "--json", "--report", str(report)]) == cli.OK
    result = json.loads(capfd.readouterr().out)
    assert result["verdict"] == "drop" and result["differences"]["marked"]["losses"] == 18
    assert result["names"] == ["padded", "exact"] and result["arms"][1] == {"backend": "unified"}
    text = report.read_text()
    assert text.startswith("# gsm8k: padded (A) and exact (B)\n\n**B is worse than A")
    assert "| A: padded | 198 of 200 | 99.00% |" in text and "| backend | flashmla | unified |" in text
    assert "| data_sha256 | d0 |" in text and "| marked | -9.00 points |" in text
    assert cli.main(["eval", "compare", a, b]) == cli.OK
    out = capfd.readouterr().out
    assert "Verdict: B is worse than A" in out and "request errors" in out and "0.5%" in out


@pytest.mark.parametrize("option", ["--report", "--plot"])
def test_a_run_is_not_overwritten(capfd, tmp_path, option):
    a, b = (write(tmp_path / f"{name}.jsonl", make_run(right_but(0))) for name in "ab")
    before = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "c.png").symlink_to(b)
    for file in (b, str(tmp_path / "c.png")):
        assert cli.main(["eval", "compare", a, b, option, file]) == cli.BAD_INPUT
        said = capfd.readouterr()
        assert f"{option}: {file} is one of the runs" in said.err and not said.out
    assert (tmp_path / "b.jsonl").read_bytes() == before


def test_the_plot(tmp_path, capfd):
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    files = [write(tmp_path / f"{name}.jsonl", make_run(right_but(*range(len(name))))) for name in ("a", "bb")]
    assert cli.main(["eval", "compare", *files, "--plot", str(tmp_path / "plot.png")]) == cli.OK
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = write(tmp_path / "a.jsonl", make_run(right_but()))
    assert cli.main(["eval", "compare", file, file, "--plot", str(tmp_path / "plot.png")]) == cli.BAD_INPUT
    assert "pip install 'headfit[eval]'" in capfd.readouterr().err


def test_the_command_refuses_in_one_line(capfd, tmp_path):
    a = write(tmp_path / "a.jsonl", make_run(right_but()))
    b = write(tmp_path / "b.jsonl", make_run(right_but(), temperature=0.7))
    assert cli.main(["eval", "compare", a, b]) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert "temperature 0.0 and 0.7" in err and err.count("\n") == 1
    (tmp_path / "c.jsonl").write_text('{"question": "One?"}\n')
    assert cli.main(["eval", "compare", a, str(tmp_path / "c.jsonl")]) == cli.BAD_INPUT
    assert "does not start with a run's settings" in capfd.readouterr().err


# The file.


def test_a_file_cut_anywhere_goes_on_with_its_whole_lines(tmp_path):
    run = make_run(right_but(1), num_questions=3)
    file = tmp_path / "run.jsonl"
    write(file, run)
    content = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in sorted({*range(0, len(content), 11), *ends, *(end - 1 for end in ends)}):
        file.write_bytes(content[:cut])
        with open_store(file, run.settings, run.arm) as store:
            stored = max(0, sum(end <= cut for end in ends) - 1)
            assert len(store.run.answers) == stored, cut
            store.add([run.answers[key] for key in store.run.missing])
        assert file.read_bytes() == content


def test_only_one_run_writes_a_file(tmp_path):
    run = make_run(right_but(), num_questions=2)
    with (
        open_store(tmp_path / "run.jsonl", run.settings, run.arm),
        pytest.raises(ValueError, match="another run is writing it"),
        open_store(tmp_path / "run.jsonl", run.settings, run.arm),
    ):
        pass


def test_an_answer_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synchronised = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (synchronised.append(os.fstat(descriptor).st_size), real(descriptor))
    )
    run, file = make_run(right_but(), num_questions=2), tmp_path / "run.jsonl"
    with open_store(file, run.settings, run.arm) as store:
        store.add([run.answers[0, 0]])
        assert synchronised[-1] == file.stat().st_size and (0, 0) in store.run.answers


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (answer(0, 0, RIGHT), "line 3: unknown, uncalled for or there twice"),
        (answer(2, 0, RIGHT), "line 3: unknown, uncalled for"),
        ({"kind": "note"}, "line 3: unknown"),
    ],
)
def test_rows_that_do_not_belong_are_refused(tmp_path, row, message):
    run, file = make_run(right_but(), num_questions=2), tmp_path / "run.jsonl"
    with open_store(file, run.settings, run.arm) as store:
        store.add([run.answers[0, 0]])
    append(file, [row])
    with pytest.raises(ValueError, match=message):
        read_run(file)


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    for text in ("dear diary", "dear diary\n", "{}\n"):
        file.write_text(text)
        with (
            pytest.raises(ValueError, match=r"not a run's file|does not start|not JSON"),
            open_store(file, SETTINGS, {}),
        ):
            pass
        assert file.read_text() == text
