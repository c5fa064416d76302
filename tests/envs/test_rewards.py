import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.envs.rewards import COMPONENTS, exact, judge, last_number, number_only, numbers_in


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7", ["7"]),
        ("The answer is 7.", ["7"]),
        ("3 + 4 = 7", ["3", "4", "7"]),
        ("-5", ["-5"]),
        ("it is \u22125", ["-5"]),
        ("3-4", ["3", "4"]),
        ("3 - 4", ["3", "4"]),
        ("(3)-4", ["3", "4"]),
        ("x-4", ["4"]),
        ("answer:-4", ["-4"]),
        ("- 4 apples", ["4"]),
        ("+4", ["+4"]),
        ("1,234", ["1234"]),
        ("1,234,567.50", ["1234567.50"]),
        ("12,34", ["12", "34"]),
        ("1,2345", ["1", "2345"]),
        ("3, 4", ["3", "4"]),
        ("0,123", ["0", "123"]),
        ("3.50", ["3.50"]),
        (".5", [".5"]),
        ("7..", ["7"]),
        ("$7", ["7"]),
        ("7%", ["7"]),
        ("\\boxed{7}", ["7"]),
        ("**7**", ["7"]),
        ("2e3", ["2e3"]),
        ("2e3rd", ["2", "3"]),
        ("1/3", ["1", "3"]),
        ("\u0661\u0662", ["\u0661\u0662"]),
        ("\uff17\uff0e\uff15", ["\uff17.\uff15"]),
        ("x\u00b2 = 9", ["9"]),
        ("\u2460", []),
        ("seven", []),
        ("", []),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, numbers: list[str]) -> None:
    assert numbers_in(text) == numbers


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("7", "7", 1.0),
        (7, "3 + 4 = 7.", 1.0),
        (7, "7.0", 1.0),
        (7.0, "07", 1.0),
        (7, "7, or maybe 8", 0.0),
        (7, "17", 0.0),
        (7, "-7", 0.0),
        ("-7", "\u22127", 1.0),
        ("1,234", "1234", 1.0),
        (1234, "It is 1,234.", 1.0),
        (0.1, "0.1", 1.0),
        (0.1, "0.10000000000000001", 0.0),
        (12, "\u0661\u0662", 1.0),
        (0, "-0", 1.0),
        (2000, "2e3", 1.0),
        (10**30 + 1, str(10**30 + 1), 1.0),
        (10**30 + 1, str(10**30), 0.0),
    ],
)
def test_the_last_number_decides(gold: Any, text: str, score: float) -> None:
    assert last_number(gold=gold, prediction=text) == score


@pytest.mark.parametrize(
    ("text", "is_exact", "is_number"),
    [
        ("7", 1.0, 1.0),
        (" 7.\n", 1.0, 1.0),
        ("7.0", 1.0, 1.0),
        ("8", 0.0, 1.0),
        ("7..", 0.0, 0.0),
        ("7!", 0.0, 0.0),
        ("The answer is 7", 0.0, 0.0),
        ("7 7", 0.0, 0.0),
        ("", 0.0, 0.0),
        (".", 0.0, 0.0),
    ],
)
def test_exact_and_format_look_at_the_whole_text(text: str, is_exact: float, is_number: float) -> None:
    assert exact(gold=7, prediction=text) == is_exact
    assert number_only(gold=7, prediction=text) == is_number


def test_the_reward_is_the_weighted_sum_and_every_component_is_kept() -> None:
    reward, parts = judge(gold=7, prediction="8", weights={"last_number": 1.0, "exact": 0.5, "format": 0.25})
    assert (reward, parts) == (0.25, {"last_number": 0.0, "exact": 0.0, "format": 1.0})
    reward, parts = judge(gold=7, prediction="so 7", weights={"last_number": 2.0})
    assert (reward, parts) == (2.0, {"last_number": 1.0, "exact": 0.0, "format": 0.0})
    with pytest.raises(ValueError, match="'style'"):
        judge(gold=7, prediction="7", weights={"style": 1.0})


@pytest.mark.parametrize("gold", ["seven", "", "1/3", None, True, float("nan"), float("inf"), "nan", "7 or 8", object()])
@pytest.mark.parametrize("score", [last_number, exact])
def test_a_gold_answer_that_is_no_number_is_an_error(score: Callable[..., float], gold: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        score(gold=gold, prediction="7")


def test_gold_and_prediction_cannot_be_exchanged() -> None:
    for score in COMPONENTS.values():
        with pytest.raises(TypeError):
            score("7", "8")


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "[[[[", "\U0001f600", "x" * 10_000, "9" * 100_000, "-" * 10_000, "1," * 50_000, "\ud800", "NaN", "1e999"],
)
def test_nonsense_scores_nothing_and_raises_nothing(text: str) -> None:
    reward, parts = judge(gold=7, prediction=text, weights={"last_number": 1.0, "exact": 1.0})
    assert reward == 0.0
    assert all(part in (0.0, 1.0) for part in parts.values())


@given(st.text())
def test_any_text_has_a_finite_score(text: str) -> None:
    reward, _ = judge(gold=7, prediction=text, weights=dict.fromkeys(COMPONENTS, 1.0))
    assert math.isfinite(reward)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=3))
def test_every_number_is_found_again(number: Decimal) -> None:
    assert last_number(gold=number, prediction=f"First 1, then {number:,}.") == 1.0
    assert exact(gold=number, prediction=f"{number}") == 1.0
