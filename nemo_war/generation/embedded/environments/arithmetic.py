"""Exact arithmetic on text a model wrote: numbers, + - * / and parentheses.

A recursive-descent reader, as nothing of Python may be reachable from a model's
text. There are no powers and the text is bounded, hence so are numbers and depth.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 120
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])")


def evaluate(text: str) -> Fraction:
    """The value of an expression; what follows an `=` is ignored, as models write it.

    Raises:
        ValueError: the text is no expression, is too long, or divides by zero.
    """
    expression = text.split("=", 1)[0].strip()
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    tokens = _tokens(expression)
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"unexpected {tokens[-1]}")
    return value


def show(value: Fraction) -> str:
    """A number as a person writes it: whole, or with at most six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    whole, decimals = divmod(round(abs(value) * 10**6), 10**6)
    digits = f"{whole}.{decimals:06d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 and digits != "0" else digits


def _tokens(expression: str) -> list[str]:
    """The tokens in reverse, so that the next one is popped from the end."""
    tokens: list[str] = []
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"unexpected {expression[at:].lstrip()[:1]}")
        tokens.append(found.group(1))
        at = found.end()
    return tokens[::-1]


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[-1] in "+-":
        value = value + _product(tokens) if tokens.pop() == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[-1] in "*/":
        if tokens.pop() == "*":
            value *= _factor(tokens)
        else:
            divisor = _factor(tokens)
            if divisor == 0:
                raise ValueError("division by zero")
            value /= divisor
    return value


def _factor(tokens: list[str]) -> Fraction:
    if not tokens:
        raise ValueError("something is missing")
    token = tokens.pop()
    if token in "+-":
        return _factor(tokens) if token == "+" else -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a parenthesis is not closed")
        return value
    if token in "*/)":
        raise ValueError(f"unexpected {token}")
    return Fraction(token)
