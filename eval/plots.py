"""The charts of a report: throughput, time to first token, quality against speed, memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qserve.artifacts import LoadSummary, Point, Ratio, Report, VariantResult
from qserve.eval import figures
from qserve.eval.bars import Bar, bars
from qserve.eval.charts import Mark, Plot, Series, xy
from qserve.eval.findings import comparable, valid, verdict
from qserve.eval.labels import shorten
from qserve.eval.markup import Safe
from qserve.eval.table import concurrencies, everyone

WIDE_RANGE = 8  # largest over smallest at one concurrency from which a logarithmic axis is used


@dataclass(frozen=True)
class Chart:
    """`drawing` None: there is nothing to draw, and `caption` says why."""

    title: str
    caption: str
    drawing: Safe | None


NO_LOAD = Chart("Speed", "Not drawn: no load was measured.", None)
NO_QUALITY = Chart("Quality and speed", "Not drawn: no variant has both a KL and a valid ratio to bf16.", None)


def charts(report: Report) -> tuple[Chart, ...]:
    loads = concurrencies(report)
    if not loads:
        return (NO_LOAD, memory(report))
    drawn = [chart for c in loads if (chart := quality_and_speed(report, c)).drawing]
    quality = (drawn[0], drawn[-1]) if len(drawn) > 1 else tuple(drawn) or (NO_QUALITY,)
    return (throughput(report), first_token(report), *quality, memory(report))


# --- against concurrency ----------
def throughput(report: Report) -> Chart:
    series = _series(report, lambda load: load.output_tokens_per_s, _bar_of_throughput)
    return _against_concurrency(
        report,
        "Throughput",
        "Output tokens per second over all requests. Bars: the 95 % interval of the ratio to bf16.",
        "tokens/s",
        series,
    )


def first_token(report: Report) -> Chart:
    """p95 where every load carries it; else p50, and the caption says so."""
    loads = [p.variant for v in everyone(report) if v.status == "measured" for p in v.points if p.variant.valid]
    all_p95 = all(load.ttft_s.p95 is not None for load in loads)
    which = "p95" if all_p95 else "p50"
    why = "" if all_p95 else " The median is shown, because not every load has the 20 values that p95 needs."
    series = _series(report, lambda load: load.ttft_s.p95 if all_p95 else load.ttft_s.p50, lambda *_: None)
    return _against_concurrency(
        report,
        f"Time to first token, {which}",
        f"From sending a request to its first text.{why}",
        "seconds",
        series,
    )


def _series(
    report: Report,
    value: Callable[[LoadSummary], float | None],
    bar: Callable[[float, Point], tuple[float, float] | None],
) -> list[Series]:
    """One series a variant, bf16 first; loads without the value are left out."""
    found, labels = [], shorten([v.name for v in everyone(report)])
    for slot, variant in enumerate(everyone(report)):
        marks = []
        for point in sorted(variant.points, key=lambda p: p.concurrency):
            y = value(point.variant)
            if y is not None and y > 0:
                ok = point.variant.valid and variant.status == "measured"
                says = f"{variant.name} at concurrency {point.concurrency}: {figures.significant(y)}"
                says += (
                    "" if ok else f" (not valid: {point.variant.problem or variant.problem or 'no reason recorded'})"
                )
                marks.append(Mark(point.concurrency, y, y_interval=bar(y, point), valid=ok, says=says))
        if marks:
            found.append(Series(variant.name, slot, tuple(marks), labels[variant.name]))
    return found


def _bar_of_throughput(value: float, point: Point) -> tuple[float, float] | None:
    item = point.throughput
    if not valid(point) or item is None or item.low is None or item.high is None:
        return None
    return value * item.low / item.value, value * item.high / item.value


def _against_concurrency(report: Report, title: str, caption: str, unit: str, series: Sequence[Series]) -> Chart:
    marks = [mark for one in series for mark in one.marks]
    if not marks:
        return Chart(title, "Not drawn: no load gave this value.", None)
    log = max(_spread([m.y for m in marks if m.x == c]) for c in concurrencies(report)) > WIDE_RANGE
    plot = Plot(
        title=f"{title} against concurrency",
        describe="; ".join(mark.says for mark in marks),
        x_title="concurrent requests",
        y_title=f"{unit}, log scale" if log else unit,
        x_ticks=tuple(float(c) for c in concurrencies(report)),
        x_log=True,
        y_log=log,
    )
    return Chart(title, caption + _hollow(marks), xy(plot, series))


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) if values else 1.0


def _hollow(marks: Sequence[Mark]) -> str:
    return "" if all(m.valid for m in marks) else " Hollow marks are not valid: read them as a warning."


# --- quality against speed ----------
def quality_and_speed(report: Report, concurrency: int) -> Chart:
    """KL against the throughput ratio at one concurrency; right and down is better."""
    title = f"Quality and speed at concurrency {concurrency}"
    labels = shorten([v.name for v in everyone(report)])
    series = [
        Series(v.name, slot, (mark,), labels[v.name])
        for slot, v in enumerate(everyone(report))
        if (mark := _quality_mark(v, comparable(v).get(concurrency)))
    ]
    if not series:
        return Chart(title, NO_QUALITY.caption, None)
    ratios = [m.x for one in series for m in one.marks]
    log = max(*ratios, 1.0) / min(*ratios, 1.0) > 5
    plot = Plot(
        title=title,
        describe="; ".join(m.says for one in series for m in one.marks),
        x_title="tok/s ÷ bf16" + (", log scale" if log else ""),
        y_title="KL to bf16, nats",
        joined=False,
        x_log=log,
        x_line=1.0,
    )
    caption = "To the right is faster, lower is closer to bf16; the dashed line is bf16's speed. Bars: 95 % intervals."
    return Chart(title, caption, xy(plot, series))


def _quality_mark(variant: VariantResult, item: Ratio | None) -> Mark | None:
    quality = variant.quality
    if item is None or quality is None or quality.kl is None:
        return None
    half = figures.margin(quality.kl.se, quality.windows)
    kl = quality.kl.value
    return Mark(
        x=item.value,
        y=kl,
        x_interval=(item.low, item.high) if item.low is not None and item.high is not None else None,
        y_interval=(max(0.0, kl - half), kl + half) if half is not None else None,
        says=f"{variant.name}: {figures.interval(item)} {verdict(item)}, KL {figures.significant(kl)}",
    )


# --- memory ----------
def memory(report: Report) -> Chart:
    """Two bars a variant: weight files on disk; in memory, loaded weights and the KV reservation, with the peak."""
    title = "Disk and memory"
    groups = [(v.name, _memory_bars(v)) for v in everyone(report) if v.memory]
    if not groups:
        return Chart(title, "Not drawn: no memory was measured.", None)
    keys = [("disk", "on disk"), ("loaded", "loaded"), ("kv", "KV cache"), ("peak", "peak")]
    known = "; ".join(f"{name}: {', '.join(bar.text for bar in group)}" for name, group in groups)
    caption = "The KV cache is what the server sets aside, not what it uses. What is not known is not drawn."
    return Chart(title, caption, bars(title, known, keys, groups))


def _memory_bars(variant: VariantResult) -> tuple[Bar, ...]:
    m = variant.memory
    assert m is not None
    inside = [(m.loaded_bytes, "loaded"), (m.kv_bytes, "kv")]
    parts = tuple((float(n), cls) for n, cls in inside if n is not None)
    text = " + ".join(figures.size(n) for n, _ in inside)
    return (
        Bar(((float(m.disk_bytes), "disk"),), figures.size(m.disk_bytes)),
        Bar(parts, text, float(m.peak_bytes) if m.peak_bytes is not None else None),
    )
