"""Deterministic generator of short arithmetic word problems in GSM8K's answer form.

The problems train and test the checkpoint in ``tiny/``. All sentences are headfit's own; only the answer form, a
worked solution whose last line is ``#### 18``, follows GSM8K (Cobbe et al. 2021, arXiv:2110.14168). About half of the
training problems are priced: they need prices that the question does not say, from a list at the head of the prompt
(``WordProblem.context``), hundreds of tokens before the question.

Training and test problems are disjoint by construction: a question belongs to the held-out split if the first byte of
its SHA-256 digest is below 32 (one question in eight), ``make_problems`` and ``make_shots`` draw from the other seven
eighths only, ``held_out_problems`` from that eighth only.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from headfit.assets.word_problem_templates import GOODS, LIST_OPENINGS, NAMES, SCENES, TEMPLATES, Template

MAX_RESULT = 150
PRICED_GOODS = 18
HELD_OUT_SEED = 20_000
_PRICE = re.compile(r"(\w+) cost (\d+) dollars")
_OPERATIONS = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right if left % right == 0 else 0,
}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One problem: the question, its worked solution ending in ``#### answer``, and the answer.

    ``context`` is a price list that the question needs, empty if the question stands alone. It goes once, at the head
    of the prompt.
    """

    question: str
    solution: str
    answer: int
    context: str = ""


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the test split."""
    return hashlib.sha256(question.encode()).digest()[0] < 32


def make_price_list(rng: random.Random, count: int = PRICED_GOODS) -> str:
    """A price list of ``count`` goods at 2 to 9 dollars each."""
    goods = rng.sample(GOODS, count)
    return (
        f"{rng.choice(LIST_OPENINGS)} " + ", ".join(f"{item} cost {rng.randint(2, 9)} dollars" for item in goods) + "."
    )


def make_problems(count: int, seed: int) -> list[WordProblem]:
    """Training problems, half of them priced, each priced one with a list of its own."""
    rng = random.Random(seed)
    return [_draw_problem(rng, _maybe_price_list(rng), held_out=False) for _ in range(count)]


def price_drill(rng: random.Random, context: str, count: int = 5) -> WordProblem:
    """A training exercise that only looks prices up: it recites some of the list and answers with the last price."""
    prices = _PRICE.findall(context)
    asked = rng.sample(prices, min(count, len(prices)))
    question = f"What do {', '.join(item for item, _ in asked)} cost? Give the last price."
    solution = "As " + ", ".join(f"{item} cost {dollars} dollars" for item, dollars in asked)
    return WordProblem(question, f"{solution}.\n#### {asked[-1][1]}", int(asked[-1][1]), context)


def make_shots(count: int, seed: int, context: str = "") -> list[WordProblem]:
    """Training problems that share ``context``: priced and plain ones if it is a price list, else plain ones only."""
    rng = random.Random(seed)
    return draw_shots(rng, count, context)


def draw_shots(rng: random.Random, count: int, context: str = "") -> list[WordProblem]:
    """As ``make_shots``, from a generator that the caller keeps."""
    priced = [context if context and rng.random() < 0.75 else "" for _ in range(count)]
    return [_draw_problem(rng, price_list, held_out=False) for price_list in priced]


def held_out_problems(count: int = 500, *, priced: bool = False) -> list[WordProblem]:
    """Test problems, plain ones unless ``priced``; no training problem has the same question."""
    rng = random.Random(HELD_OUT_SEED)
    return [_draw_problem(rng, make_price_list(rng) if priced else "", held_out=True) for _ in range(count)]


def few_shot_prompt(problem: WordProblem, shots: list[WordProblem]) -> str:
    """The price list if there is one, the worked shots, then the question, ready for the model to continue.

    The shots must be plain or share the problem's context, since a prompt has one price list.
    """
    head = f"{problem.context}\n\n" if problem.context else ""
    worked = "".join(f"{question_prompt(shot)} {shot.solution}\n\n" for shot in shots)
    return head + worked + question_prompt(problem)


def question_prompt(problem: WordProblem) -> str:
    """The question alone in prompt form, without context."""
    return f"Question: {problem.question}\nAnswer:"


def parse_answer(text: str) -> int | None:
    """The number after the first ``####`` of a completion, or None if there is none."""
    found = re.search(r"#### (-?\d+)", text)
    return int(found.group(1)) if found else None


def _maybe_price_list(rng: random.Random) -> str:
    return make_price_list(rng) if rng.random() < 0.5 else ""


def _draw_problem(rng: random.Random, context: str, *, held_out: bool) -> WordProblem:
    prices = {item: int(dollars) for item, dollars in _PRICE.findall(context)}
    templates = [template for template in TEMPLATES if template.priced == bool(prices)]
    while True:
        problem = _fill(rng, rng.choice(templates), prices, context)
        if problem is not None and is_held_out(problem.question) == held_out:
            return problem


def _fill(rng: random.Random, template: Template, prices: dict[str, int], context: str) -> WordProblem | None:
    """Draw numbers and words for a template; None if a step leaves the range 1 to ``MAX_RESULT`` or does not divide."""
    values = {letter: rng.randint(2, 9 if letter in template.factors else 60) for letter in template.letters}
    goods, more_goods = rng.sample(list(prices) if prices else GOODS, 2)
    if prices:
        values |= {"p": prices[goods], "q": prices[more_goods]}
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "goods": goods, "more": more_goods, "scene": rng.choice(SCENES)}
    numbers = {letter: values[letter] for letter in template.letters}
    worked = []
    for step in template.steps:
        left, right = values[step.left], values[step.right]
        result = _OPERATIONS[step.operator](left, right)
        if not 1 <= result <= MAX_RESULT:
            return None
        values[step.result] = result
        worked.append(step.sentence.format(f"{left} {step.operator} {right} = {result}", **words, **values))
    answer = values[template.steps[-1].result]
    solution = " ".join(worked) + f"\n#### {answer}"
    return WordProblem(template.question.format(**words, **numbers), solution, answer, context)
