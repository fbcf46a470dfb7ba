"""Draw charts as inline SVG: an xy plot with intervals, and bars. No library, no script, no colour on its own.

A series has a slot, which fixes its colour (Okabe-Ito, in report.css) and the shape of its marks. A mark that is not
valid is hollow and no line goes through it. Pixels are CSS pixels at the width of a phone, so that text stays readable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from qserve.eval import figures
from qserve.eval.labels import Box, free, spread, wide
from qserve.eval.markup import Safe, el

WIDTH, HEIGHT = 380, 300
LEFT, TOP, BOTTOM = 50, 30, 46


@dataclass(frozen=True)
class Mark:
    """One point. Intervals are (low, high); None where there is none."""

    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None
    valid: bool = True
    says: str = ""  # shown on hover, read aloud


@dataclass(frozen=True)
class Series:
    name: str
    slot: int
    marks: tuple[Mark, ...]
    label: str  # the name, short enough to stand beside a mark


@dataclass(frozen=True)
class Plot:
    """Words and axes of one xy plot. `x_ticks` None: chosen. `x_line`: where a reference line stands."""

    title: str
    describe: str
    x_title: str
    y_title: str
    joined: bool = True
    x_ticks: tuple[float, ...] | None = None
    x_log: bool = False
    y_log: bool = False
    x_line: float | None = None


@dataclass(frozen=True)
class Scale:
    """Value -> pixel."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        a, b, v = (math.log(t) if self.log else t for t in (self.low, self.high, max(value, self.low)))
        return (self.start + self.end) / 2 if a == b else self.start + (v - a) / (b - a) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


def xy(plot: Plot, series: Sequence[Series]) -> Safe | None:
    """Marks with their intervals, direct labels, axes; None where there is nothing to draw."""
    marks = [mark for one in series for mark in one.marks]
    if not marks:
        return None
    right = WIDTH - (max(wide(one.label) for one in series) + 22 if plot.joined else 14)
    x = _x_scale(plot, marks, right)
    y = _y_scale(plot, marks)
    if plot.joined:
        at = [x(tick) for tick in plot.x_ticks or ()]
        room = 0.4 * min((b - a for a, b in pairwise(at)), default=90.0)
        series = [_dodged(one, i, len(series), x, room) for i, one in enumerate(series)]
    body = [_axes(plot, x, y, right)]
    body += [_line(one, x, y) for one in series if plot.joined]
    body += [_marks(one, x, y) for one in series]
    body.append(_end_labels(series, x, y, right) if plot.joined else _near_labels(series, x, y))
    return svg(plot.title, plot.describe, HEIGHT, body)


def svg(title: str, describe: str, height: float, body: Sequence[Safe]) -> Safe:
    label = f"{title}. {describe}"
    box = f"0 0 {WIDTH} {figures.significant(height, 3)}"
    return el("svg", el("title", title), el("desc", describe), *body, view_box=box, role="img", aria_label=label)


# --- scales ----------
def _x_scale(plot: Plot, marks: Sequence[Mark], right: float) -> Scale:
    ends = [v for m in marks for v in (m.x, *(m.x_interval or ()))]
    if plot.x_ticks:
        inset = 22
        return Scale(min(plot.x_ticks), max(plot.x_ticks), LEFT + inset, right - inset, log=plot.x_log)
    if plot.x_line is not None:
        ends.append(plot.x_line)
    low, high = min(ends), max(ends)
    room = (high / low) ** 0.12 if plot.x_log else (high - low or 1) * 0.12
    low, high = (low / room, high * room) if plot.x_log else (low - room, high + room)
    return Scale(low, high, LEFT, right, log=plot.x_log)


def _y_scale(plot: Plot, marks: Sequence[Mark]) -> Scale:
    ends = [v for m in marks for v in (m.y, *(m.y_interval or ()))]
    low, high = min(ends), max(ends)
    if plot.y_log:
        low, high = low * 0.8, high * 1.25
    else:
        low, high = 0.0, _even_top(high)
    return Scale(low, high, HEIGHT - BOTTOM, TOP, log=plot.y_log)


def _even_step(high: float) -> float:
    raw = high / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw)


def _even_top(high: float) -> float:
    if high <= 0:
        return 1.0
    step = _even_step(high)
    return math.ceil(high / step - 1e-9) * step


def _even_ticks(low: float, high: float) -> list[float]:
    step = _even_step(high - low)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten while they are few, else powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return fine if len(fine) <= 6 else [t for t in fine if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-9)]


# --- parts ----------
def _axes(plot: Plot, x: Scale, y: Scale, right: float) -> Safe:
    parts = [el("text", plot.y_title, x=0, y=12, cls="axis")]
    for value in y.ticks():
        at = y(value)
        parts.append(el("line", x1=LEFT, x2=right, y1=at, y2=at, cls="grid"))
        parts.append(el("text", _tick(value), x=LEFT - 8, y=at + 4, cls="tick end"))
    last = -math.inf
    for value in plot.x_ticks or x.ticks():
        at, half = x(value), wide(_tick(value)) / 2
        parts.append(el("line", x1=at, x2=at, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, cls="base"))
        if at - half > last:
            parts.append(el("text", _tick(value), x=at, y=HEIGHT - BOTTOM + 18, cls="tick mid"))
            last = at + half + 4
    parts.append(el("line", x1=LEFT, x2=right, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, cls="base"))
    parts.append(el("text", plot.x_title, x=(LEFT + right) / 2, y=HEIGHT - 6, cls="axis mid"))
    if plot.x_line is not None:
        parts.append(el("line", x1=x(plot.x_line), x2=x(plot.x_line), y1=TOP, y2=HEIGHT - BOTTOM, cls="reference"))
    return el("g", *parts, aria_hidden="true")


def _tick(value: float) -> str:
    return "0" if value == 0 else f"{value:,.10g}"


def _dodged(series: Series, i: int, n: int, x: Scale, room: float) -> Series:
    """Move a series aside by a few pixels, so that intervals at one concurrency do not hide each other."""
    pixels = (i - (n - 1) / 2) * min(6.0, room / n)
    return replace(series, marks=tuple(replace(m, x=_moved(x, m.x, pixels)) for m in series.marks))


def _moved(x: Scale, value: float, pixels: float) -> float:
    if x.low == x.high:  # one concurrency: it stands in the middle, whatever its value
        return value
    per_pixel = (math.log(x.high / x.low) if x.log else x.high - x.low) / (x.end - x.start)
    return value * math.exp(pixels * per_pixel) if x.log else value + pixels * per_pixel


def _line(series: Series, x: Scale, y: Scale) -> Safe:
    """Straight pieces between neighbours that are both valid."""
    pieces = [
        el("line", x1=x(a.x), y1=y(a.y), x2=x(b.x), y2=y(b.y), cls="join")
        for a, b in pairwise(series.marks)
        if a.valid and b.valid
    ]
    return el("g", *pieces, cls=f"s{series.slot}", aria_hidden="true")


def _marks(series: Series, x: Scale, y: Scale) -> Safe:
    parts = []
    for mark in series.marks:
        px, py = x(mark.x), y(mark.y)
        if mark.valid and mark.y_interval:
            low, high = (y(v) for v in mark.y_interval)
            parts.append(_whisker(f"M{px:.1f} {low:.1f}V{high:.1f}M{px - 4:.1f} {low:.1f}h8M{px - 4:.1f} {high:.1f}h8"))
        if mark.valid and mark.x_interval:
            low, high = (x(v) for v in mark.x_interval)
            parts.append(_whisker(f"M{low:.1f} {py:.1f}H{high:.1f}M{low:.1f} {py - 4:.1f}v8M{high:.1f} {py - 4:.1f}v8"))
        cls = "point" if mark.valid else "point hollow"
        parts.append(el("path", el("title", mark.says), d=shape(series.slot, px, py), cls=cls))
    return el("g", *parts, cls=f"s{series.slot}")


def _whisker(path: str) -> Safe:
    return el("path", d=path, cls="whisker")


def shape(slot: int, x: float, y: float) -> str:
    """The mark of a slot: circle, square, triangle, diamond, triangle down."""
    r = 4.5
    circle = f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
    square = f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8Z"
    triangle = f"M{x:.1f} {y - 5:.1f}l5 9h-10Z"
    diamond = f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5Z"
    down = f"M{x:.1f} {y + 5:.1f}l5 -9h-10Z"
    return (circle, square, triangle, diamond, down)[slot % 5]


# --- direct labels ----------
def _end_labels(series: Sequence[Series], x: Scale, y: Scale, right: float) -> Safe:
    """Names at the right end, in the order of the lines' ends, pushed apart, with a leader to the last mark."""
    ends = [(y(one.marks[-1].y), x(one.marks[-1].x), one) for one in series if one.marks]
    ends.sort(key=lambda end: end[0])
    places = spread([end[0] for end in ends], TOP + 4, HEIGHT - BOTTOM)
    parts = []
    for (py, px, one), at in zip(ends, places, strict=True):
        parts.append(el("path", d=f"M{px + 6:.1f} {py:.1f}L{right + 6:.1f} {at:.1f}", cls=f"leader s{one.slot}"))
        parts.append(el("text", el("title", one.name), one.label, x=right + 9, y=at + 4, cls="name"))
    return el("g", *parts, aria_hidden="true")


def _near_labels(series: Sequence[Series], x: Scale, y: Scale) -> Safe:
    """A name beside each mark, where it meets no other name and no mark."""
    marks = [(x(m.x), y(m.y), one) for one in series for m in one.marks]
    taken = [Box(px - 6, py - 6, px + 6, py + 6) for px, py, _ in marks]
    area = Box(LEFT, TOP - 10, WIDTH, HEIGHT - BOTTOM)
    parts = []
    for px, py, one in marks:
        box = free(px, py, wide(one.label), taken, area)
        taken.append(box)
        parts.append(el("text", el("title", one.name), one.label, x=box.left, y=box.bottom - 3, cls="name halo"))
    return el("g", *parts, aria_hidden="true")
