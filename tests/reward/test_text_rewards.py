"""Rewards that look at text alone. Right values are worked out by hand."""

import time
from fractions import Fraction

import pytest
from trajectories import sampled

from twinkle_research.errors import ConfigError, DataError
from twinkle_research.reward import (
    CountdownReward,
    ExactReward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    LengthReward,
    NumericReward,
)
from twinkle_research.reward.arithmetic import evaluate
from twinkle_research.reward.text import last_number

# --- exact and numeric --------------------------------------------------------------------------------------------


def test_exact_ignores_space_around_and_nothing_else() -> None:
    texts = [" 560\n", "560.", "056", "", "560 560"]
    assert ExactReward()([sampled(text, answer="560") for text in texts]) == [1, 0, 0, 0, 0]
    assert ExactReward()([sampled("7", answer=7)]) == [1]
    assert ExactReward()([sampled("paris", answer="Paris")]) == [0]
    assert ExactReward(ignore_case=True)([sampled("paris ", answer="Paris")]) == [1]


def test_a_row_without_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:7: reward=exact needs a column 'answer'; did you mean 'anwser'\?"):
        ExactReward()([sampled("x", row="rows.jsonl:7", anwser="x")])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7.", "7"),
        ("5-3", "3"),  # nobody wrote -3
        ("(1)-2", "2"),
        ("it is -3", "-3"),
        ("x=-3", "-3"),
        ("\u22127", "-7"),
        ("$1,234.50", "1234.50"),
        ("1, 2", "2"),
        ("1,2345", "2345"),
        ("about 3.0e2 metres", "300"),
        ("half is .5", "0.5"),
        ("12 apples and a2", "12"),
        ("\u7b54\u68485", "5"),
        ("1e999999999", "1"),  # no number with such an exponent is made
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Fraction(number)


def test_no_number() -> None:
    assert last_number("none here, v2 neither") is None


def test_numeric_within_tolerance() -> None:
    texts = ["so 7.0", "7.01", "seven", "7 or 8"]
    assert NumericReward()([sampled(text, answer="7") for text in texts]) == [1, 0, 0, 0]
    assert NumericReward(0.01)([sampled(text, answer="7") for text in texts]) == [1, 1, 0, 0]
    assert NumericReward()([sampled("0.1", answer=0.1), sampled("1,000", answer="1000")]) == [1, 1]
    with pytest.raises(DataError, match="rows.jsonl:1: reward=numeric needs a number as the answer, got 'many'"):
        NumericReward()([sampled("1", answer="many")])


# --- form -----------------------------------------------------------------------------------------------------------

THOUGHT = "<think>so\nit is</think> <answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (THOUGHT, 1),
        (f"\n{THOUGHT}\n", 1),
        ("<answer>4</answer><think>so</think>", 0),
        (f"{THOUGHT} and more", 0),
        (f"{THOUGHT}<answer>5</answer>", 0),
        ("<think><answer>3</answer></think><answer>4</answer>", 0),
        ("<think>so</think>", 0),
        ("<think>so<answer>4</answer>", 0),
    ],
)
def test_tags(text: str, right: int) -> None:
    assert FormatReward()([sampled(text)]) == [right]


def test_pattern_is_for_the_whole_completion() -> None:
    reward = FormatReward(pattern=r".*Answer: \d+")
    assert reward([sampled("Well,\nAnswer: 12"), sampled("Answer: 12."), sampled("Answer: x")]) == [1, 0, 0]
    with pytest.raises(ConfigError, match="is no regular expression"):
        FormatReward(pattern="(")


# --- GSM8K ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "form"),
    [
        ("9 + 9 = 18\n#### 18", 1, 1, 1),
        ("#### $1,018", 0, 0, 1),
        ("#### 18.000001", 1, 1, 1),
        (r"so \boxed{18}", 1, 1, 1),
        (r"so \boxed{18 \text{ dollars}}", 1, 1, 1),
        (r"so \boxed{18/2}", 0, 0, 0),
        (r"\boxed{18} no, #### 17", 0, 0, 1),
        ("#### 17, no: #### 18", 1, 1, 1),
        ("it is 18", 0, 1, 0),
        ("it is 18 of 20", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_gsm8k(text: str, strict: int, flexible: int, form: int) -> None:
    for columns in ({"answer": "18"}, {"ground_truth": "It is so.\n#### 18"}):
        assert GSM8KAccuracyReward()([sampled(text, **columns)]) == [strict]
        assert GSM8KAccuracyReward(flexible=True)([sampled(text, **columns)]) == [flexible]
    partly = GSM8KAccuracyReward(format_score=0.1)([sampled(text, answer="18")])
    assert partly == [1.0 if strict else 0.1 if form else 0.0]
    assert GSM8KFormatReward()([sampled(text)]) == [form]


# --- length ---------------------------------------------------------------------------------------------------------


def test_soft_overlong_punishment() -> None:
    """DAPO, equation 13, with L_max 100 and L_cache 20: 0 to 80, then (80 - n) / 20, then -1."""
    reward = LengthReward(100, 20)
    lengths = [0, 80, 81, 90, 100, 101, 500]
    assert reward([sampled("x", num_tokens=n) for n in lengths]) == [0, 0, -0.05, -0.5, -1, -1, -1]
    assert LengthReward(20480).cache == 4096  # the paper's own figures
    assert LengthReward(64).cache == 13


def test_linear_length_penalty() -> None:
    assert LengthReward(10, kind="linear")([sampled("x", num_tokens=n) for n in (0, 5, 10, 20)]) == [0, -0.5, -1, -1]


def test_length_refuses_what_cannot_be() -> None:
    for arguments, reason in [
        (((None,), {}), "max_tokens >= 1"),
        (((10, 11), {}), r"cache=11 must be in \[1, max_tokens=10\]"),
        (((10, 5), {"kind": "linear"}), "no effect"),
        (((10,), {"kind": "linea"}), "did you mean 'linear'"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            LengthReward(*arguments[0], **arguments[1])
    without = {k: v for k, v in sampled("x").items() if k != "num_tokens"}
    with pytest.raises(DataError, match="rows.jsonl:1: reward=length needs 'num_tokens'"):
        LengthReward(10)([without])


# --- arithmetic and countdown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+2", 4),
        ("(1+2)*3/4", Fraction(9, 4)),
        ("8 - 3 - 2", 3),
        ("8/4/2", 1),
        ("2-3*4", -10),
        ("-2*-3", 6),
        ("-(2+3)", -5),
        ("2*-(3)", -6),
        ("((((7))))", 7),
        ("3 \u00d7 4 \u00f7 2 \u2212 1", 5),
        ("1/3*3", 1),  # exact
    ],
)
def test_arithmetic(text: str, value: Fraction) -> None:
    assert evaluate(text).value == value


@pytest.mark.parametrize(
    "text",
    ["", "1/0", "1//2", "2**3", "9**9**9", "9^9", "()", "(1", "1)", "1 2", "2(3)", "1+", "*1", "a", "1e5", "0x1", "1_0", "\u0661"]
    + ["__import__('os').system('touch M')", "().__class__.__bases__", "(" * 10**5 + "1" + ")" * 10**5, "9" * 101, "1+" * 10**6],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_at_once(text: str) -> None:
    """Case S35: no code runs, and nothing takes long."""
    start = time.perf_counter()
    with pytest.raises(ValueError):
        evaluate(text)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("(3 + 4) * 5", 1.0),
        ("5*(4+3) = 35", 1.0),
        ("I try things.\n<answer> (4+3)*5 </answer> Done.", 1.0),
        ("<answer>1</answer> no: <answer>(4+3)*5</answer>", 1.0),
        ("First 3+4.\n\n(3+4)*5\n\n", 1.0),
        ("3 + 4 * 5", 0.2),  # the right numbers, another value
        ("7 * 5", 0.0),
        ("(3 + 4) * 5 + 3 - 3", 0.0),
        ("35", 0.0),
        ("__import__('os')", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(text: str, score: float) -> None:
    assert CountdownReward(format_score=0.2)([sampled(text, numbers=[5, 3, 4], target=35)]) == [score]


def test_countdown_needs_numbers_and_target() -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: reward=countdown needs a column 'numbers'"):
        CountdownReward()([sampled("1", target=3)])
    with pytest.raises(DataError, match="rows.jsonl:1: reward=countdown needs 'numbers', a list of whole numbers"):
        CountdownReward()([sampled("1", numbers="1 2", target=3)])
