"""The number an answer gives, and the questions of a data set."""

import json
import os
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headfit.evals.datasets import Question, check_shots, from_hub, questions_sha256, read_jsonl
from headfit.evals.extract import EXTRACTORS, extract, gold_number
from headfit.evals.tasks import TASKS, prompt

# text -> by mark, last number
NUMBERS = {
    "#### 18.00": (18, 18),
    "#### $18": (18, 18),
    "#### 1,234": (1234, 1234),
    "#### -5": (-5, -5),
    "#### 7": (7, 7),
    r"\boxed{7}": (7, 7),
    "First 5, then 18.": (None, 18),
    "18 eggs, so #### 7": (7, 7),
    "#### 7\nCheck: 3 + 4 = 7, from 4": (7, 4),
    "#### 5 + 13 = 18": (18, 18),
    "#### 18 dollars for 3": (18, 3),
    "#### **18**": (18, 18),
    "#### -$5": (-5, -5),
    "#### $-5": (-5, -5),
    "#### \u221210": (-10, -10),
    "#### 3\nno: #### 4": (4, 4),
    "The answer is 12.": (12, 12),
    "**Answer:** 12": (12, 12),
    r"answer: \boxed{42}": (42, 42),
    r"\boxed{070}": (70, 70),
    r"\boxed{1{,}234}": (1234, 1234),
    r"\boxed{1\,234}": (1234, 1234),
    r"\boxed{\$18.00}": (18, 18),
    r"\boxed{18\text{ dollars}}": (18, 18),
    r"\boxed{\text{18}}": (18, 18),
    r"\boxed{x = 5}": (5, 5),
    r"\boxed{5^\circ}": (5, 5),
    r"\boxed{5\%}": (5, 5),
    r"\boxed{-\frac{1}{2}}": (Fraction(-1, 2), Fraction(-1, 2)),
    r"\boxed{2\sqrt{3}}": (None, 3),
    r"\boxed{18": (None, 18),
    "#### ": (None, None),
    "#### eighteen": (None, None),
    "The answer is unclear.": (None, None),
    "": (None, None),
    "9-5": (None, 5),
    "9 - 5": (None, 5),
    "x=-5": (None, -5),
    "(-5)": (None, -5),
    "$1,234.5.": (None, Fraction("1234.5")),
    "costs .5": (None, Fraction(1, 2)),
    "1,2345": (None, None),
    "1/0": (None, None),
    "<think>#### 3 is it</think> so #### 4": (4, 4),
    "<think>#### 3 is it</think> none": (None, None),
    "\u0663 and \u00b2": (None, None),
    "#### " + "7" * 5000: (None, None),
    # numbers in one box, joined only by what separates thousands
    r"\boxed{7 \text{ or } 8}": (None, 8),
    r"\boxed{7 8}": (None, 8),
    r"\boxed{7 \quad 8}": (None, 8),
    r"\boxed{7 \quad 800}": (None, 800),
    r"\boxed{3 \; 4 \; 5}": (None, 5),
    r"\boxed{5\%20}": (None, 20),
    r"\boxed{90^\circ 30}": (None, 30),
    r"\boxed{12\text{5}}": (None, 5),
    r"\boxed{1{2}3}": (None, 3),
    r"\boxed{\frac{1}{2}3}": (None, 3),
    r"\boxed{\pm 5}": (None, None),
    r"\boxed{1,234}": (1234, 1234),
    r"\boxed{1 234}": (1234, 1234),
    r"\boxed{1,\!234}": (1234, 1234),
    r"\boxed{1 2345}": (None, 2345),
    r"\boxed{1 \frac{1}{2}}": (Fraction(3, 2), Fraction(3, 2)),
    r"\boxed{3\frac{1}{2}}": (Fraction(7, 2), Fraction(7, 2)),
    r"#### 3\frac{1}{2}": (Fraction(7, 2), Fraction(7, 2)),
    "#### 3\u00bd": (Fraction(7, 2), Fraction(7, 2)),
    "#### 7 or 8": (None, 8),
    "#### 1, 2, 3": (None, 3),
    "#### 5%20": (None, 20),
    # signs
    r"#### -\$5": (-5, -5),
    "#### - 5": (-5, -5),
    "#### \u20135": (-5, -5),
    "#### -\u20ac5": (-5, -5),
    "#### -(5)": (-5, -5),
    "#### negative 5": (-5, -5),
    "#### \u00b15": (None, None),
    r"\boxed{- 5}": (-5, -5),
    r"\boxed{-\$5}": (-5, -5),
    "pages 5\u20139": (None, 9),
    "9 minus 5": (None, 5),
    "Left:\n- 5": (None, 5),
    # a part of what is written is not the number
    "#### 12,34,567": (None, None),
    "#### 1,23": (None, None),
    "#### 1.2.3": (None, None),
    "#### 10:30": (None, None),
    "#### 10 000": (10000, 10000),
    "#### 5 x 10^3": (None, None),
    "#### 10^3": (None, None),
    "#### 10\u00b2": (None, None),
    "#### 1e3": (1000, 1000),
    "#### 1 1/2": (Fraction(3, 2), Fraction(3, 2)),
    "#### 1/2": (Fraction(1, 2), Fraction(1, 2)),
    "#### 18 = 3*6": (None, 6),
    "#### 3*6 = 18": (18, 18),
    "#### 5-6": (None, 6),
    r"#### 2\sqrt{3}": (None, 3),
    "#### 5 million": (None, 5),
    r"\boxed{5 \text{ million}}": (None, 5),
    r"\boxed{5x}": (None, 5),
    "The answer is 12, since x = 5.": (12, 5),
    "#### 18 (x = 5)": (18, 5),
    "wait...5": (None, 5),
    # common forms
    "**Answer**: 7": (7, 7),
    "####\n7": (7, 7),
    "**Answer:**\n\n$$7$$": (7, 7),
    "Answer:\nFirst 3 and 4": (None, 4),
    r"\boxed{$7$}": (7, 7),
    r"\boxed{(7)}": (7, 7),
    r"\boxed{\left(7\right)}": (7, 7),
    r"\boxed{{7}}": (7, 7),
    r"\boxed{18 dollars}": (18, 18),
    r"\boxed{18\text{ cm}^2}": (18, 18),
    r"\boxed{5\,\text{m}}": (5, 5),
    r"\boxed{\textbf{\text{18}}}": (18, 18),
    r"\boxed{\frac{-1}{2}}": (Fraction(-1, 2), Fraction(-1, 2)),
    r"\boxed{-\frac{-1}{2}}": (Fraction(1, 2), Fraction(1, 2)),
    r"\boxed{\frac12}": (Fraction(1, 2), Fraction(1, 2)),
    # thinking
    "<think>#### 3": (None, None),
    "#### 4 <think>or #### 3": (4, 4),
    "#### 3 is it</think> so #### 4": (4, 4),
    "<think>3</think> wait <think>#### 5": (None, None),
    "<thinking>\\boxed{3}": (None, None),
}


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: repr(text[:30]))
def test_number_of_a_text(text):
    assert tuple(extract(text, name) for name in EXTRACTORS) == NUMBERS[text]


@pytest.mark.parametrize("written", ["18.00", "$18", "18", "18.", "\\boxed{18}", "#### 18", "+18"])
@pytest.mark.parametrize("form", ["#### {}", "The answer is {}", "so we get {}"])
def test_gold_18_however_it_is_written(written, form):
    assert extract(form.format(written), "last") == gold_number("18")
    if "so we" not in form or "boxed" in written or "####" in written:
        assert extract(form.format(written), "marked") == gold_number("18")


@pytest.mark.parametrize(
    "wrong", ["18 at first, #### 81", "#### 180", "#### 18.5", "#### 1,800", "#### -18", "#### 1 8"]
)
def test_another_number_is_not_18(wrong):
    assert 18 not in [extract(wrong, name) for name in EXTRACTORS[:1]]


def test_what_follows_a_stop_does_not_count():
    text = " It is 18.\n#### 18\n\nQuestion: And 5?\nAnswer: #### 6"
    assert [extract(text, name, stop=["Question:"]) for name in EXTRACTORS] == [18, 18]
    assert [extract(text, name) for name in EXTRACTORS] == [6, 6]


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.00", "{}."]))
def test_every_integer_is_read_back(number, form):
    for mark in ("#### {}", "\\boxed{{{}}}", "the answer is {}"):
        text = f"5 and 6.\n{mark.format(form.format(number))}"
        assert [extract(text, name) for name in EXTRACTORS] == [number, number]


PIECES = [
    *"#0159-+$.,/{}=%^:()* \n\\",
    "<think>",
    "\\boxed{",
    "#### ",
    "</think>",
    "\\frac{1}{",
    "\\text{",
    "answer is ",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_breaks_an_extractor(text):
    for name in EXTRACTORS:
        number = extract(text, name)
        assert number is None or isinstance(number, Fraction)


LOOPS = [
    *("the answer is not ", "answer: ", "answer ", "Answer:\n", "\\boxed{", "####", "<think>", "</think>", "\\frac{1}"),
    *("1,", "1.", "1/", "-", "- ", "1", "123 ", "1 ", " ", "\n", ", ", "^ ", "{", "minus "),
]


@pytest.mark.parametrize("loop", LOOPS, ids=repr)
def test_a_megabyte_of_a_loop_is_read_in_linear_time(loop):
    text = loop * (1_000_000 // len(loop))
    start = time.process_time()
    for name in EXTRACTORS:
        for before in ("", "#### 1 "):
            extract(before + text, name)
    assert time.process_time() - start < 10  # four texts, under a second each; quadratic time takes minutes


def test_an_unknown_extractor_is_refused():
    with pytest.raises(ValueError, match=r"'first', allowed: marked, last"):
        extract("#### 1", "first")


# The data sets are not in the repository.


def data(name):
    folder = os.environ.get("HEADFIT_EVAL_DATA")
    if not folder:
        pytest.skip("HEADFIT_EVAL_DATA is unset: no folder with gsm8k/test.jsonl and aime25/test.jsonl")
    return Path(folder) / name


def test_all_gold_answers_of_gsm8k():
    questions = read_jsonl(data("gsm8k/test.jsonl")).questions
    assert len(questions) == 1319 and len({question.text for question in questions}) == 1319
    for question in questions:
        stated = Fraction(question.answer.rpartition("#### ")[2].replace(",", ""))
        assert [extract(question.answer, name) for name in EXTRACTORS] == [stated, stated]
        assert gold_number(question.answer) == stated


def test_all_gold_answers_of_aime25():
    questions = read_jsonl(data("aime25/test.jsonl")).questions
    assert len(questions) == 30
    for question in questions:
        gold = gold_number(question.answer)
        assert gold == int(question.answer) and 0 <= gold <= 999
        for text in (f"So it is \\boxed{{{question.answer}}}.", f"**Answer:** ${question.answer}$"):
            assert [extract(text, name) for name in EXTRACTORS] == [gold, gold]


def test_shots_come_from_train():
    scored = read_jsonl(data("gsm8k/test.jsonl"))
    train = read_jsonl(data("gsm8k/train_first200.jsonl"))
    check_shots(train.questions, scored.questions)
    shots = train.first(TASKS["gsm8k"].num_shots).questions
    text = prompt("gsm8k", scored.questions[0], shots)
    assert text.count("Question: ") == 6 and text.endswith("\nAnswer:") and text.count("#### ") == 5
    with pytest.raises(ValueError, match="shot 2: is one of the scored questions"):
        check_shots([train.questions[0], scored.questions[700]], scored.questions)


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_the_same_questions_have_the_same_hash_from_any_file(tmp_path):
    solved = read_jsonl(write(tmp_path / "a.jsonl", {"question": "One?", "answer": "It is 1.\n#### 1"}))
    bare = read_jsonl(write(tmp_path / "b.jsonl", {"problem": "One?", "answer": 1}))
    other = read_jsonl(write(tmp_path / "c.jsonl", {"problem": "One?", "answer": 2}))
    assert questions_sha256(solved.questions) == questions_sha256(bare.questions) != questions_sha256(other.questions)
    assert solved.sha256 != bare.sha256


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ({"question": "Two?"}, r"line 2: has \['question'\], allowed: texts question \(or problem\) and answer"),
        ({"question": "Two?", "answer": "many"}, "line 2: answer: 'many' states no number"),
        ({"question": "Two?", "answer": True}, "line 2: has"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    file = write(tmp_path / "bad.jsonl", {"question": "One?", "answer": "1"}, row)
    with pytest.raises(ValueError, match=message):
        read_jsonl(file)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no question"):
        read_jsonl(write(tmp_path / "none.jsonl"))


def test_too_many_are_asked_for(tmp_path):
    questions = read_jsonl(write(tmp_path / "one.jsonl", {"question": "One?", "answer": "1"}))
    assert questions.first(1).questions == (Question("One?", "1"),)
    with pytest.raises(ValueError, match="2 questions asked for, allowed: 0 to 1"):
        questions.first(2)


def test_the_public_data_set_by_name(monkeypatch):
    rows = [{"question": "One?", "answer": "#### 1"}, {"question": "Two?", "answer": "#### 2"}]
    asked = []
    fake = SimpleNamespace(load_dataset=lambda *names, split: asked.append((*names, split)) or rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = from_hub("gsm8k", shots=True)
    assert asked == [("openai/gsm8k", "main", "train")] and found.source == "openai/gsm8k:train"
    assert found.questions[1] == Question("Two?", "#### 2") and found.sha256 == questions_sha256(found.questions)


def test_without_the_extra_the_file_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'headfit\[eval\]' and a connection; or give --data FILE"):
        from_hub("gsm8k")


def test_aime_has_no_shots_to_fetch():
    with pytest.raises(ValueError, match="no split for shots"):
        from_hub("aime25", shots=True)
