"""How a number is written for people: a few significant digits, decimal units."""

import math


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits of a finite value, all of the integer part, thousands with commas: 0.0121, 1,234."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def size(value_bytes: float) -> str:
    """Decimal megabytes, gigabytes from 1 GB on."""
    return f"{significant(value_bytes / 1e9)} GB" if value_bytes >= 1e9 else f"{significant(value_bytes / 1e6)} MB"
