"""Draw named groups of horizontal bars as inline SVG, on one scale from 0."""

from collections.abc import Sequence
from dataclasses import dataclass

from qserve.eval.charts import WIDTH, Scale, svg
from qserve.eval.labels import short, wide
from qserve.eval.markup import Safe, el, join


@dataclass(frozen=True)
class Bar:
    """One bar: parts (length, CSS class) side by side, what is written at its end, a tick (a peak, say), and the
    interval of its length."""

    parts: tuple[tuple[float, str], ...]
    text: str
    tick: float | None = None
    whisker: tuple[float, float] | None = None


def bars(
    title: str, describe: str, keys: Sequence[tuple[str, str]], groups: Sequence[tuple[str, Sequence[Bar]]]
) -> Safe:
    """Named groups of horizontal bars on one scale from 0. `keys`: (CSS class, meaning)."""
    longest = max((_length(bar) for _, group in groups for bar in group), default=0) or 1
    end = WIDTH - max((wide(b.text) for _, group in groups for b in group), default=0) - 10
    scale = Scale(0, longest, 0, end)
    body, top = [_keys(keys)], 44.0 if keys else 14.0
    for name, group in groups:
        body.append(el("text", el("title", name), short(name, 44), x=0, y=top, cls="name"))
        top += 7
        for bar in group:
            body.append(_bar(bar, scale, top))
            top += 15
        top += 20
    return svg(title, describe, top - 12, body)


def _length(bar: Bar) -> float:
    """How far it reaches, with all that is drawn on it."""
    return max(sum(length for length, _ in bar.parts), bar.tick or 0, bar.whisker[1] if bar.whisker else 0)


def _bar(bar: Bar, scale: Scale, top: float) -> Safe:
    parts, at = [], 0.0
    for length, cls in bar.parts:
        parts.append(el("rect", x=scale(at), y=top, width=scale(at + length) - scale(at), height=11, cls=cls))
        at += length
    if bar.tick is not None:
        parts.append(el("path", d=f"M{scale(bar.tick):.1f} {top - 2:.1f}v15", cls="peak"))
    if bar.whisker is not None:
        low, high = (scale(value) for value in bar.whisker)
        middle = f"M{low:.1f} {top + 5.5:.1f}H{high:.1f}"
        parts.append(el("path", d=f"{middle}M{low:.1f} {top + 2:.1f}v7M{high:.1f} {top + 2:.1f}v7", cls="spread"))
    ends = scale(_length(bar)) + 6
    return el("g", *parts, el("text", bar.text, x=ends, y=top + 10, cls="tick"))


def _keys(keys: Sequence[tuple[str, str]]) -> Safe:
    parts, left = [], 0.0
    for cls, meaning in keys:
        if cls == "peak":
            parts.append(el("path", d=f"M{left + 5:.1f} 4v14", cls=cls))
        else:
            parts.append(el("rect", x=left, y=5, width=11, height=11, cls=cls))
        parts.append(el("text", meaning, x=left + 16, y=15, cls="tick"))
        left += 16 + wide(meaning) + 10
    return join(*parts)
