"""Compare by pairs: a ratio is never made from two sweeps that ran one after the other.

A pair is one block on bf16 and one on the variant, with the same prompts, close in time. Drift of the machine hits
both, so the ratio within a pair is steadier than either figure. The pairs' log ratios give a t interval.
"""

import math
from collections.abc import Sequence

from qserve.artifacts import Ratio, Verdict

# two-sided 95 % quantiles of Student's t by degrees of freedom (any statistics handbook); 1.96 above 30
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t_95(df: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return T_95[df - 1] if df <= len(T_95) else 1.96


def ratio(pairs: Sequence[tuple[float | None, float | None]], *, higher_is_faster: bool) -> Ratio | None:
    """variant / bf16 from (variant, bf16) values of each pair; None where no pair has both.

    With one pair there is no interval, and the verdict is `unresolved`.
    """
    logs = [math.log(v / b) for v, b in pairs if v and b]
    if not logs:
        return None
    mean = math.fsum(logs) / len(logs)
    if len(logs) < 2:
        return Ratio(value=math.exp(mean), low=None, high=None, pairs=1, verdict="unresolved")
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    half = t_95(len(logs) - 1) * spread / math.sqrt(len(logs))
    low, high = math.exp(mean - half), math.exp(mean + half)
    verdict = _verdict(low, high) if higher_is_faster else _verdict(1 / high, 1 / low)
    return Ratio(value=math.exp(mean), low=low, high=high, pairs=len(logs), verdict=verdict)


def _verdict(low: float, high: float) -> Verdict:
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "unresolved"
