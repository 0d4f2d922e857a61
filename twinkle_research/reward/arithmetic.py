"""Arithmetic in text, worked out without running it: whole numbers, + - * /, parentheses."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 1000  # characters
MAX_DIGITS = 100  # of a number in the text
_TOKEN = re.compile(r"\s*(?:(\d+)|(.))", re.ASCII | re.DOTALL)
_SAME = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u22c5": "*"})
_PRIORITY = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}


class Expression(NamedTuple):
    value: Fraction
    numbers: list[int]  # those that stand in the text, in order


def evaluate(text: str) -> Expression:
    """The exact value. Raises ValueError, with the reason, for anything else than such an expression.

    No name is looked up and no code is run. Time and memory are bounded: the text is at most MAX_LENGTH long and there are no
    powers, so the value has no more digits than the text (Dijkstra's shunting yard: no recursion).
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    values: list[Fraction] = []
    operators: list[str] = []
    numbers: list[int] = []
    after_value = False  # whether a value has just ended, so that an operator must come
    for digits, sign in _TOKEN.findall(text.translate(_SAME).rstrip()):
        if (digits or sign == "(") and after_value:
            raise ValueError(f"{digits or sign!r} after a value")
        if digits:
            if len(digits) > MAX_DIGITS:
                raise ValueError(f"a number of more than {MAX_DIGITS} digits")
            numbers.append(int(digits))
            values.append(Fraction(numbers[-1]))
            after_value = True
        elif sign == "(" or (sign == "-" and not after_value):
            operators.append("(" if sign == "(" else "negative")
        elif sign == ")" and after_value:
            _apply_until(operators, values, lambda top: top == "(")
            if not operators:
                raise ValueError("')' without '('")
            operators.pop()
        elif sign in ("+", "-", "*", "/") and after_value:
            priority = _PRIORITY[sign]
            _apply_until(operators, values, lambda top, p=priority: top == "(" or _PRIORITY[top] < p)
            operators.append(sign)
            after_value = False
        else:
            raise ValueError(f"unexpected {sign!r}")
    if not after_value:
        raise ValueError("a value is missing")
    _apply_until(operators, values, lambda top: False)
    return Expression(values[0], numbers)


def _apply_until(operators: list[str], values: list[Fraction], stop) -> None:
    while operators and not stop(operators[-1]):
        operator = operators.pop()
        if operator == "(":
            raise ValueError("'(' without ')'")
        right = values.pop()
        if operator == "negative":
            values.append(-right)
            continue
        left = values.pop()
        if operator == "/" and right == 0:
            raise ValueError("division by zero")
        values.append({"+": left + right, "-": left - right, "*": left * right}[operator] if operator != "/" else left / right)
