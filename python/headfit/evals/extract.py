r"""The number that an answer gives, by two extractors.

`marked` reads the last `#### n`, `\boxed{n}` or "answer is n"; `last` the last number of the text. `marked` is the one
that scores, because an answer without a mark is then seen as none; `last` shows how many of those were right all the
same. lm-evaluation-harness's GSM8K filters, for comparison, take the first `####` directly followed by digits and the
last run of digits, points and commas, and compare them as text: `18.00` and `18` differ there, here they are equal.

A number is read whole or not at all: `1,23`, `1.2.3`, `10:30`, `10^3` and two numbers in a box are no answer, not a
part of one. Only what follows the last `</think>` counts, and nothing from a `<think>` that stays open. A text without
either tag counts whole: it does not show that it was cut within a block which the prompt had opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

EXTRACTORS = ("marked", "last")

_MOST_DIGITS = 40  # a model that loops writes digits without end
_LONGEST_BOX = 200  # a number and its unit
_CURRENCY = "$\u20ac\u00a3\u00a5"

# LaTeX and typography -> what `_TOKEN` reads, in this order. A joining space is one space, a separating one two.
_PLAIN = [
    (re.compile(pattern, re.ASCII), plain)
    for pattern, plain in (
        (r"[\u2212\u2013]", "-"),
        (r"\\pm\b", "\u00b1"),
        (r"\bnegative\s+(?=[\d$])", "-"),
        (r"\bminus\s+(?=[\d$])", "- "),
        (r"\u00bd", " 1/2 "),
        (r"\u00bc", " 1/4 "),
        (r"\u00be", " 3/4 "),
        (r"\u00b2", "^2"),
        (r"\u00b3", "^3"),
        (r"\\!|\\(?:left|right|displaystyle)\b", ""),
        (r"\\[, ]|[~\u00a0\u2009\u202f]", " "),
        (r"\\[;:]|\\q?quad\b|\t", "  "),
        (r"\\f?boxed\b", "="),
        (r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\b", "  "),
        (r"\\dollar\b", "$"),
        (r"\\([$%])", r"\1"),
        (r"\\(?:times|cdot)\b|[\u00d7\u00b7]", "*"),
        (r"\^\s*\{?\s*\\circ\b", "\u00b0"),
        (r"\^\s*\{", "^"),
        (r"\{([.,])\}", r"\1"),
        (r"[{}]", " "),
    )
]
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*(?P<top>-?\s*\d+)\s*\}|(?P<over>\d))\s*(?:\{\s*(?P<bottom>-?\s*\d+)\s*\}|(?P<under>\d))",
    re.ASCII,
)
# All that may be meant as one number, longest reading first; `_NUMBER` then says whether it is one.
_TOKEN = re.compile(
    r"(?<![\d^])(?:\d{1,3}(?: \d{3})+(?![\d/])(?:\.\d+)?|\d+ {1,3}\d+/\d+(?![\d/.])"
    r"|(?:(?<![\w.])\.)?\d+(?:(?:[.,/:]|\^-?)\d+|e[-+]?\d+)*)",
    re.IGNORECASE | re.ASCII,
)
_NUMBER = re.compile(
    r"(?:(?P<units>\d+) +(?=\d+/))?(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d*)(?P<part>\.\d+)?"
    r"(?P<ten>e[-+]?\d{1,2})?(?:/(?P<divisor>\d+))?",
    re.IGNORECASE | re.ASCII,
)
_ATTACHED = re.compile(rf"(?<![\w)\]}}.%])([-+])[{_CURRENCY}(*]*\Z")

_THINK_END, _THINK = (re.compile(rf"<{slash}think(?:ing)?>", re.IGNORECASE) for slash in ("/", ""))
_MARK = re.compile(r"####|\\f?boxed\s*\{|\banswer(?:[\s*_]+is\b|[\s*_]*:)", re.IGNORECASE | re.ASCII)
_DIGIT = re.compile(r"\d", re.ASCII)
_SCALE = r"(?:hundred|thousand|million|billion|trillion|dozen)s?\b|k\b"
_NO_UNIT = re.compile(rf"(?<![a-z])(?:(?:or|and|to|not|[xyz]+)(?![a-z])|{_SCALE})", re.IGNORECASE)
_BEFORE = re.compile(rf"(?:[-+\s{_CURRENCY}(*:a-z]*[^a-z])?", re.IGNORECASE)
_AFTER = re.compile(rf"(?![a-z](?![a-z]))(?:[\s{_CURRENCY}%\u00b0)*.a-z]|(?<=[a-z\s])\^ ?[23](?!\d))*", re.IGNORECASE)
# What ends the clause that states the number, and what makes that number a part of something longer.
_CLAUSE = re.compile(
    rf"[,;.]\s+(?![-\s{_CURRENCY}\d])|(?<=[\w%*])\s+\(|\s(?:because|since|where|when|if|as|for|so)\s", re.IGNORECASE
)
_GOES_ON = re.compile(
    rf"[%\u00b0)*{_CURRENCY}]*\s*(?:(?:[-+*/^:x\u00f7]\s*)(?:[-{_CURRENCY}(]*\.?\d|\\[a-z]|[a-z]\b)|\\[a-z]|\^"
    rf"|(?:(?:\b(?:or|and|to)\b|[,;&])\s*)?[-{_CURRENCY}]*\.?\d|[xyz]\b|{_SCALE})",
    re.IGNORECASE | re.ASCII,
)


def extract(text: str, extractor: str, *, stop: Sequence[str] = ()) -> Fraction | None:
    """The number that `text` gives as its answer, None where it gives none. Takes time linear in the text.

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
    text = _THINK.split(_THINK_END.split(text)[-1], maxsplit=1)[0]
    return _marked(text) if extractor == "marked" else _last(text)


def gold_number(answer: str) -> Fraction:
    """The right answer that a data set states: a bare number, or a worked solution ending in `#### n`.

    Raises:
        ValueError: there is none.
    """
    value = _alone(answer.rpartition("####")[2], unit=False)
    if value is None:
        raise ValueError(f"answer: {answer[-60:]!r} states no number, allowed: a number, or a text ending in '#### n'")
    return value


def _marked(text: str) -> Fraction | None:
    end = len(text)
    for mark in reversed(list(_MARK.finditer(text))):
        if mark.group().endswith("{"):
            return _boxed(text, mark.end())
        line, _, below = text[mark.end() : end].lstrip(" \t:*_#").partition("\n")
        promised = mark.group() == "####"  # "the answer is" also stands in prose that gives none
        if line.strip(" \t\r$"):
            if promised or _DIGIT.search(line):
                return _stated(line)
        else:
            value = _alone(below.lstrip().partition("\n")[0])
            if promised or value is not None:
                return value
        end = mark.start()  # each mark's text ends at the next one: no line is read twice
    return None


def _boxed(text: str, start: int) -> Fraction | None:
    """The number in the box whose opening brace ends at `start`."""
    depth = 1
    for end, char in enumerate(text[start : start + _LONGEST_BOX + 1], start):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return _alone(text[start:end])
    return None  # cut off within the box, or no box for a number


def _stated(line: str) -> Fraction | None:
    """The number in the first clause that has one: behind its last `=`, and not part of an expression or a list."""
    clause = next((part for part in _CLAUSE.split(_plain(line)) if _DIGIT.search(part)), "")
    side = "=" + next((part for part in reversed(clause.split("=")) if _DIGIT.search(part)), "")
    token = _TOKEN.search(side)
    return None if token is None or _GOES_ON.match(side, token.end()) else _value(token)


def _alone(text: str, *, unit: bool = True) -> Fraction | None:
    """The number in a text that holds nothing else, but for a unit."""
    if len(text) > _LONGEST_BOX or not _DIGIT.search(text):
        return None
    side = "=" + _plain(text).rpartition("=")[2].strip()
    tokens = list(_TOKEN.finditer(side))
    if len(tokens) != 1:
        return None
    before, after = side[1 : tokens[0].start()], side[tokens[0].end() :]
    bare = before.count("(") == after.count(")") and _BEFORE.fullmatch(before) and _AFTER.fullmatch(after)
    if not bare or _NO_UNIT.search(f"{before} {after}") or (not unit and re.search("[a-z]", before + after, re.I)):
        return None
    return _value(tokens[0])


def _last(text: str) -> Fraction | None:
    tokens = list(_TOKEN.finditer(_plain(text)))
    return _value(tokens[-1]) if tokens else None


def _plain(text: str) -> str:
    text = _FRACTION.sub(_slashed, text)
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


def _slashed(fraction: re.Match[str]) -> str:
    r"""`-1/2 ` for `\frac{-1}{2}`; set off from digits on both sides: `3\frac{1}{2}` is 3 1/2."""
    top, bottom = fraction["top"] or fraction["over"], fraction["bottom"] or fraction["under"]
    sign = "-" if ("-" in top) != ("-" in bottom) else ""
    gap = " " if fraction.string[fraction.start() - 1 : fraction.start()].isdigit() else ""
    return f"{gap}{sign}{top.lstrip('- ')}/{bottom.lstrip('- ')} "


def _value(token: re.Match[str]) -> Fraction | None:
    number = _NUMBER.fullmatch(token.group()) if len(token.group()) <= _MOST_DIGITS else None
    if number is None:
        return None
    value = Fraction(re.sub("[, ]", "", number["whole"] or "0") + (number["part"] or "") + (number["ten"] or ""))
    if number["divisor"]:
        if int(number["divisor"]) == 0:
            return None
        value /= int(number["divisor"])
    if number["units"]:
        if value >= 1:
            return None  # `5 100/20` is no mixed number
        value += int(number["units"])
    before = token.string[max(0, token.start() - 20) : token.start()]
    head = before.rstrip(f" {_CURRENCY}(*-+\u00b1")
    signs = before[len(head) :]
    if "\u00b1" in signs:
        return None  # two numbers
    if re.search(
        r"[\w)\]}.%\n]\Z|\A\Z", head
    ):  # `9 - 5`, a dash in prose, a list's bullet: only an attached sign counts
        sign = _ATTACHED.search(before)
        negative = sign is not None and sign[1] == "-"
    else:
        negative = signs.count("-") % 2 == 1
    return -value if negative else value
