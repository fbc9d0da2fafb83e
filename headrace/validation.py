"""Checks that refuse a value where it is made: each gives back the plain value to keep, or raises RequestError with value and limit.

Plain, because numpy's numbers and strings, and subclasses of Python's own, are what users compute with, and no encoder takes them.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from headrace.errors import RequestError


def integer(name: str, value: object, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    number = int(value)
    if not low <= number <= high:
        raise RequestError(f"{name}={shown(number)} is out of range: it must be from {low} to {high}")
    return number


def number(name: str, value: object, low: float, high: float) -> float:
    """A number from ``low`` to ``high``; an endless ``high`` allows whatever is finite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {value!r}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf  # an integer that no float can hold
    # What is not finite is out of range too; NaN fails every comparison.
    if not (low <= real <= high and real < math.inf):
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name}={shown(value)} is out of range: it must be {limits}")
    return real


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {value!r}")
    return value


def sequence(name: str, value: Any, most: int) -> tuple[Any, ...]:
    """The entries of a sequence, at most ``most``; None: none."""
    if value is None:
        return ()
    try:
        items = tuple(value)
    except TypeError:
        raise RequestError(f"{name} must be a sequence, not {type(value).__name__}") from None
    if len(items) > most:
        raise RequestError(f"{name} has {len(items)} entries; at most {most} are allowed")
    return items


def text(name: str, value: object, most: int) -> str:
    """A string of 1 to ``most`` characters, each of which text can hold."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must hold strings, not {type(value).__name__}")
    if not 0 < len(value) <= most:
        raise RequestError(f"a {name} string has {len(value)} characters; 1 to {most} are allowed")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RequestError(f"{name} string {value!a} has a lone surrogate: that is no character, and no text will ever hold it")
    return str(value)


def shown(value: object) -> str:
    """A number for a message, of an integer that is very long only its size: Python refuses to print one of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    return str(value)
