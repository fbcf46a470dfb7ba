"""Intervals of shares and of paired right-or-wrong outcomes, which a value ± its standard error gets wrong where items
are few or nearly all alike."""

import math

Z_95 = 1.95996  # two-sided 95 % quantile of the normal distribution
POWER_Z = 0.842  # chance of 80 % that the asked number gives an answer
MOST_ITEMS = 100_000


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share seen in n items (E. B. Wilson, 1927): all that a score test would not reject."""
    squared = Z_95**2
    middle = (share + squared / (2 * n)) / (1 + squared / n)
    half = Z_95 / (1 + squared / n) * math.sqrt(share * (1 - share) / n + squared / (4 * n * n))
    return (0.0 if share <= 0 else middle - half), (1.0 if share >= 1 else middle + half)


def items_needed(share: float, limit: float) -> int | None:
    """Items with which Wilson's interval of a share like this one leaves the limit out, with 80 % power; None where no
    number does."""
    gap = abs(share - limit)
    if gap == 0:
        return None
    spread = Z_95 * math.sqrt(limit * (1 - limit)) + POWER_Z * math.sqrt(share * (1 - share))
    n = math.ceil((spread / gap) ** 2)
    return max(n, 2) if n <= MOST_ITEMS else None


def sign_test(won: int, lost: int) -> float:
    """Two-sided chance of a split at least as uneven as this one if either way is as likely (McNemar's exact test)."""
    n, few = won + lost, min(won, lost)
    ways: int = sum(math.comb(n, k) for k in range(few + 1))
    return min(1.0, 2 * ways / (1 << n))  # whole numbers: exact, however large
