"""Student's t at any level and any degrees of freedom, and how many pairs a question needs.

With T = sqrt(df) tan(a), P(|T| < t) is the integral of cos(a)^(df - 1) from 0 to a over the one from 0 to pi / 2: a
smooth function on a short range, so a plain sum is exact enough (checked against the tables to 0.1 %).
"""

import math
from functools import cache

import numpy as np

STEPS = 20_001
POWER_Z = 0.842  # normal quantile of 80 %: the chance with which the asked number of pairs gives an answer
MOST_PAIRS = 10_000


@cache
def t_quantile(confidence: float, df: float) -> float:
    """t with P(|T| < t) = confidence. `df` may be fractional (Welch), 1 at least; above 1,000 it is taken as 1,000."""
    angle = np.linspace(0, math.pi / 2, STEPS)
    density = np.cos(angle) ** (min(max(df, 1.0), 1000.0) - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    found = float(np.interp(confidence, mass / mass[-1], angle))
    return math.sqrt(min(max(df, 1.0), 1000.0)) * math.tan(found)


def samples_needed(deviation: float, precision: float, confidence: float) -> int:
    """The smallest n >= 2 for which a mean of n values with that standard deviation is known to `precision`, with 80 %
    power: (t + z) deviation / sqrt(n) <= precision."""
    if deviation <= 0 or precision <= 0:
        return 2
    low, high = 2, MOST_PAIRS
    while low < high:  # what is needed falls with n, so the first n that is enough can be halved in on
        n = (low + high) // 2
        enough = (t_quantile(confidence, n - 1) + POWER_Z) * deviation / precision <= math.sqrt(n)
        low, high = (low, n) if enough else (n + 1, high)
    return low
