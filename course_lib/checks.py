"""What a function says to a value that it can't take: what was expected, and what came."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int, numpy's whole numbers among them; else TypeError, too small ValueError.

    >>> whole("steps", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def number(name: str, value: Any) -> float:
    """A finite number, as it came; else TypeError, for infinity and NaN ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def one_of(name: str, value: Any, allowed: Iterable) -> None:
    """Raise ValueError for a value that isn't among those allowed."""
    allowed = tuple(allowed)
    if type(value) not in {type(each) for each in allowed} or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
