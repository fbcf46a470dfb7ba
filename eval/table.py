"""The report's tables as values: what each cell says, whichever page it stands on. Rounded here, once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qserve.artifacts import LoadSummary, Point, Quantiles, Ratio, Report, VariantResult
from qserve.eval import figures
from qserve.eval.figures import NONE, UNKNOWN
from qserve.eval.findings import valid, verdict


@dataclass(frozen=True)
class Cell:
    """`verdict` and `under` stand below the text, `bad` marks a failure, `why` says why a figure is missing."""

    text: str
    verdict: str | None = None
    under: str | None = None
    bad: bool = False
    why: str | None = None


@dataclass(frozen=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    names: int = 1  # leading columns that are words, not figures


def concurrencies(report: Report) -> list[int]:
    """Every concurrency that any variant or bf16 was loaded with, ascending."""
    return sorted({p.concurrency for v in everyone(report) for p in v.points})


def everyone(report: Report) -> tuple[VariantResult, ...]:
    return (report.baseline, *report.variants)


def engines(report: Report) -> tuple[str, ...]:
    """Every engine that served something; bf16's first."""
    return tuple(dict.fromkeys(v.server.engine for v in everyone(report) if v.server))


# --- results: one row a variant ----------
def results(report: Report) -> Table:
    """bf16 first, then each variant: throughput with its ratio to bf16 at each concurrency, quality, size."""
    loads = concurrencies(report)
    several = len(engines(report)) > 1
    headers = ["Variant", *(["Engine"] if several else [])]
    for c in loads:
        headers += [f"tok/s at {c}", f"÷ bf16 at {c}"]
    headers += ["Perplexity", "Perplexity ÷ bf16", "KL to bf16, nats", "Top-1 as bf16", "Disk", "Bits/param"]
    rows = [
        (_identity(v), *_engine(v, several), *_speeds(v, report, loads), *_quality(v, v is report.baseline), *_size(v))
        for v in everyone(report)
    ]
    return Table("Results", tuple(headers), tuple(rows), names=2 if several else 1)


def _identity(variant: VariantResult) -> Cell:
    bad = variant.status != "measured"
    name = f"{variant.name} ({variant.status})" if bad else variant.name
    return Cell(name, under=variant.label, bad=bad, why=variant.problem)


def _engine(variant: VariantResult, several: bool) -> tuple[Cell, ...]:
    """A column of its own where a report has more than one."""
    return (Cell(variant.server.engine if variant.server else NONE),) if several else ()


def _size(variant: VariantResult) -> tuple[Cell, Cell]:
    disk = Cell(figures.size(variant.memory.disk_bytes if variant.memory else None))
    return disk, Cell(figures.number(variant.bits_per_parameter))


def _quality(variant: VariantResult, is_baseline: bool) -> tuple[Cell, ...]:
    quality = variant.quality
    if quality is None:
        offline = Cell(figures.estimate(variant.offline_perplexity), under="in transformers, not served")
        first = offline if variant.offline_perplexity else Cell(UNKNOWN, why="quality was not measured")
        return first, *(Cell(UNKNOWN, why="quality was not measured"),) * 3
    against = (quality.perplexity_ratio, quality.kl, quality.top1)
    if is_baseline:
        return Cell(figures.estimate(quality.perplexity)), *(Cell(NONE, why="the reference"),) * 3
    change, kl = (Cell(figures.estimate(item)) for item in against[:2])
    return Cell(figures.estimate(quality.perplexity)), change, kl, Cell(figures.estimate(quality.top1, 100, " %"))


def _speeds(variant: VariantResult, report: Report, loads: Sequence[int]) -> Iterator[Cell]:
    points = {p.concurrency: p for p in variant.points}
    for c in loads:
        point = points.get(c)
        if point is None or variant.status != "measured":
            yield from (Cell(NONE, why=f"{variant.name} was not measured at concurrency {c}"),) * 2
            continue
        yield _throughput(point.variant)
        yield (
            Cell(NONE, why="the reference")
            if variant is report.baseline
            else against_bf16(point, point.throughput, report.quick)
        )


def _throughput(load: LoadSummary) -> Cell:
    if not load.valid:
        return Cell("not valid", bad=True, why=load.problem)
    return Cell(figures.number(load.output_tokens_per_s))


def against_bf16(point: Point, item: Ratio | None, quick: bool) -> Cell:
    """`1.43 [1.38, 1.49]` and its verdict; no figure where a side is not valid, no verdict in a smoke run."""
    if not valid(point):
        return Cell("not valid", bad=True, why=point.variant.problem or point.baseline.problem)
    if item is None:
        return Cell(UNKNOWN, why="no pair has both values")
    return Cell(figures.interval(item), None if quick else verdict(item))


# --- latency: one row a variant and concurrency ----------
def latency(report: Report) -> Table:
    headers = ["Variant", "At", "TTFT p50", "TTFT p95", "TTFT p99", "TTFT ÷ bf16", "ITL p50", "ITL p95", "ITL ÷ bf16"]
    headers += ["E2E p50", "E2E p95"]
    rows = [
        (Cell(v.name), Cell(str(p.concurrency)), *_latencies(p, v is report.baseline, report.quick))
        for v in everyone(report)
        if v.status == "measured"
        for p in v.points
    ]
    return Table("Latency", tuple(headers), tuple(rows))


def _latencies(point: Point, is_baseline: bool, quick: bool) -> Iterator[Cell]:
    load = point.variant
    if not load.valid:
        yield from (Cell("not valid", bad=True, why=load.problem),) * 9
        return
    yield from (quantile(load.ttft_s, q) for q in (50, 95, 99))
    yield Cell(NONE, why="the reference") if is_baseline else against_bf16(point, point.ttft, quick)
    yield from (quantile(load.itl_s, q) for q in (50, 95))
    yield Cell(NONE, why="the reference") if is_baseline else against_bf16(point, point.itl, quick)
    yield from (quantile(load.e2e_s, q) for q in (50, 95))


def quantile(item: Quantiles, percent: int) -> Cell:
    """A percentile, or how many values there were where they cannot carry it."""
    value = {50: item.p50, 95: item.p95, 99: item.p99}[percent]
    if value is not None:
        return Cell(figures.duration(value))
    needed = {50: 1, 95: 20, 99: 100}[percent]
    return Cell(f"{NONE} ({item.n} of {needed})", why=f"p{percent} needs {needed} values, there were {item.n}")


# --- memory, server, fidelity: one row a variant ----------
def memory(report: Report) -> Table:
    headers = (
        "Variant",
        "On disk",
        "Loaded weights",
        "KV cache",
        "KV capacity, tokens",
        "Peak memory",
        "Start-up",
        "Prep",
    )
    return Table("Memory and start-up", headers, tuple(_memory(v) for v in everyone(report)))


def _memory(variant: VariantResult) -> tuple[Cell, ...]:
    m = variant.memory
    sizes = (m.disk_bytes, m.loaded_bytes, m.kv_bytes) if m else (None, None, None)
    return (
        Cell(variant.name),
        *(Cell(figures.size(value)) for value in sizes),
        Cell(figures.number(m.kv_capacity_tokens if m else None)),
        Cell(figures.size(m.peak_bytes if m else None)),
        Cell(figures.duration(variant.server.startup_s if variant.server else None)),
        Cell(NONE if variant.name == "bf16" and variant.prep_s is None else figures.duration(variant.prep_s)),
    )


def served(report: Report) -> Table:
    """What was really served, as the engine named it."""
    headers = ("Variant", "Engine", "Kernels", "Quantization", "dtype", "Log")
    rows = []
    for v in everyone(report):
        s = v.server
        engine = f"{s.engine} {s.version or '(version unknown)'}" if s else UNKNOWN
        words = (
            (engine, ", ".join(s.kernels) or UNKNOWN, s.quantization or NONE, s.dtype or UNKNOWN, s.log) if s else ()
        )
        rows.append((Cell(v.name), *(Cell(word) for word in words or (UNKNOWN,) * 5)))
    return Table("Kernels", headers, tuple(rows), names=6)


def fidelity(report: Report) -> Table:
    """Does the server compute what the checkpoint says? And how much of it is quantized as asked?"""
    headers = (
        "Variant",
        "Faithful",
        "Error, nats",
        "Rounding floor",
        "Limit",
        "Tokens",
        "Layers",
        "Fell back to rounding",
    )
    rows = []
    for v in everyone(report):
        f = v.fidelity
        judged = Cell(UNKNOWN) if f is None else Cell("yes") if f.faithful else Cell("no", bad=True)
        parts = (f.error, f.floor, f.limit, f.tokens) if f else (None,) * 4
        layers = (v.layers, v.layers_fallback) if v is not report.baseline else None
        counts = (Cell(NONE, why="bf16 is not quantized"),) * 2 if layers is None else map(_number, layers)
        rows.append((Cell(v.name), judged, *map(_number, parts), *counts))
    return Table("Fidelity", headers, tuple(rows), names=2)


def _number(value: float | None) -> Cell:
    return Cell(figures.number(value))


# --- requests: nothing is dropped without a count ----------
def requests(report: Report) -> Table:
    headers = ["Variant", "At", "Side", "Sent", "Complete", "Cut", "Failed", "In flight", "Prompt tok", "Output tok"]
    headers += ("Client CPU", "Server CPU", "GPU", "Prefix hits", "Valid")
    rows: list[tuple[Cell, ...]] = []
    for v in everyone(report):
        for p in v.points:
            rows.append((Cell(v.name), Cell(str(p.concurrency)), Cell("itself"), *_requests(p.variant)))
            if v is not report.baseline:
                rows.append((Cell(v.name), Cell(str(p.concurrency)), Cell("bf16 beside it"), *_requests(p.baseline)))
    return Table("Requests", tuple(headers), tuple(rows))


def _requests(load: LoadSummary) -> tuple[Cell, ...]:
    failed = ", ".join(f"{n} {reason}" for reason, n in load.failed.items())
    return (
        *(Cell(f"{n:,}") for n in (load.attempted, load.ok, load.cut)),
        Cell(failed or "0", bad=bool(failed)),
        Cell(figures.number(load.delivered_concurrency)),
        Cell(figures.number(load.prompt_tokens)),
        Cell(f"{load.output_tokens:,}" + (" (by deltas)" if load.counted_by == "deltas" else "")),
        *(
            Cell(figures.share(part))
            for part in (load.client_cpu, load.server_cpu, load.gpu, load.prefix_cache_hit_rate)
        ),
        Cell("yes") if load.valid else Cell("no", bad=True, why=load.problem),
    )
