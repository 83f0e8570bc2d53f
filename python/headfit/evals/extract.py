r"""The number that an answer gives, by two extractors.

`marked` reads the last `#### n`, `\boxed{n}` or "answer is n"; `last` the last number of the text. `marked` is the one
that scores, because an answer without a mark is then seen as none; `last` shows how many of those were right all the
same. lm-evaluation-harness's GSM8K filters, for comparison, take the first `####` directly followed by digits and the
last run of digits, points and commas, and compare them as text: `18.00` and `18` differ there, here they are equal.

Only what follows a closing `</think>` counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

EXTRACTORS = ("marked", "last")

# A sign belongs to the number unless something stands right before it: `9-5` ends in 5, `= -5` in -5.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-+\u2212](?=[$\d.]))?(?:\$(?P<minus>[-\u2212](?=\d))?)?"
    r"(?P<whole>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))(?P<part>\.\d+)?(?:/(?P<divisor>\d+)(?![\d.]))?",
    re.ASCII,
)
_MOST_DIGITS = 40  # a model that loops writes digits without end
_MARK = re.compile(r"####|\\f?boxed\s*\{|\banswer(?:\s+is|\s*:)(?=[^\n]*\d)", re.IGNORECASE | re.ASCII)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", re.ASCII)
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:quad|left|right|dollar)\b|\^\s*\{?\\circ\}?|\\?%|[\s~]")


def extract(text: str, extractor: str, *, stop: Sequence[str] = ()) -> Fraction | None:
    """The number that `text` gives as its answer, None where it gives none.

    Args:
        extractor: one of `EXTRACTORS`.
        stop: what ends an answer, where the server did not end it there.

    Raises:
        ValueError: an unknown extractor.
    """
    if extractor not in EXTRACTORS:
        raise ValueError(f"extractor: {extractor!r}, allowed: {', '.join(EXTRACTORS)}")
    for ending in stop:
        text = text.partition(ending)[0]
    text = text.rpartition("</think>")[2]
    return _marked(text) if extractor == "marked" else _last(text)


def gold_number(answer: str) -> Fraction:
    """The right answer that a data set states: a bare number, or a worked solution ending in `#### n`.

    Raises:
        ValueError: there is none.
    """
    bare = answer.rpartition("####")[2].strip()
    match = _NUMBER.fullmatch(bare)
    value = match and _value(match)
    if value is None:
        raise ValueError(f"answer: {answer[-60:]!r} states no number, allowed: a number, or a text ending in '#### n'")
    return value


def _marked(text: str) -> Fraction | None:
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    mark = marks[-1]
    if mark.group().endswith("{"):
        return _boxed(text[mark.end() :])
    line = text[mark.end() :].lstrip(" \t:*").partition("\n")[0]
    line = _FRACTION.sub(r"\1/\2", line.rpartition("=")[2])
    match = _NUMBER.search(line)
    return _value(match) if match else None


def _boxed(rest: str) -> Fraction | None:
    """The number in a box whose opening brace stands before `rest`; the box must hold nothing else but a unit."""
    depth = 1
    for end, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            content = _UNITS.sub(
                lambda unit: unit.group(1) if _NUMBER.fullmatch(unit.group(1).strip()) else "", rest[:end]
            )
            content = _SPACING.sub("", _FRACTION.sub(r"\1/\2", content)).replace("\\$", "$")
            content = content.rpartition("=")[2].rstrip(".")
            match = _NUMBER.fullmatch(content)
            return _value(match) if match else None
    return None  # cut off within the box


def _last(text: str) -> Fraction | None:
    matches = list(_NUMBER.finditer(_FRACTION.sub(r"\1/\2", text)))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > _MOST_DIGITS:
        return None
    digits = re.sub(r"[,{}]", "", match["whole"]) + (match["part"] or "")
    value = Fraction(digits if digits[0] != "." else "0" + digits)
    if match["divisor"]:
        if int(match["divisor"]) == 0:
            return None
        value /= int(match["divisor"])
    signs = (match["sign"] or "") + (match["minus"] or "")
    negative = sum(sign in "-\u2212" for sign in signs) % 2
    return -value if negative else value
