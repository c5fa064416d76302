"""Scoring functions: pure, from the gold answer and the model's text to a number in [0, 1].

Owns how numbers are read from text and how named components become one reward. Refuses to own timeouts and failures:
a function here returns a finite number for any text whatever, and raises only when the gold answer itself is unusable.

Arguments are keyword-only, since a scorer called with gold and prediction exchanged is a wrong reward that nobody sees.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

# A minus counts as a sign only when nothing it could be subtracted from stands directly before it ("3-4" ends in 4).
# Digits are those of any script (`\d`); a comma groups thousands only when every group has three digits.
_SIGN = r"(?:(?<![\w.)\]])[-+])?"
_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"{_SIGN}(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\w))?")

_PLAIN = str.maketrans(
    {"\u2212": "-", "\uff0d": "-", "\uff0b": "+", "\uff0c": ",", "\uff0e": ".", "\u066b": ".", "\u066c": ","}
)
"""The other minus, plus, comma and point characters that language models write in numbers."""


def numbers_in(text: str) -> list[str]:
    """Return the numbers in a text, in order, as plain strings: "1,234.50 then \u22123." gives ["1234.50", "-3"]."""
    return [match.group().replace(",", "") for match in _NUMBER.finditer(text.translate(_PLAIN))]


def last_number(*, gold: Any, prediction: str) -> float:
    """Return 1.0 when the last number in the text equals the gold number, else 0.0.

    Decimals, signs, exponents, thousands separators, a trailing period and digits of other scripts are understood;
    fractions and number words are not. Equality is exact: "7.0" is 7, "0.33" is not 1/3.
    """
    target, found = _gold(gold), numbers_in(prediction)
    return float(bool(found) and Decimal(found[-1]) == target)


def exact(*, gold: Any, prediction: str) -> float:
    """Return 1.0 when the whole text is the gold number, apart from outer spaces and one trailing period, else 0.0."""
    target, found = _gold(gold), _bare_number(prediction)
    return float(found is not None and found == target)


def number_only(*, gold: Any, prediction: str) -> float:
    """Return 1.0 when the whole text is a number, right or wrong, with at most one trailing period, else 0.0."""
    del gold  # taken so that all components have one signature
    return float(_bare_number(prediction) is not None)


def judge(*, gold: Any, prediction: str, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the weighted sum of the named components, and every component before weighting.

    A component without a weight is computed all the same, for the logs. Raises ValueError for a weight without a component.
    """
    if unknown := set(weights) - set(COMPONENTS):
        raise ValueError(f"no reward component is called {sorted(unknown)[0]!r}; there are {', '.join(COMPONENTS)}")
    components = {name: score(gold=gold, prediction=prediction) for name, score in COMPONENTS.items()}
    return sum((weight * components[name] for name, weight in weights.items()), 0.0), components


def _gold(gold: Any) -> Decimal:
    """Read the gold answer, an int, float, Decimal or string; raise ValueError when it is not one finite number."""
    try:
        # A bool is an int for Python but a mistake here. str() of a float is its shortest exact spelling: 0.1 means 0.1.
        number = None if isinstance(gold, bool) else _bare_number(gold) if isinstance(gold, str) else Decimal(str(gold))
    except InvalidOperation:
        number = None
    if number is None or not number.is_finite():
        raise ValueError(f"the gold answer {gold!r} is not a number; give an int, a float, or a string such as '1,234.5'")
    return number


def _bare_number(text: str) -> Decimal | None:
    text = text.translate(_PLAIN).strip().removesuffix(".")
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


COMPONENTS: Mapping[str, Callable[..., float]] = {
    "last_number": last_number,
    "exact": exact,
    "format": number_only,
}
"""Reward components for number answers, each called as `score(gold=..., prediction=...)`."""
