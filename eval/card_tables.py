"""The two tables of a model card: speed by load, and what it costs and saves."""

from qserve.artifacts import Estimate, Point, VariantResult
from qserve.eval import figures, table
from qserve.eval.figures import NONE
from qserve.eval.publishable import Measured
from qserve.eval.table import Cell, Table
from qserve.eval.tasks import against_bf16


def tables(measured: Measured) -> tuple[Table, ...]:
    return tuple(table for table in (_speed(measured), _costs(measured)) if table.rows)


def _speed(measured: Measured) -> Table:
    headers = ("Requests at once", "Output tok/s", "of bf16", "Throughput ÷ bf16", "First token ÷ bf16", "Next ÷ bf16")
    return Table("Speed", headers, tuple(_row(point) for point in measured.result.points), names=0)


def _row(point: Point) -> tuple[Cell, ...]:
    speeds = (point.variant.output_tokens_per_s, point.baseline.output_tokens_per_s)
    ratios = (point.throughput, point.ttft, point.itl)
    return (
        Cell(str(point.concurrency)),
        *(Cell(figures.number(speed)) for speed in speeds),
        *(table.against_bf16(point, item, False) for item in ratios),
    )


def _costs(measured: Measured) -> Table:
    own, base = measured.result, measured.report.baseline
    rows = [*_quality(own, base), *_tasks(own, base), *_sizes(own, base)]
    return Table("Quality and size", ("", own.name, "bf16", "÷ bf16"), tuple(rows))


def _quality(own: VariantResult, base: VariantResult) -> list[tuple[Cell, ...]]:
    q, b = own.quality, base.quality
    if q is None:
        return []
    beside = b.perplexity if b and b.tokens == q.tokens else None  # of other tokens it is another quantity
    values = (
        ("Perplexity", q.perplexity, beside, q.perplexity_ratio, 1, ""),
        ("KL divergence to bf16, nats", q.kl, None, None, 1, ""),
        ("Top-1 token as bf16", q.top1, None, None, 100, " %"),
    )
    return [
        (Cell(name), Cell(figures.estimate(value, scale, unit)), _or_none(other), _or_none(ratio))
        for name, value, other, ratio, scale, unit in values
        if value is not None
    ]


def _tasks(own: VariantResult, base: VariantResult) -> list[tuple[Cell, ...]]:
    """A score, bf16's, and whether the difference is one."""
    theirs = base.quality.tasks if base.quality else {}
    rows: list[tuple[Cell, ...]] = []
    for name, task in (own.quality.tasks if own.quality else {}).items():
        if task.score is None:
            continue
        beside = theirs[name].score if name in theirs else None
        verdict = against_bf16(task)
        under = f"{figures.signed(task.delta)} on the same items, {verdict}" if task.delta and verdict else None
        score = Cell(figures.estimate(task.score), under=under)
        rows.append((Cell(f"{name}, {task.metric}"), score, _or_none(beside), Cell(NONE)))
    return rows


def _or_none(item: Estimate | None) -> Cell:
    return Cell(NONE if item is None else figures.estimate(item))


def _sizes(own: VariantResult, base: VariantResult) -> list[tuple[Cell, ...]]:
    m, b = own.memory, base.memory
    if m is None or b is None:
        return []
    pairs = (("Weights on disk", m.disk_bytes, b.disk_bytes), ("Peak memory of the server", m.peak_bytes, b.peak_bytes))
    return [
        (Cell(name), Cell(figures.size(one)), Cell(figures.size(two)), Cell(figures.ratio(one / two)))
        for name, one, two in pairs
        if one is not None and two
    ]
