"""How much better one format is than another, with its noise; all on the log scale, where ratios add.

Beside bf16 the pairs of the report say it. Two quantized formats never ran side by side: they are compared by way of
bf16, each by its own pairs, and the noise of both counts. Two formats at different concurrencies are compared by their
blocks, which are not paired.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qserve.artifacts import Point, Ratio
from qserve.decision import Interval
from qserve.eval.compare import t_95
from qserve.eval.student import t_quantile
from qserve.wishes import Objective


@dataclass(frozen=True)
class Gain:
    """log(better / worse): above 0 is better. `se` None: one pair or block only, so its noise is not known."""

    log: float
    se: float | None
    df: float  # degrees of freedom of `se`
    n: int  # pairs or blocks, of the side that has fewer

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        if self.se is None:
            return None
        half = t_quantile(confidence, self.df) * self.se if self.se else 0.0
        return self.log - half, self.log + half

    def beyond_noise(self, confidence: float = 0.95) -> bool:
        found = self.interval(confidence)
        return found is not None and found[0] > 0

    def may_exceed(self, log: float, confidence: float = 0.95) -> bool:
        found = self.interval(confidence)
        return found is None or found[1] > log


NO_GAIN = Gain(0.0, 0.0, math.inf, 1_000_000)


def ratio_of(point: Point, objective: Objective) -> Ratio | None:
    """The ratio that the objective is about."""
    return {"throughput": point.throughput, "ttft": point.ttft, "itl": point.itl}[objective]


def from_ratio(ratio: Ratio, objective: Objective) -> Gain:
    """Undo the t interval of `compare.ratio`. A latency is better when it is lower."""
    sign = 1.0 if objective == "throughput" else -1.0
    if ratio.low is None or ratio.high is None or ratio.pairs < 2:
        return Gain(sign * math.log(ratio.value), None, 0, ratio.pairs)
    df = ratio.pairs - 1
    se = (math.log(ratio.high) - math.log(ratio.low)) / 2 / t_95(df)
    return Gain(sign * math.log(ratio.value), se, df, ratio.pairs)


def difference(a: Gain, b: Gain) -> Gain:
    """a over b, where the two are independent; degrees of freedom by Welch and Satterthwaite."""
    if a.se is None or b.se is None:
        return Gain(a.log - b.log, None, 0, min(a.n, b.n))
    se = math.hypot(a.se, b.se)
    parts = a.se**4 / a.df + b.se**4 / b.df
    return Gain(a.log - b.log, se, se**4 / parts if parts else math.inf, min(a.n, b.n))


def of_blocks(speeds: Sequence[float]) -> Gain | None:
    """log of the mean speed of blocks; None without a block."""
    logs = np.log([speed for speed in speeds if speed > 0])
    if len(logs) == 0:
        return None
    if len(logs) == 1:
        return Gain(float(logs[0]), None, 0, 1)
    return Gain(float(logs.mean()), float(logs.std(ddof=1) / math.sqrt(len(logs))), len(logs) - 1, len(logs))


def speed(tokens_per_s: float | None, blocks: Sequence[float]) -> Interval | None:
    """Output tokens/s of one machine: the pooled value, with the interval between its blocks."""
    if tokens_per_s is None:
        return None
    found = of_blocks(blocks)
    interval = found.interval() if found else None
    if found is None or interval is None:
        return Interval(value=tokens_per_s, low=None, high=None)
    low, high = (tokens_per_s * math.exp(end - found.log) for end in interval)
    return Interval(value=tokens_per_s, low=low, high=high)
