"""Bytes, FLOPs and seconds as text, and a number that was typed with its unit.

GB is 1e9 bytes, GiB is 2**30, and the text says which.
"""

import re

from course_lib.checks import number, whole

KiB, MiB, GiB = 2**10, 2**20, 2**30
TYPED = re.compile(
    r"(?P<sign>[-+−]?)"
    r"(?:(?P<grouped>[1-9]\d{0,2}(?:[,\s]\d{3})+(?:\.\d+)?)|(?P<plain>\d+(?:[.,]\d*)?|[.,]\d+))"
    r"(?P<power>e[-+−]?\d+)?(?![\d.,])\s*(?P<unit>.*)",
    re.IGNORECASE | re.DOTALL,
)


def _scaled(value: float, base: int, names: tuple[str, ...], digits: int) -> str:
    """`value` in the largest unit that leaves at least 1 before the point."""
    digits, power = whole("digits", digits, least=0), 0
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
    return _scaled(number("bytes", num_bytes), 1024, ("B", "KiB", "MiB", "GiB", "TiB"), digits)


def decimal(num_bytes: float, digits: int = 2) -> str:
    """Bytes in powers of 1,000.

    >>> decimal(84e9)
    '84.00 GB'
    """
    return _scaled(number("bytes", num_bytes), 1000, ("B", "kB", "MB", "GB", "TB"), digits)


def flops(count: float, digits: int = 2) -> str:
    """Floating-point operations; one multiply-add is two.

    >>> flops(2 * 32 * 1024 * 4096)
    '268.44 MFLOP'
    """
    names = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _scaled(number("FLOPs", count), 1000, names, digits)


def seconds(duration: float, digits: int = 2) -> str:
    """Seconds, downwards to nanoseconds.

    >>> seconds(0.0012)
    '1.20 ms'
    """
    value = number("seconds", duration)
    digits = whole("digits", digits, least=0)
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
