"""Bytes, FLOPs and seconds as text, and a number that was typed with its unit.

GB is 1e9 bytes, GiB is 2**30, and the text says which.
"""

import math
import numbers
import re

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
GB = 10**9
TYPED = re.compile(
    r"(?P<sign>[-+−]?)"
    r"(?:(?P<grouped>[1-9]\d{0,2}(?:[,\s]\d{3})+(?:\.\d+)?)|(?P<plain>\d+(?:[.,]\d*)?|[.,]\d+))"
    r"(?P<power>e[-+−]?\d+)?(?![\d.,])\s*(?P<unit>.*)",
    re.IGNORECASE | re.DOTALL,
)


def _number(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return value


def _check_digits(digits: int) -> None:
    if isinstance(digits, bool) or not isinstance(digits, int) or digits < 0:
        raise ValueError(f"digits must be a whole number of at least 0, got {digits!r}")


def _scaled(value: float, base: int, names: tuple[str, ...], digits: int) -> str:
    """`value` in the largest unit that leaves at least 1 before the point."""
    _check_digits(digits)
    power = 0
    while power < len(names) - 1 and round(abs(value) / base**power, digits) >= base:
        power += 1
    if power == 0 and value == int(value):
        return f"{int(value)} {names[0]}"
    return f"{value / base**power:.{digits}f} {names[power]}"


def binary(num_bytes: float, digits: int = 2) -> str:
    """Bytes in powers of 1,024.

    >>> binary(84e9)
    '78.23 GiB'
    """
    return _scaled(_number(num_bytes, "bytes"), 1024, ("B", "KiB", "MiB", "GiB", "TiB"), digits)


def decimal(num_bytes: float, digits: int = 2) -> str:
    """Bytes in powers of 1,000.

    >>> decimal(84e9)
    '84.00 GB'
    """
    return _scaled(_number(num_bytes, "bytes"), 1000, ("B", "kB", "MB", "GB", "TB"), digits)


def flops(count: float, digits: int = 2) -> str:
    """Floating-point operations; one multiply-add is two.

    >>> flops(2 * 32 * 1024 * 4096)
    '268.44 MFLOP'
    """
    names = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _scaled(_number(count, "FLOPs"), 1000, names, digits)


def seconds(duration: float, digits: int = 2) -> str:
    """Seconds, downwards to nanoseconds.

    >>> seconds(0.0012)
    '1.20 ms'
    """
    value = _number(duration, "seconds")
    _check_digits(digits)
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if round(abs(value) * factor, digits) >= 1 or value == 0:
            return f"{value * factor:.{digits}f} {name}"
    return f"{value * 1e9:.{digits}f} ns"


def typed(text: str) -> tuple[float, str]:
    """The number that a reader typed, and the unit after it, as it stands; else ValueError.

    A comma before three digits groups thousands, as a space does; any other is a decimal point.

    >>> typed("2,048 MB"), typed("3,5"), typed("25 %")
    ((2048.0, 'MB'), (3.5, ''), (25.0, '%'))
    """
    found = TYPED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a number is needed, got {text!r}")
    sign, grouped, plain, power, unit = found.groups(default="")
    digits = re.sub(r"[,\s]", "", grouped) or plain.replace(",", ".")
    return float((sign + digits + power).replace("−", "-")), unit
