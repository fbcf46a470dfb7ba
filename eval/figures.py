"""How a figure is written: rounded once, here, with its unit. Unknown (None) is `unknown`, never 0."""

import math

from qserve import rounding
from qserve.artifacts import Estimate, Ratio
from qserve.eval.compare import t_95

UNKNOWN = "unknown"
NONE = "–"


def margin(se: float | None, windows: int) -> float | None:
    """Half-width of the 95 % interval of a mean over `windows` windows; None where the error is not known."""
    if se is None or windows < 2:
        return None
    return se * t_95(windows - 1)


def significant(value: float, digits: int = 3) -> str:
    """As of `rounding.significant`; `unknown` where it is not finite."""
    return rounding.significant(value, digits) if math.isfinite(value) else UNKNOWN


def ratio(value: float) -> str:
    """Two decimals; below 0.1 two significant digits, so that 0.055 does not become 0.06."""
    return f"{value:.2f}" if value >= 0.1 else significant(value, 2)


def interval(item: Ratio) -> str:
    """`1.43 [1.38, 1.49]`, or the value and how many pairs it came from where there is no interval."""
    if item.low is None or item.high is None:
        return f"{ratio(item.value)} [no interval, {count(item.pairs, 'pair')}]"
    return f"{ratio(item.value)} [{ratio(item.low)}, {ratio(item.high)}]"


def estimate(item: Estimate | None, scale: float = 1.0, unit: str = "") -> str:
    """`6.25 ± 0.31`: as many decimals as the standard error can carry, and three digits of the value at least, since
    variants are compared with each other on the same text. A missing error is said, not hidden."""
    if item is None or not math.isfinite(item.value):
        return UNKNOWN
    value = item.value * scale
    if item.se is None:
        return f"{significant(value)}{unit} (± {UNKNOWN})"
    error = item.se * scale
    if error <= 0 or not math.isfinite(error):
        return f"{significant(value)}{unit} ± {significant(error, 1)}"
    exponent = math.floor(math.log10(error))
    decimals = max(0, -exponent + (1 if error / 10**exponent < 3.5 else 0))
    if value:
        decimals = max(decimals, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}{unit}"


def share_range(value: float, within: tuple[float, float]) -> str:
    """`0.412 [0.345, 0.482]`: a share with its 95 % interval."""
    return f"{value:.3f} [{within[0]:.3f}, {within[1]:.3f}]"


def signed(item: Estimate) -> str:
    """A difference as `estimate` has it, with its sign."""
    return f"+{estimate(item)}" if item.value > 0 else estimate(item).replace("-", "−", 1)


def size(value_bytes: int | None) -> str:
    """Decimal megabytes, gigabytes from 1 GB on."""
    return UNKNOWN if value_bytes is None else rounding.size(value_bytes)


def duration(value_s: float | None) -> str:
    """Milliseconds below one second, minutes from three minutes on."""
    if value_s is None:
        return UNKNOWN
    if 0 < value_s < 1:
        return f"{significant(value_s * 1e3)} ms"
    return f"{significant(value_s)} s" if value_s < 180 else f"{significant(value_s / 60, 2)} min"


def share(value: float | None) -> str:
    """A share of one, in percent."""
    return UNKNOWN if value is None else f"{significant(value * 100, 2)} %"


def number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else significant(value)


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(items: list[str] | tuple[str, ...], word: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f"{', '.join(items[:-1])} {word} {items[-1]}" if len(items) > 1 else "".join(items)
