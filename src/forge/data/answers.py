"""[3] Finding the final answer in a text and reading it as an exact number."""

import re
from fractions import Fraction

# An unsigned number: 12, 1,234,567, 3.5, .5, 1e-3. It does not start inside a word or a longer number.
_UNSIGNED = r"""
    (?<![A-Za-z\d])
    (?: (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)? (?:[eE][-+]?\d{1,3}(?!\d))? | \.\d+ )
"""
# A minus is a sign only where nothing stands before it that it could be subtracted from.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])? (?P<top>{_UNSIGNED}) (?:[ ]?/[ ]?(?P<bottom>{_UNSIGNED}))?", re.VERBOSE
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*([^{}]{1,40}?)\s*\}\{\s*([^{}]{1,40}?)\s*\}")
_CURRENCY_AFTER_SIGN = re.compile(r"-\s?\\?([$€£])")
_ANSWER_TAG = re.compile(r"<(?P<end>/?)answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\boxed\{|\{|\}")
_MAX_CHARS = 400  # of one number; a model that repeats a digit for ever has not given one


def find_answer(text: str) -> str:
    """The part of a text that holds its final answer.

    In this order: the content of the last `\\boxed{...}`; of the last `<answer>...</answer>`; what follows
    the last `####` on its line; the whole text where none of these marks is present.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tagged = _last_tagged(text)
    if tagged is not None:
        return tagged.strip()
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().split("\n", 1)[0].strip()
    return text.strip()


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None where there is none.

    Reads thousands separators, decimals, exponents, `a/b` and `\\frac{a}{b}`; skips currency and percent
    signs (50% is 50). A division by zero is no number.
    """
    last = None
    for match in _NUMBER.finditer(_plain(text)):
        last = match
    return None if last is None else _value(last)


def as_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, up to currency, percent and a last period."""
    plain = _plain(text).strip().removesuffix(".").removesuffix("%").strip()
    match = _NUMBER.fullmatch(plain)
    return None if match is None else _value(match)


def _plain(text: str) -> str:
    """The text with one way to write a minus, a fraction and a separator, and without currency signs."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%")
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    text = _CURRENCY_AFTER_SIGN.sub(r"\1-", text)
    return re.sub(r"\\?[$€£]", " ", text)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > _MAX_CHARS:
        return None
    value = Fraction(match["top"].replace(",", ""))
    if match["bottom"]:
        bottom = Fraction(match["bottom"].replace(",", ""))
        if bottom == 0:
            return None
        value /= bottom
    return -value if match["sign"] == "-" else value


def _last_boxed(text: str) -> str | None:
    """The content of the `\\boxed{...}` that closes last, inner braces and all; None where none is closed."""
    content = None
    open_braces: list[int | None] = []  # where the content of a box begins; None for any other brace
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            open_braces.append(None if brace.group() == "{" else brace.end())
        elif open_braces and (start := open_braces.pop()) is not None:
            content = text[start : brace.start()]
    return content


def _last_tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`; None where none is closed."""
    content = None
    start: int | None = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag["end"]:
            start = tag.end()
        elif start is not None:
            content, start = text[start : tag.start()], None
    return content
